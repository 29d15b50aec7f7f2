"""No field is dropped in silence: the table in docs/api.md is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeinfer.server import schema_requests as schema

TABLE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}


def table():
    """Field to (where, what becomes of it)."""
    text = TABLE.read_text().split("## Fields")[1].split("## Answers")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {name: (where, what) for name, where, what in rows}


def fields(model):
    return {info.alias or name for name, info in model.model_fields.items()}


def test_the_table_names_every_field_once_and_where_it_belongs():
    chat, completion = fields(schema.ChatRequest), fields(schema.CompletionRequest)
    taken = {n: w for n, (w, what) in table().items() if not what.startswith("refused")}
    assert set(taken) == chat | completion
    for name, where in taken.items():
        expected = "both" if name in chat & completion else "chat" if name in chat else \
            "completions"
        assert where == expected, name


def test_the_table_tells_what_is_ignored_and_refused_and_why():
    rows = table()
    ignored = {n: w.removeprefix("ignored: ") for n, (_, w) in rows.items()
               if w.startswith("ignored")}
    refused = {n: w.removeprefix("refused: ") for n, (_, w) in rows.items()
               if w.startswith("refused")}
    assert ignored == schema.IGNORED
    assert refused == schema.REFUSED


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
