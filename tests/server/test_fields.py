"""No field is dropped in silence: docs/api.md is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.methods import api_table, settings_table
from pipeinfer.server import schema_requests as schema

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}


def test_the_page_is_what_the_schema_gives():
    text = PAGE.read_text()
    assert text == settings_table.page(text, api_table.TABLES)
    known = (set(model.model_fields) for model in (schema.ChatRequest, schema.CompletionRequest))
    assert schema.IGNORED.keys() <= set.intersection(*known)


@pytest.mark.parametrize("name", sorted(schema.REFUSED))
@pytest.mark.parametrize(("model", "base"), [(schema.ChatRequest, CHAT),
                                             (schema.CompletionRequest, COMPLETION)])
def test_refused_fields_are_refused_and_null_is_not_given(model, base, name):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**base, name: 1})
    assert caught.value.errors()[0]["loc"] == (name,)
    model.model_validate({**base, name: None})


@pytest.mark.parametrize("name", sorted(schema.IGNORED))
@pytest.mark.parametrize("value", [None, 1, "x", True, {"a": ["b"]}])
def test_ignored_fields_take_anything(name, value):
    schema.ChatRequest.model_validate({**CHAT, name: value})
    schema.CompletionRequest.model_validate({**COMPLETION, name: value})


@pytest.mark.parametrize("body", [
    {"x_unknown": None}, {"x_unknown": 1}, {"messages": [{"role": "user", "content": "x", "y": 1}]},
    {"stream_options": {"other": True}}, {"pipeinfer": {"other": True}},
    {"tools": [{"type": "function", "function": {"name": "f", "other": 1}}]},
])
def test_unknown_fields_are_refused_at_every_depth(body):
    with pytest.raises(ValidationError):
        schema.ChatRequest.model_validate(CHAT | body)
