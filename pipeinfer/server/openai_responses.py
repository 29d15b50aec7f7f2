"""OpenAI's /v1/responses: how its requests become requests for chats, and its answers, which are
items, and events that build them.

Nothing is stored between requests: a conversation is what `input` holds. Uses choices and their
text, no HTTP and no engine.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AliasChoices, Discriminator, Field, JsonValue, Tag
from typing_extensions import override

from pipeinfer.server import schema_requests as schema
from pipeinfer.server.answer_writer import AnswerWriter, ResponseChoice
from pipeinfer.server.errors import ApiError, bad
from pipeinfer.server.schema_requests import OtherTool, Strict, Translated
from pipeinfer.server.tools import Call, More, Thought, Words

#: types of items that other tools than functions bring into a conversation
_OF_TOOLS = re.compile(r"_call$|_call_output$|^mcp_|^tool_search_output$|^compaction")


class TextPart(Strict):
    """A part of a content that is text, or that of a refusal."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ImagePart(Strict):
    """A picture: a data: URI, or an http(s) URL of one of --image-urls. detail has no effect."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[ImagePart, Tag("Image")],
    Discriminator(lambda part: "Image" if schema.type_of(part) == "input_image" else "Text")]


class MessageItem(Strict):
    """One turn of a conversation. reasoning: what the model thought."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    reasoning: str | None = None
    reasoning_content: str | None = None


class CallItem(Strict):
    """A call that the model made; arguments as JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Strict):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningItem(Strict):
    """What the model thought before the next turn. Only its content is read."""

    type: Literal["reasoning"]
    content: JsonValue = None

    @property
    def text(self) -> str:
        """The texts of its content."""
        parts = self.content if isinstance(self.content, list) else []
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


class OtherItem(OtherTool):
    """A call, or the result of a call, of a tool that is no function: left out."""


def _kind(item: Any) -> str:
    kind = schema.type_of(item) or "message"
    if kind in (known := {"function_call": "Call", "function_call_output": "Result",
                          "reasoning": "Reasoning"}):
        return known[kind]
    return "Other" if _OF_TOOLS.search(kind) else "Message"


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("Message")] | Annotated[CallItem, Tag("Call")]
    | Annotated[ResultItem, Tag("Result")] | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[OtherItem, Tag("Other")], Discriminator(_kind)]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: schema.FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
    Discriminator(lambda tool: schema.tool_kind(tool, "function"))]


class NamedFunction(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    """The functions that may be called, and whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[Annotated[NamedFunction, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
                  Discriminator(lambda tool: schema.tool_kind(tool, "function"))]
    ] = Field(min_length=1, max_length=128)


class Format(Strict):
    """What the answer has to be. schema: of type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    json_schema: dict[str, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Strict):
    """The answer's form."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """effort: a variable for the chat template."""

    effort: str | None = None


class ResponseRequest(Translated):
    """Items to answer (/v1/responses), without anything that is stored."""

    NAMES: ClassVar = {"messages": "input", "response_format": "text.format",
                       "max_tokens": "max_output_tokens"}

    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: schema.MaxTokens | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**7)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: bool | None = None
    stream_options: schema.StreamOptions | None = None
    text: Text | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None) = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None

    @override
    def to_chat(self) -> tuple[schema.ChatRequest, list[str]]:
        fields: dict[str, Any] = {name: value for name in (
            "model", "temperature", "top_p", "top_k", "min_p", "seed", "stream",
            "parallel_tool_calls", "store") if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        others = [tool for tool in self.tools or () if isinstance(tool, OtherTool)]
        if functions := [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]:
            fields["tools"] = [{"type": "function", "function": tool.model_dump(
                exclude={"type"}, exclude_none=True)} for tool in functions]
        if self.tool_choice is not None:
            fields["tool_choice"] = _choice(self.tool_choice)
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and (form := self.text.format) is not None:
            fields["response_format"] = _format(form)
        kinds = {item.type for item in self.input if isinstance(item, OtherItem)}
        notes = [f"input: {kind} is left out: it is no call of a function"
                 for kind in sorted(kinds)]
        return schema.ChatRequest(messages=_messages(self), **fields), [
            *schema.left_out(others), *notes]


def _choice(given: str | NamedFunction | AllowedFunctions) -> Any:
    if isinstance(given, str):
        return given
    if isinstance(given, NamedFunction):
        return _named(given)
    functions = [_named(one) for one in given.tools if isinstance(one, NamedFunction)]
    if not functions:
        return "none" if given.mode == "auto" else "required"
    return {"type": "allowed_tools",
            "allowed_tools": {"mode": given.mode, "tools": functions}}


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _format(form: Format) -> schema.ResponseFormat:
    if form.type != "json_schema":
        return schema.ResponseFormat(type=form.type)
    if form.json_schema is None:
        raise bad("text.format of type json_schema needs the field schema", "text.format")
    return schema.ResponseFormat(type=form.type, json_schema=schema.JsonSchema(
        name=form.name, schema=form.json_schema, strict=form.strict))


def _messages(request: ResponseRequest) -> list[schema.Message]:
    """Calls that follow an assistant's words, or other calls, belong to the same turn."""
    items = request.input
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    messages = []
    if request.instructions is not None:
        messages.append(schema.Message(role="system", content=request.instructions))
    thought = ""
    for number, item in enumerate(items):
        match item:
            case ReasoningItem():
                thought += item.text
                continue
            case MessageItem():
                own = thought if item.role == "assistant" else None
                messages.append(schema.Message(
                    role=item.role, content=_content(item.content, f"input.{number}.content"),
                    reasoning_content=item.reasoning_content or item.reasoning or own or None))
            case CallItem():
                call = schema.ToolCall(id=item.call_id, function=schema.FunctionCall(
                    name=item.name, arguments=item.arguments))
                if not messages or messages[-1].role != "assistant":
                    messages.append(schema.Message(role="assistant", content=None,
                                                   reasoning_content=thought or None))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            case ResultItem():
                messages.append(schema.Message(
                    role="tool", content=_content(item.output, f"input.{number}.output"),
                    tool_call_id=item.call_id))
            case _:
                continue
        thought = ""
    if not messages:
        raise bad("input holds nothing to answer", "input")
    return messages


def _content(content: str | list[Part], where: str) -> str | list[schema.ContentPart]:
    """Texts as one, unless there are pictures between them. where: in the request."""
    if isinstance(content, str):
        return content
    if all(isinstance(part, TextPart) for part in content):
        return "".join(part.text for part in content if isinstance(part, TextPart))
    return [schema.TextPart(type="text", text=part.text) if isinstance(part, TextPart) else
            schema.MediaPart.of(part.image_url, f"{where}.{k}") for k, part in enumerate(content)]


_REPEATED = {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "text",
             "tool_choice", "tools"}  #: what answers repeat of requests
#: of an item of text: what its events and its ids are named after, its part when that is empty,
#: and more fields of the events
_TEXTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "message": ("output_text", "msg", {
        "type": "output_text", "text": "", "annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", "rs", {"type": "reasoning_text", "text": ""}, {})}


@dataclass(slots=True)
class ItemWriter(AnswerWriter):
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
