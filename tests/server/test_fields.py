"""Which fields count, which are noted, which are refused: docs/api.md is what the code does."""

from __future__ import annotations

import pytest

from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}


@pytest.mark.parametrize("name", sorted(schema.REFUSED.keys() - {"prompt"}))
@pytest.mark.parametrize(("model", "base"), [(schema.ChatRequest, CHAT),
                                             (schema.CompletionRequest, COMPLETION)])
def test_refused_fields_are_refused_and_null_is_not_given(model, base, name):
    with pytest.raises(ApiError, match=f"{name} is not supported") as caught:
        schema.ignored(model.model_validate({**base, name: 1}))
    assert (caught.value.status, caught.value.param) == (400, name)
    assert schema.ignored(model.model_validate({**base, name: None})) == []


@pytest.mark.parametrize(("body", "notes"), [
    ({"user": "x", "cache_prompt": True}, []), ({"x_unknown": None}, []),
    ({"x_unknown": {"a": ["b"]}}, ["x_unknown has no effect here"]),
    ({"n_predict": 7}, ["n_predict has no effect here: use max_tokens"]),
    ({"stream_options": {"other": True}}, []),
    ({"messages": [{"role": "user", "content": "x", "y": 1}]}, [])])
def test_unknown_fields_are_noted_and_within_others_dropped(body, notes):
    assert schema.ignored(schema.ChatRequest.model_validate(CHAT | body)) == notes
