"""A view of tokens that stay what they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core.drafting import Prefix

ends = st.none() | st.integers(-9, 9)


@given(st.lists(st.integers(), max_size=8), st.lists(st.integers(), max_size=3), ends, ends,
       st.sampled_from([None, 1, 2, -1, -3]))
def test_a_prefix_is_a_list_of_what_was_there_when_it_was_made(tokens, later, start, stop, step):
    before = list(tokens)
    prefix = Prefix(tokens)
    tokens.extend(later)
    assert list(prefix) == before
    assert len(prefix) == len(before)
    assert prefix == before
    assert prefix[start:stop:step] == before[start:stop:step]
    for index in range(-len(before), len(before)):
        assert prefix[index] == before[index]
    for index in (len(before), -len(before) - 1):
        with pytest.raises(IndexError):
            prefix[index]
