"""Schemas of which a grammar holds a part: what is left out is named, and the rest holds."""

from __future__ import annotations

import json
import random

import pytest

from pipeinfer.errors import RequestError
from pipeinfer.models.text.constraint import Constraint
from pipeinfer.models.text.grammar import compile_grammar, loosely
from pipeinfer.models.text.vocabulary import Vocabulary
from tests.kit.sample import fewer

TEXT = [bytes([i]) for i in range(32, 127)]
END = len(TEXT)


@pytest.fixture(scope="module")
def vocabulary():
    made = Vocabulary([*TEXT, b"\xff<end>"], [END])
    yield made
    made.compiler.close()


def of(name, schema, **more):
    return {"type": "object", "properties": {name: schema}, "required": [name], **more}


INTEGERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 1, "maxItems": 3}
#: a schema, and what is left out of it
CASES = [
    (of("tags", {**INTEGERS, "uniqueItems": True}), ["uniqueItems"]),
    (of("file", {"type": "string", "format": "path", "maxLength": 5}), ["format path"]),
    (of("word", {"type": "string", "format": "password", "minLength": 2, "maxLength": 4}),
     ["format password"]),
    (of("raw", {"type": "string", "format": "binary", "enum": ["a", "b"]}), ["format binary"]),
    (of("map", {"type": "object", "propertyNames": {"maxLength": 3},
                "additionalProperties": {"type": "boolean"}, "maxProperties": 2}),
     ["propertyNames"]),
    (of("n", {"type": "integer", "minimum": 1, "maximum": 7, "not": {"const": 3}}), ["not"]),
    (of("kind", {"enum": ["a", "b"]}, **{"if": {"properties": {"kind": {"const": "a"}}},
                                         "then": {"required": ["x"]}, "else": {}}),
     ["else", "if", "then"]),
    (of("list", {**INTEGERS, "contains": {"const": 4}, "minContains": 1}),
     ["contains", "minContains"]),
    (of("a", {"type": "boolean"}, dependentRequired={"a": ["b"]}), ["dependentRequired"]),
    (of("code", {"type": "string", "pattern": "^(?=.*[0-9])[a-c0-9]{3}$", "maxLength": 3}),
     ["pattern"]),
    (of("code", {"type": "string", "pattern": "^(?!ab)[a-c]{2}$", "maxLength": 2}),
     ["pattern"]),
    (of("code", {"type": "string", "pattern": r"^([ab])\1$", "maxLength": 2}),
     ["pattern"]),
    (of("a", {"type": "integer", "maximum": 9, "minimum": 0}, required=["a", "b"]), []),
    (of("a", {"type": "boolean"}, required=["b", "a"], additionalProperties=False), ["the schema"]),
    (of("x", {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5},
                        {"type": "integer", "minimum": 3, "maximum": 9}]}), ["oneOf"]),
    (of("far", {"$ref": "http://example.org/x"}, properties={
        "far": {"$ref": "http://example.org/x"}, "n": {"type": "integer", "maximum": 3}},
        required=["n"]), ["the schema"]),
    (of("t", {"type": "dict"}, properties={"t": {"type": "dict"}, "b": {"type": "boolean"}},
        required=["b"]), ["the schema"]),
    ({"$defs": {"P": of("tags", {**INTEGERS, "uniqueItems": True})}, "type": "object",
      "properties": {"p": {"$ref": "#/$defs/P"}, "q": {"$ref": "#/$defs/P"}},
      "required": ["p"]}, ["uniqueItems"]),
    (of("deep", {"type": "array", "maxItems": 1, "items": of("s", {
        "type": "string", "format": "file", "maxLength": 3})}), ["format file"]),
    (of("u", {"anyOf": [{"type": "string", "format": "x-own", "maxLength": 2}, {"type": "null"}]}),
     ["format x-own"]),
]


def sampled(vocabulary, schema, seed):
    """A text of the schema's grammar, by chance; shorter ones are likelier."""
    rng = random.Random(seed)
    constraint = Constraint(vocabulary, compile_grammar("json_schema", schema, vocabulary))
    path = []
    while len(path) < 400:
        allowed = constraint.allowed(path).nonzero()[0].tolist()
        if END in allowed:
            return "".join(TEXT[i].decode() for i in path)
        ending = [i for i in allowed if TEXT[i] in b'"}],:'] if rng.random() < 0.6 else []
        path.append(rng.choice(ending or allowed))
    return None


def without(schema, left_out):
    """The schema as its standard reads it, without what was left out."""
    if isinstance(schema, dict):
        return {key: without(value, left_out) for key, value in schema.items()
                if key not in left_out}
    return [without(one, left_out) for one in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize(("schema", "left_out"), CASES, ids=lambda case: str(case)[-40:])
def test_what_is_not_left_out_holds(vocabulary, schema, left_out):
    jsonschema = pytest.importorskip("jsonschema_rs", reason="checks what grammars allow")
    held, found = loosely(schema, vocabulary)
    assert found == left_out
    wanted = {} if found == ["the schema"] else without(
        schema, {name.split()[0] for name in found})
    validator = jsonschema.validator_for(wanted)
    texts = [sampled(vocabulary, held, seed) for seed in range(fewer(200, 20))]
    assert sum(text is not None for text in texts) > len(texts) // 2
    for text in filter(None, texts):
        assert validator.is_valid(json.loads(text)), text


def test_what_a_grammar_holds_stays_as_it_is(vocabulary):
    schema = of("a", {"type": "string", "format": "date", "pattern": "^2"}, title="x")
    assert loosely(schema, vocabulary) == (schema, [])


@pytest.mark.parametrize("schema", [
    of("a", {"type": "array", "uniqueItems": True}, allOf=[{"not": {}}, of("b", INTEGERS)]),
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"anyOf": [{"type": "string", "pattern": "(?=a)"}, {"$ref": "#/nowhere"}]},
    {"type": "object", "required": 5, "properties": 7}, {"enum": []}, {"$ref": "#"},
    {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, {"not": True},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "string", "minLength": 10**30},
    {"type": "number", "multipleOf": 0}, {"pattern": "(" * 500}, {"oneOf": "x", "items": [1]},
])
def test_something_fits_whatever_the_schema(vocabulary, schema):
    held, left_out = loosely(schema, vocabulary)
    assert left_out
    assert compile_grammar("json_schema", held, vocabulary)


def test_depth_and_size_are_no_traps(vocabulary):
    deep = {"not": {}}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match=r"nested too deeply|recursion depth"):
        loosely(deep, vocabulary)
    with pytest.raises(RequestError, match="too big"):
        loosely({"description": "x" * 300_000}, vocabulary)
