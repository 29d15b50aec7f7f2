"""Function calls: how they look in a model's text, and a grammar that enforces them.

Two styles are supported, recognised by the model's chat template: Hermes (`<tool_call>` around a
JSON object with "name" and "arguments"), and Llama 3 (the whole answer is an object with "name"
and "parameters"). Uses text and JSON, no HTTP and no engine.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.models.text.json_schema import closed
from pipeinfer.server.schema_replies import ReplyCall, ReplyMore

#: parameters of a function that has none
NONE: dict[str, Any] = {"type": "object", "properties": {}}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BEGUN = re.compile(OPEN + r'\s*\{\s*"name"\s*:\s*("[^"\\]*")\s*,\s*'
                    r'"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Call:
    """A function call; arguments as JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_json(self, index: int | None = None) -> ReplyCall:
        """Return the call in the form of the OpenAI API. index: its number, in streams."""
        call: ReplyCall = {"id": self.call_id, "type": "function",
                           "function": {"name": self.name, "arguments": self.arguments}}
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True, slots=True)
class More:
    """A further piece of the arguments of the last call, in a stream."""

    arguments: str

    def to_json(self, index: int) -> ReplyMore:
        """Return the piece of call number `index` in the form of the OpenAI API."""
        return {"index": index, "function": {"arguments": self.arguments}}


def is_hermes(template: str) -> bool:
    """Whether a chat template uses the Hermes style."""
    return OPEN in template


def parse_call(text: str) -> Call | None:
    """Return the call in a JSON text, None if it is none."""
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


class _Arguments:
    """Finds the end of a JSON object that arrives in pieces. is_kept: whether the call is
    returned."""

    def __init__(self, is_kept: bool) -> None:
        self.is_kept, self.over = is_kept, False
        self._depth, self._in_text, self._escaped = 0, False, False

    def end_in(self, text: str) -> int:
        """Return how many of the next characters belong to the object."""
        if self.over:
            return 0
        for at, char in enumerate(text):
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                continue
            self._in_text = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if not self._depth:
                self.over = True
                return at + 1
        return len(text)


class CallParser:
    """Separates calls from content in a text that arrives in pieces.

    Text that may be the beginning of a call is held back; if it turns out not to be one, it is
    returned as content.
    hermes: whether calls have the Hermes form. most: further calls are dropped.
    pieces: return a Hermes call first without arguments, and these as they arrive.
    """

    def __init__(self, hermes: bool, most: int = 1 << 30, pieces: bool = False) -> None:
        self._hermes, self._most, self._pieces = hermes, most, pieces
        self._arguments: _Arguments | None = None  # of the call that is being given in pieces
        self._held = ""
        self._is_text = False  # Llama 3: the answer does not begin with a call
        self.calls = 0  #: how many have been found

    def push(self, text: str) -> tuple[str, list[Call | More]]:
        """Return the content that is certain, and the complete calls or pieces of them."""
        self._held += text
        return self._push_hermes() if self._hermes else self._push_llama()

    def finish(self) -> tuple[str, list[Call | More]]:
        """Return the text that was held back, when no more text comes."""
        held, self._held = self._held, ""
        if self._arguments is not None:
            return "", []
        if self._hermes:
            if held.startswith(OPEN) and (call := parse_call(held[len(OPEN) :])) is not None:
                return "", self._taken([call])
            return held, []
        parts = held.strip().removeprefix(_PYTHON_TAG).split(";")
        found = [parse_call(part) for part in parts] if held.strip() else []
        if not found or None in found:
            return held, []
        return "", self._taken([call for call in found if call is not None])

    def _taken(self, calls: list[Call]) -> list[Call | More]:
        kept = calls[: self._most - self.calls]
        self.calls += len(kept)
        return list(kept)

    def _push_hermes(self) -> tuple[str, list[Call | More]]:
        content = ""
        calls: list[Call | More] = []
        while True:
            if self._arguments is not None and not self._push_arguments(calls):
                break
            start = self._held.find(OPEN)
            if start < 0:
                keep = partial(self._held, OPEN)
                cut = len(self._held) - keep
                content, self._held = content + self._held[:cut], self._held[cut:]
                break
            content, self._held = content + self._held[:start], self._held[start:]
            if self._pieces and (begun := _BEGUN.match(self._held)):
                is_kept = self.calls < self._most
                if is_kept:
                    calls += self._taken([Call(json.loads(begun[1]), "")])
                self._held = self._held[begun.end() :]
                self._arguments = _Arguments(is_kept)
                continue
            end = self._held.find(CLOSE)
            if end < 0:
                break
            block, self._held = self._held[:end], self._held[end + len(CLOSE) :]
            call = parse_call(block[len(OPEN) :])
            if call is None:
                content += block + CLOSE
            else:
                calls += self._taken([call])
        if self.calls and not content.strip():
            content = ""  # line breaks between calls
        return content, calls

    def _push_arguments(self, calls: list[Call | More]) -> bool:
        """Append the arguments that have arrived; return whether the call is complete."""
        reading = self._arguments
        assert reading is not None
        end = reading.end_in(self._held)
        if self._held[:end] and reading.is_kept:
            calls.append(More(self._held[:end]))
        self._held = self._held[end:]
        if not reading.over or (close := self._held.find(CLOSE)) < 0:
            return False
        self._held, self._arguments = self._held[close + len(CLOSE) :], None
        return True

    def _push_llama(self) -> tuple[str, list[Call | More]]:
        begun = self._held.lstrip()
        if not self._is_text and (not begun or begun[0] == "{" or _PYTHON_TAG.startswith(
                begun[: len(_PYTHON_TAG)])):
            return "", []
        self._is_text = True
        content, self._held = self._held, ""
        return content, []


def call_grammar(functions: list[dict[str, Any]], hermes: bool, open_is_token: bool, *,
                 most: int = 1, words: bool = False) -> str:
    """Return a lark grammar of one to `most` calls of the functions.

    open_is_token: whether the vocabulary has the Hermes marks as tokens.
    words: whether words may come before the calls, or instead of them (Hermes only).
    Raises RequestError for parameters that are nested too deeply.
    """
    key = "arguments" if hermes else "parameters"
    # A rule for each function: references within its parameters count from their own root.
    rules = "call: " + " | ".join(f"call{i}" for i in range(len(functions))) + "\n" + "".join(
        f'call{i}: "{{\\"name\\": \\"{f["name"]}\\", \\"{key}\\": " given{i} "}}"\n'
        f'given{i}: %json {json.dumps(closed(f.get("parameters") or NONE))}\n'
        for i, f in enumerate(functions))
    more = "" if most == 1 else f"{{0,{most - 1}}}"
    if not hermes:
        rest = f' (";" call){more}' if more else ""
        return f"start: call{rest}\n{rules}"
    first, last = (OPEN, CLOSE) if open_is_token else (f'"{OPEN}"', f'"{CLOSE}"')
    rest = f' ("\\n" marked){more}' if more else ""
    rules = f'marked: {first} "\\n" call "\\n" {last}\n{rules}'
    if not words:
        return f"start: marked{rest}\n{rules}"
    if open_is_token:
        return f"start: WORDS | WORDS? marked{rest}\nWORDS: /(.|\\n)+/\n{rules}"
    return (f'start: WORDS | opened "\\n" call "\\n" {last}{rest}\n'
            f"opened[suffix={first}]: /(.|\\n)*/\n"
            f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/\n{rules}")


def partial(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1)
                 if mark.startswith(text[-n:])), 0)
