"""Writes answers in the form of Anthropic's /v1/messages: content blocks, and the events that build
them.

Uses choices and their text, no HTTP and no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic_core import from_json
from typing_extensions import override

from pipeinfer.server.errors import ApiError
from pipeinfer.server.responses import ResponseChoice, ResponsesWriter
from pipeinfer.server.tools import Call, Thought, Words

#: of a block, the field that its deltas continue, and what that is called in them
_FIELDS = {"text": ("text", "text_delta", "text"),
           "thinking": ("thinking", "thinking_delta", "thinking"),
           "tool_use": ("input", "input_json_delta", "partial_json")}


@dataclass(slots=True)
class BlockWriter(ResponsesWriter):
    """Writes the one choice of a request. Arguments of calls are text until they are complete."""

    ends_with_mark: ClassVar[bool] = False
    PING: ClassVar[Mapping[str, Any]] = {"type": "ping"}
    blocks: list[dict[str, Any]] = field(default_factory=list)
    _events: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answer_id = self.answer_id or f"msg_{secrets.token_hex(14)}"

    # --- streams ------------------------------------------------------------------------------

    @override
    def opening(self) -> list[Mapping[str, Any]]:
        count = self.choices[0].generation.counts.prompt
        message = self._message([], None, None, {"input_tokens": count, "output_tokens": 0})
        return [{"type": "message_start", "message": message}, self.PING]

    @override
    def chunks(self, choice: ResponseChoice) -> list[Mapping[str, Any]]:
        ended = choice.complete
        self._take(choice, ended)
        if ended:
            choice.done = True
            self._end_block()
            reason, stop = self._end(choice)
            notes = {"notes": self.asked.notes} if self.asked.notes else {}
            self._add("message_delta", delta={"stop_reason": reason, "stop_sequence": stop},
                      usage=self._counts(), **notes)
            self._add("message_stop")
        taken, self._events = self._events, []
        return taken

    @override
    def closing(self) -> list[Mapping[str, Any]]:
        return []

    @override
    def failed(self, error: ApiError) -> Mapping[str, Any]:
        return error.message_body()

    # --- whole answers ------------------------------------------------------------------------

    @override
    def whole(self) -> Mapping[str, Any]:
        (choice,) = self.choices
        self._take(choice, ended=True)
        content = [
            {**block, "input": _object(block["input"])}
            if block["type"] == "tool_use" else block for block in self.blocks]
        message = self._message(content, *self._end(choice), self._counts())
        return message | ({"notes": self.asked.notes} if self.asked.notes else {})

    # --- parts --------------------------------------------------------------------------------

    def _take(self, choice: ResponseChoice, ended: bool) -> None:
        for part in self._split(choice, choice.reading.take(), ended):
            if isinstance(part, Words | Thought):
                self._continue("text" if isinstance(part, Words) else "thinking", part.text)
                continue
            if isinstance(part, Call):
                name = f"toolu_{part.call_id.removeprefix('call_')}"
                self._begin({"type": "tool_use", "id": name, "name": part.name, "input": {}})
            self._more(part.arguments)

    def _continue(self, kind: str, text: str) -> None:
        if not self.blocks or self.blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            self._begin({"type": kind, _FIELDS[kind][0]: "", **signed})
        self._more(text)

    def _begin(self, block: dict[str, Any]) -> None:
        self._end_block()
        self._add("content_block_start", index=len(self.blocks), content_block=dict(block))
        self.blocks.append(block)
        if block["type"] == "tool_use":
            block["input"] = ""

    def _more(self, text: str) -> None:
        own, kind, name = _FIELDS[self.blocks[-1]["type"]]
        self.blocks[-1][own] += text
        if text:
            self._add("content_block_delta", index=len(self.blocks) - 1,
                      delta={"type": kind, name: text})

    def _end_block(self) -> None:
        if self.blocks:
            self._add("content_block_stop", index=len(self.blocks) - 1)

    def _add(self, kind: str, **fields: Any) -> None:
        if self.asked.stream:
            self._events.append({"type": kind, **fields})

    def _end(self, choice: ResponseChoice) -> tuple[str, str | None]:
        """Return stop_reason and stop_sequence."""
        reason = self._reason(choice)
        if reason == "length":
            return "max_tokens", None
        if stop := choice.reading.stop:
            return "stop_sequence", stop
        return ("tool_use" if reason == "tool_calls" else "end_turn"), None

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None,
                 usage: Mapping[str, int]) -> dict[str, Any]:
        return {"id": self.answer_id, "type": "message", "role": "assistant",
                "model": self.model, "content": content, "stop_reason": reason,
                "stop_sequence": stop, "usage": usage}

    def _counts(self) -> dict[str, int]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"]}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, as far as they go; what is no JSON object becomes a field of
    one."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}
