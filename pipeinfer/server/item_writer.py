"""Writes answers in the form of /v1/responses: items, and the events that build them.

Uses choices and their text, no HTTP and no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from pipeinfer.server.errors import ApiError
from pipeinfer.server.responses import ResponseChoice, ResponsesWriter
from pipeinfer.server.schema_items import ResponseRequest
from pipeinfer.server.tools import Call, More, Thought, Words

_REPEATED = {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "text",
             "tool_choice", "tools"}  #: what answers repeat of requests
#: of an item of text: what its events and its ids are named after, its part when that is empty,
#: and more fields of the events
_TEXTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "message": ("output_text", "msg", {
        "type": "output_text", "text": "", "annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", "rs", {"type": "reasoning_text", "text": ""}, {})}


@dataclass(slots=True)
class ItemWriter(ResponsesWriter):
    """Writes the one choice of a request. request: its fields that the answer repeats."""

    request: ResponseRequest = field(kw_only=True)
    ends_with_mark: ClassVar[bool] = False
    items: list[dict[str, Any]] = field(default_factory=list)
    _events: list[Mapping[str, Any]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.answer_id = self.answer_id or f"resp_{secrets.token_hex(14)}"

    # --- streams ------------------------------------------------------------------------------

    @override
    def opening(self) -> list[Mapping[str, Any]]:
        self._add("response.created", response=self._response("in_progress"))
        self._add("response.in_progress", response=self._response("in_progress"))
        return self._taken()

    @override
    def chunks(self, choice: ResponseChoice) -> list[Mapping[str, Any]]:
        ended = choice.complete
        self._take(choice, ended)
        if ended:
            choice.done = True
            status = self._status(choice)
            self._add(f"response.{status}", response=self._response(status))
        return self._taken()

    @override
    def closing(self) -> list[Mapping[str, Any]]:
        return []

    @override
    def failed(self, error: ApiError) -> Mapping[str, Any]:
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        if self.kept:  # a client that requests the answer again may get the event with this number
            self._count = max(0, self._count - 1)
        self._add("response.failed", response=response)
        return self._taken()[0]

    def now(self) -> dict[str, Any]:
        """Return the answer before it is complete."""
        return self._response("in_progress")

    # --- whole answers ------------------------------------------------------------------------

    @override
    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        self._take(choice, ended=True)
        return self._response(self._status(choice))

    # --- parts --------------------------------------------------------------------------------

    def _take(self, choice: ResponseChoice, ended: bool) -> None:
        for part in self._split(choice, choice.reading.take(), ended):
            if isinstance(part, Words | Thought):
                self._continue("message" if isinstance(part, Words) else "reasoning", part.text)
                continue
            if isinstance(part, Call):
                self._begin({"id": self._new_id("fc"), "type": "function_call",
                             "status": "in_progress", "call_id": part.call_id, "name": part.name,
                             "arguments": ""})
            self._arguments(part)
        if ended:
            if not self.items:
                self._continue("message", "")
            self._finish("completed" if self._status(choice) == "completed" else "incomplete")

    def _continue(self, kind: str, text: str) -> None:
        name, short, empty, extra = _TEXTS[kind]
        if not self.items or self.items[-1]["type"] != kind:
            begun: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._begin({"id": self._new_id(short), "type": kind,
                         "status": "in_progress", **begun, "content": []})
            self.items[-1]["content"] = [dict(empty)]
            self._of_item("response.content_part.added", content_index=0, part=dict(empty))
        self.items[-1]["content"][0]["text"] += text
        if text:
            self._of_item(f"response.{name}.delta", content_index=0, delta=text, **extra)

    def _arguments(self, call: Call | More) -> None:
        self.items[-1]["arguments"] += call.arguments
        if call.arguments:
            self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _begin(self, item: dict[str, Any]) -> None:
        self._finish("completed")
        self.items.append(item)
        self._add("response.output_item.added", output_index=len(self.items) - 1,
                   item=dict(item))

    def _new_id(self, kind: str) -> str:
        name = (self.name_of(self.choices[0], kind, len(self.items)) if self.kept
                else secrets.token_hex(14))
        return f"{kind}_{name}"

    def _finish(self, status: str) -> None:
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] in _TEXTS:
            (part,) = item["content"]
            name, _, _, extra = _TEXTS[item["type"]]
            self._of_item(f"response.{name}.done", content_index=0, text=part["text"], **extra)
            self._of_item("response.content_part.done", content_index=0, part=dict(part))
        else:
            self._of_item("response.function_call_arguments.done", name=item["name"],
                          arguments=item["arguments"])
        self._add("response.output_item.done", output_index=len(self.items) - 1, item=dict(item))

    def _of_item(self, kind: str, **fields: Any) -> None:
        self._add(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _add(self, kind: str, **fields: Any) -> None:
        if self.asked.stream:
            self._events.append({"type": kind, "sequence_number": self._count, **fields})
            self._count += 1

    def _taken(self) -> list[Mapping[str, Any]]:
        taken, self._events = self._events, []
        return taken

    def _status(self, choice: ResponseChoice) -> str:
        return "incomplete" if self._reason(choice) == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        request = self.request.model_dump(include=_REPEATED, exclude_none=True, by_alias=True)
        ended = status in ("completed", "incomplete")
        notes = {"notes": self.asked.notes} if self.asked.notes else {}
        return notes | {
            "id": self.answer_id, "object": "response", "created_at": self.created,
            "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete"
            else None,
            "instructions": request.get("instructions"),
            "max_output_tokens": request.get("max_output_tokens"),
            "metadata": request.get("metadata", {}), "model": self.model,
            "output": [dict(item) for item in self.items] if status != "in_progress" else [],
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "previous_response_id": None, "store": self.kept,
            "temperature": self.asked.params.temperature, "top_p": self.asked.params.top_p,
            "text": request.get("text", {"format": {"type": "text"}}),
            "tool_choice": request.get("tool_choice", "auto"), "tools": request.get("tools", []),
            "truncation": "disabled", "usage": self._tokens() if ended else None,
        }

    def _tokens(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

