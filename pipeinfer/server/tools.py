"""The parts of an answer: words, reasoning, and function calls with arguments in pieces."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipeinfer.models.text.grammar import target

#: parameters of a function that has none
NONE: dict[str, Any] = {"type": "object", "properties": {}}
#: of values, their types in a JSON schema
TYPES: dict[type, set[str]] = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"},
    list: {"array"}, dict: {"object"}, type(None): {"null"}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    tools: in the form that templates take.
    most: most calls of one answer. required: whether there must be one.
    grammar: the lark grammar that restricts the answer to calls; "" for none.
    """

    tools: list[dict[str, Any]]
    most: int
    required: bool = False
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function call; arguments as JSON text, which may go on in further pieces."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """Return the call in the form of the OpenAI API. index: its number, in streams."""
        call = {"id": self.call_id, "type": "function",
                "function": {"name": self.name, "arguments": self.arguments}}
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True, slots=True)
class More:
    """A further piece of the arguments of the last call, in a stream."""

    arguments: str

    def to_json(self, index: int) -> dict[str, Any]:
        """Return the piece of call number `index` in the form of the OpenAI API."""
        return {"index": index, "function": {"arguments": self.arguments}}


Part: TypeAlias = Words | Thought | Call | More


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts of an answer with the pieces of each in one."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, More) and isinstance(last, Call):
            out[-1] = dataclasses.replace(last, arguments=last.arguments + part.arguments)
        elif isinstance(part, Words | Thought) and isinstance(last, type(part)):
            out[-1] = type(part)(last.text + part.text)
        else:
            out.append(part)
    return out


def types_of(schema: Any, root: Any, depth: int = 8) -> set[str]:
    """Return the types that a JSON schema allows, none if it does not say.

    root: the schema in which references count. depth: of references and choices.
    """
    if not isinstance(schema, Mapping) or not depth:
        return set()
    named = schema.get("type", [])
    found = {named} if isinstance(named, str) else {t for t in named if isinstance(t, str)}
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found = {t for value in values for t in TYPES[type(value)]}
    parts = [target(schema.get("$ref"), root), *(
        part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key) or ())]
    return found.union(*(types_of(part, root, depth - 1) for part in parts))
