"""How many rows are exact together is measured once for what makes no difference to it."""

from __future__ import annotations

import pytest

from pipeinfer.backends.exact_width import known_widths
from pipeinfer.backends.toy import ToyBackend


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    return tmp_path


def measured(identity=("model",), **sizes):
    """The widths, and whether anything was decoded for them."""
    backend = ToyBackend.load(log=True, **sizes)
    found = known_widths(backend, identity)
    return found, any(entry[0] == "decode" for entry in backend.log)


@pytest.mark.parametrize("sizes", [{}, {"n_ctx": 1024}, {"n_batch": 512}])
def test_larger_caches_and_batches_share_what_is_known(sizes):
    first, decoded = measured()
    assert decoded
    assert measured(**sizes) == (first, False)


@pytest.mark.parametrize("sizes", [{"n_ctx": 64}, {"n_batch": 8}, {"identity": ("another",)}])
def test_what_may_make_a_difference_is_measured(sizes):
    measured()
    assert measured(**sizes)[1]


@pytest.mark.parametrize("text", ["", "[]", "[0, 1, 1, 1, 1, 1, 1]", "[99, 1, 1, 1, 1, 1, 1]",
                                  "[4, 1, 1, 1, 1, 1, -1]", '["4", 1, 1, 1, 1, 1, 1]', "{"])
def test_a_note_that_nobody_can_have_written_is_measured_again(own_cache, text):
    first, _ = measured()
    (note,) = own_cache.glob("widths-*")
    note.write_text(text)
    again, decoded = measured()
    assert decoded
    assert again.exact == first.exact
