"""Which objects of a schema are closed, and what a grammar of it then allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeinfer.errors import RequestError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.constraint import Constraint
from pipeinfer.models.text.grammar import closed, compile_grammar
from pipeinfer.models.text.vocabulary import Vocabulary

MODEL = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded" / "target.gguf"
A, B = ({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        for name in "ab")


@pytest.fixture(scope="module")
def follows():
    tokenizer = open_tokenizer(MODEL)
    vocabulary = Vocabulary.of(tokenizer)

    def check(schema, value):
        """Whether the grammar of a schema allows a JSON text and its end."""
        constraint = Constraint(vocabulary, compile_grammar("json_schema", schema, vocabulary))
        mask = constraint.allowed(tokenizer.encode(json.dumps(value), add_bos=False))
        return mask is not None and any(mask[i] for i in tokenizer.eog_ids)

    yield check
    vocabulary.compiler.close()
    tokenizer.close()


@pytest.mark.parametrize(("schema", "good", "invented"), [
    (A, {"a": 1}, {"a": 1, "x": 2}),
    ({"type": "object", "properties": {"in": A}}, {"in": {"a": 1}}, {"in": {"a": 1, "x": 2}}),
    ({"type": "array", "items": A}, [{"a": 1}], [{"a": 1, "x": 2}]),
    ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"a": 1}, {"a": 1, "x": 2}),
    ({"anyOf": [A, B]}, {"b": 1}, {"b": 1, "x": 2}),
    ({"allOf": [A]}, {"a": 1}, {"a": 1, "x": 2}),
    ({"type": "object", "properties": {}}, {}, {"x": 1}),
    ({"type": "object", "additionalProperties": A}, {"k": {"a": 1}}, {"k": {"a": 1, "x": 2}}),
])
def test_objects_have_the_fields_that_they_list(follows, schema, good, invented):
    assert follows(schema, good)
    assert not follows(schema, invented)


@pytest.mark.parametrize(("schema", "value"), [
    ({**A, "additionalProperties": True}, {"a": 1, "x": 2}),
    ({**A, "additionalProperties": {"type": "integer"}}, {"a": 1, "x": 2}),
    ({"allOf": [A, B]}, {"a": 1, "b": 2}),
    ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, {"a": 1, "b": 2}),
    ({**A, "anyOf": [B]}, {"a": 1, "b": 2}),
    ({"type": "object"}, {"x": 1}),
])
def test_what_is_open_by_its_words_or_in_parts_stays_open(follows, schema, value):
    assert follows(schema, value)


def test_only_schemas_are_read_and_nothing_is_changed_in_place():
    schema = {"properties": {"properties": {"enum": [A]}, "const": A}, "default": A}
    before = json.dumps(schema)
    out = closed(schema)
    assert json.dumps(schema) == before
    assert out["properties"]["properties"] == {"enum": [A]}
    assert out["properties"]["const"] == {**A, "additionalProperties": False}
    assert out["default"] == A
    assert closed(True) is True
    loop = {"$ref": "#/$defs/x", "properties": {}, "$defs": {"x": {"$ref": "#/$defs/x"}}}
    assert closed(loop) == loop


def test_depth_is_no_trap():
    schema = A
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="too deeply"):
        closed(schema)
