"""Functions that a model may call: how calls look in its text, and a grammar that forces one.

Two styles are known, told apart by the model's chat template: Hermes (`<tool_call>` around a JSON
object with "name" and "arguments"), and Llama 3 (the whole answer is an object with "name" and
"parameters"). Knows text and JSON, no HTTP and no engine.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.models.text.json_schema import closed
from pipeinfer.server.schema_replies import ReplyCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class Call:
    """A function call; arguments as JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_json(self) -> ReplyCall:
        """The call in the form of the OpenAI API."""
        return {"id": self.call_id, "type": "function",
                "function": {"name": self.name, "arguments": self.arguments}}


def is_hermes(template: str) -> bool:
    """Whether a chat template teaches the Hermes style."""
    return OPEN in template


def parse_call(text: str) -> Call | None:
    """The call in a JSON text, if it is one."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters"))
    if isinstance(arguments, str):
        return Call(data["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(data["name"], json.dumps(arguments, ensure_ascii=False))


class CallParser:
    """Tells calls from content in a text that comes in pieces.

    Text that may be the beginning of a call is held back; text that turns out to be none is
    given as content.
    """

    def __init__(self, hermes: bool) -> None:
        self._hermes = hermes
        self._held = ""
        self._is_text = False  # Llama 3: the answer has begun with something else than a call
        self.calls = 0  #: how many have been found

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Content that is certain, and the calls that are complete."""
        self._held += text
        return self._push_hermes() if self._hermes else self._push_llama()

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back when no more text comes."""
        held, self._held = self._held, ""
        if self._hermes:
            if held.startswith(OPEN) and (call := parse_call(held[len(OPEN) :])) is not None:
                self.calls += 1
                return "", [call]
            return held, []
        parts = held.strip().removeprefix(_PYTHON_TAG).split(";")
        found = [parse_call(part) for part in parts] if held.strip() else []
        if not found or None in found:
            return held, []
        self.calls += len(found)
        return "", [call for call in found if call is not None]

    def _push_hermes(self) -> tuple[str, list[Call]]:
        content, calls = "", []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = _partial(self._held, OPEN)
                cut = len(self._held) - keep
                content, self._held = content + self._held[:cut], self._held[cut:]
                break
            content, self._held = content + self._held[:start], self._held[start:]
            end = self._held.find(CLOSE)
            if end < 0:
                break
            block, self._held = self._held[:end], self._held[end + len(CLOSE) :]
            call = parse_call(block[len(OPEN) :])
            if call is None:
                content += block + CLOSE
            else:
                calls.append(call)
        self.calls += len(calls)
        if self.calls and not content.strip():
            content = ""  # line breaks between calls
        return content, calls

    def _push_llama(self) -> tuple[str, list[Call]]:
        begun = self._held.lstrip()
        if not self._is_text and (not begun or begun[0] == "{" or _PYTHON_TAG.startswith(
                begun[: len(_PYTHON_TAG)])):
            return "", []
        self._is_text = True
        content, self._held = self._held, ""
        return content, []


def forced_grammar(functions: list[dict[str, Any]], hermes: bool, open_is_token: bool) -> str:
    """A grammar (lark) of one call to one of the functions.

    open_is_token: the vocabulary has the Hermes marks as tokens of their own.
    """
    key = "arguments" if hermes else "parameters"
    calls = [{
        "type": "object", "additionalProperties": False, "required": ["name", key],
        "properties": {"name": {"const": f["name"]},
                       key: closed(f.get("parameters") or {"type": "object"})},
    } for f in functions]
    schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    if not hermes:
        return f"start: call\ncall: %json {schema}\n"
    first, last = (OPEN, CLOSE) if open_is_token else (f'"{OPEN}"', f'"{CLOSE}"')
    return f'start: {first} "\\n" call "\\n" {last}\ncall: %json {schema}\n'


def _partial(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1)
                 if mark.startswith(text[-n:])), 0)
