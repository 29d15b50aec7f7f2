"""Grammars: which tokens may follow a path of output tokens.

A grammar is compiled once, where a request arrives, to a text that is sent with the lane's sampling
parameters. The code that chooses or drafts tokens makes a `Constraint` of it. The mask after a path
is a function of (vocabulary, grammar, path) and of nothing else, so speculation, branches and
cancellations cannot change what a grammar allows. JSON schemas are compiled as their authors mean
them for models: an object has only the fields listed. By the standard, an object with `properties`
may have any other fields, too; a model would invent fields until it is cut off.

Independent of models, ranks, policies and sampling. The parser is llguidance, loaded with the first
grammar.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from pipeinfer.errors import RequestError
from pipeinfer.models.text.constraint import Constraint
from pipeinfer.models.text.gbnf import to_lark
from pipeinfer.models.text.helper import serve
from pipeinfer.models.text.vocabulary import Vocabulary, llguidance

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "prefixItems", "items")
_ONES = ("items", "additionalProperties", "additionalItems", "contains", "unevaluatedItems")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def closed(schema: Any) -> Any:
    """Return the schema with objects closed that have `properties` and no rule for other fields.

    Fields that are required without being described are listed with those that are.

    Objects that several schemas describe together (allOf, or parts besides properties) stay open,
    because each part would forbid the others' fields. Raises RequestError for a schema nested too
    deeply.
    """
    try:
        return _Closing(schema).close(schema)
    except RecursionError:
        raise RequestError("it is nested too deeply") from None


class _Closing:
    def __init__(self, schema: Any) -> None:
        self._shared: set[int] = set()  # identities of parts of what several schemas describe
        self._mark(schema, schema)

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        out = dict(schema)
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                out[key] = {name: self.close(inner) for name, inner in value.items()}
            elif key in (*_LISTS, "allOf") and isinstance(value, list):
                out[key] = [self.close(inner) for inner in value]
            elif key in _ONES and isinstance(value, dict):
                out[key] = self.close(value)
        if _is_closable(schema) and id(schema) not in self._shared:
            out["additionalProperties"] = False
            out["properties"] |= {name: True for name in _listed(schema, "required")
                                  if isinstance(name, str) and name not in out["properties"]}
        return out

    def _mark(self, schema: Any, root: Any) -> None:
        """Find the parts of objects that are described by several schemas."""
        if not isinstance(schema, dict):
            return
        several = [part for key in ("allOf", "anyOf", "oneOf") for part in _listed(schema, key)]
        if len(_listed(schema, "allOf")) > 1 or ("properties" in schema and (
                several or "$ref" in schema)):
            for part in [*several, schema]:
                self._share(part, root)
        for key in _MAPS:
            inner = schema.get(key)
            for value in inner.values() if isinstance(inner, dict) else ():
                self._mark(value, root)
        for value in [*several, *_listed(schema, "items"), *_listed(schema, "prefixItems"),
                      *(schema.get(key) for key in _ONES)]:
            self._mark(value, root)

    def _share(self, part: Any, root: Any) -> None:
        if not isinstance(part, dict) or id(part) in self._shared:
            return
        self._shared.add(id(part))
        self._share(target(part.get("$ref"), root), root)
        for key in ("allOf", "anyOf", "oneOf"):
            for inner in _listed(part, key):
                self._share(inner, root)


def _is_closable(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPEN)


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def target(reference: Any, root: Any) -> Any:
    """The part of the schema that a reference points to; None for one outside the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    at = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, dict) else None
    return at


MAX_BYTES = 256 * 1024  #: longest accepted grammar or schema, as UTF-8
KINDS = ("json_object", "json_schema", "gbnf", "regex", "lark")
_HEADER = '%llguidance {"no_forcing": true}\n'
#: white space between the parts of a JSON text, as in llama.cpp: without a bound, weak models may
#: generate nothing else
_JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"


# --- compiling --------------------------------------------------------------------------------


def compile_grammar(kind: str, text: str | Mapping[str, Any] | bool, vocabulary: Vocabulary) -> str:
    """Compile a grammar to a text for `Constraint`.

    kind: json_object (any JSON object), json_schema, gbnf (llama.cpp's, from rule `root`), regex
        (the whole output matches) or lark (llguidance's dialect)
    text: the grammar; for json_schema the schema, as text or as an object; unused for json_object
    vocabulary: of the model
    Terminals take the longest match. Thread-safe; takes `helper.SECONDS` at most, and longer in
    the first call. Raises RequestError when the grammar cannot be used.
    """
    match kind:
        case "json_object":
            written = json.dumps({"type": "object"})
        case "json_schema":
            written = _written(text)
        case "gbnf" | "regex" | "lark" if isinstance(text, str):
            written = text
        case _:
            raise RequestError(f"a grammar must be a text of kind {', '.join(KINDS)}")
    _check_size(written)
    return _compile_once(kind, written, vocabulary)


def loosely(schema: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a schema that a grammar can hold, and what is left out.

    llguidance ignores keywords that it lacks. If that does not help, patterns are left out, too,
    and finally the whole schema.

    Takes `helper.SECONDS` at most. Raises RequestError for a schema that is too big or nested too
    deeply.
    """
    written = _written(schema)
    _check_size(written)
    answer = _loosen_once(written, vocabulary)
    return answer["schema"], answer["left_out"]


@functools.lru_cache(maxsize=256)
def _loosen_once(text: str, vocabulary: Vocabulary) -> dict[str, Any]:
    llguidance()
    return vocabulary.compiler.ask({"kind": "loosely", "text": text})


@functools.lru_cache(maxsize=64)
def _compile_once(kind: str, text: str, vocabulary: Vocabulary) -> str:
    llguidance()
    try:
        compiled: str = vocabulary.compiler.ask({"kind": kind, "text": text})["compiled"]
    except RequestError as error:
        raise RequestError(f"the {_name(kind)} cannot be used: {error}") from error
    return compiled


def compile_here(kind: str, text: str, vocabulary: Vocabulary) -> str:
    """Compile as `compile_grammar` does, but in this process, which a hostile grammar can end."""
    body = from_schema(text) if kind.startswith("json") else from_text(kind, text, vocabulary)
    compiled = _HEADER + body
    if complaint := vocabulary.complaint(compiled):
        raise RequestError(_short(complaint))
    first = Constraint(vocabulary, compiled)
    allowed = first.allowed(())
    if first.failure or allowed is None or not allowed.any():
        raise RequestError(_short(first.failure) or "no text satisfies it")
    return compiled


def _loosen_here(text: str, vocabulary: Vocabulary) -> dict[str, Any]:
    schema = json.loads(text)
    options = {"x-guidance": {"whitespace_pattern": _JSON_SPACE, "lenient": True}}
    for held, left_out in ((schema, ()), (schema | options, ()),
                           (_without("pattern", schema | options), ("pattern",))):
        with contextlib.suppress(RequestError):
            compiled = compile_here("json_schema", json.dumps(held), vocabulary)
            ignored = map(_ignored, vocabulary.warnings(compiled))
            return {"schema": held, "left_out": [*left_out, *itertools.chain(*ignored)]}
    return {"schema": {}, "left_out": ["the schema"]}


def _ignored(warning: str) -> list[str]:
    """The keywords that one of llguidance's warnings is about."""
    _, keys, names = warning.partition("Unimplemented keys: ")
    if keys:
        return list(json.loads(names))
    return [warning.partition(" not fully")[0].replace("Unknown format:", "format")]


def _without(name: str, schema: Any) -> Any:
    """A schema without one of the keywords, wherever it is."""
    if isinstance(schema, dict):
        return {key: _without(name, value) for key, value in schema.items()
                if key != name or not isinstance(value, str)}
    return [_without(name, one) for one in schema] if isinstance(schema, list) else schema


def from_text(kind: str, text: str, vocabulary: Vocabulary) -> str:
    """Return a grammar of another kind in llguidance's dialect. Raises RequestError."""
    if kind == "gbnf":
        return to_lark(text, vocabulary.token_id, vocabulary.end_ids)
    if kind == "regex":
        return f"start: /{llguidance().regex_to_lark(text, 'd')}/"
    if "%llguidance" in text:
        raise RequestError("%llguidance is not allowed: its options are fixed")
    return text


def _written(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from error


def from_schema(text: str) -> str:
    """Return a JSON schema in llguidance's dialect. Raises RequestError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is not valid JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError("it is not an object like {\"type\": \"object\", ...}")
    schema = closed(schema)
    schema.setdefault("x-guidance", {"whitespace_pattern": _JSON_SPACE})
    return f"start: %json {json.dumps(schema)}"


def _check_size(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"a grammar must be valid Unicode text: {error}") from error
    if size > MAX_BYTES:
        raise RequestError(f"a grammar of {size} bytes is too big: at most {MAX_BYTES} bytes are "
                           "allowed")


def _name(kind: str) -> str:
    return "JSON schema" if kind.startswith("json") else "regular expression" \
        if kind == "regex" else "grammar"


def _short(complaint: str) -> str:
    """llguidance's message on one line, without its position in the wrapped text."""
    text = re.sub(r"^(at )?\d+\(\d+\): ", "", complaint)
    text = re.split(r"\n\s+\d+ \| |<state>|<non-verbose/>", text)[0]
    text = " ".join(text.removeprefix("failed to compile JSON schema: ").split())
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    return text if len(text) < 400 else text[:400] + " ..."


# --- masks ------------------------------------------------------------------------------------


def _serve(hello: dict[str, Any]) -> Any:
    vocabulary = Vocabulary.from_json(hello)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        kind, text = question["kind"], question["text"]
        if kind == "loosely":
            return _loosen_here(text, vocabulary)
        return {"compiled": compile_here(kind, text, vocabulary)}

    return answer


if __name__ == "__main__":
    serve(_serve)
