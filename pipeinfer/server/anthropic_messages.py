"""Anthropic's /v1/messages: how its requests become requests for chats, and its answers, which are
content blocks, and events that build them.

Uses choices and their text, no HTTP and no engine.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag
from pydantic_core import from_json
from typing_extensions import override

from pipeinfer.server import schema_requests as schema
from pipeinfer.server.answer_writer import AnswerWriter, ResponseChoice
from pipeinfer.server.errors import ApiError, bad
from pipeinfer.server.schema_requests import OtherTool, Strict, Translated
from pipeinfer.server.tools import Call, Thought, Words

#: a block of the system's text that Claude Code changes with every request, for a billing that is
#: not here: with it no prompt would begin like the one before
_BILLING = "x-anthropic-billing-header:"


class TextBlock(Strict):
    """A text."""

    type: Literal["text"]
    text: str


class Source(Strict):
    """Where a picture is: base64 of its file, or a URL."""

    type: Literal["base64", "url"]
    data: str = ""
    url: str = ""
    media_type: str | None = None


class ImageBlock(Strict):
    """A picture."""

    type: Literal["image"]
    source: Source

    def part(self, where: str) -> schema.MediaPart:
        """Return it as a part of a content. where: in the request."""
        return schema.MediaPart.of(self.source.url or self.source.data, where)


class ThinkingBlock(Strict):
    """What the model thought, for templates that show it."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Strict):
    """Accepted without effect: this server makes none."""

    type: Literal["redacted_thinking"]


class CallBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


class OtherBlock(OtherTool):
    """A content that is refused, since it is no text."""


def _kind(block: Any) -> str:
    return {"text": "Text", "image": "Image", "thinking": "Thinking",
            "redacted_thinking": "Redacted", "tool_use": "Call", "tool_result": "Result"}.get(
                schema.type_of(block) or "text", "Other")


class ResultBlock(Strict):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[
        Annotated[TextBlock, Tag("Text")] | Annotated[ImageBlock, Tag("Image")]
        | Annotated[OtherBlock, Tag("Other")],
        Discriminator(lambda block: kind if (kind := _kind(block)) in ("Text", "Image") else
                      "Other")]] | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("Text")] | Annotated[ImageBlock, Tag("Image")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedBlock, Tag("Redacted")] | Annotated[CallBlock, Tag("Call")]
    | Annotated[ResultBlock, Tag("Result")] | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_kind)]


class Turn(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Strict):
    """A function that the model may call. input_schema: a JSON schema of its arguments."""

    type: Literal["custom"] | None = None
    name: schema.FunctionName
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolChoice(Strict):
    """Whether the model calls a tool. name: with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model thinks first; a variable for the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    """What the answer has to be."""

    type: Literal["json_schema"]
    json_schema: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(Strict):
    """effort: a variable for the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Translated):
    """A conversation whose tokens are counted (/v1/messages/count_tokens)."""

    NAMES: ClassVar = {"stop": "stop_sequences", "response_format": "output_config.format"}

    model: str | None = Field(None, max_length=1024)
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Annotated[
        Annotated[ClientTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
        Discriminator(lambda tool: schema.tool_kind(tool, "custom"))]] | None = Field(
            None, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @override
    def to_chat(self) -> tuple[schema.ChatRequest, list[str]]:
        fields: dict[str, Any] = {} if self.model is None else {"model": self.model}
        others = [tool for tool in self.tools or () if isinstance(tool, OtherTool)]
        if functions := [tool for tool in self.tools or () if isinstance(tool, ClientTool)]:
            fields["tools"] = [{"type": "function", "function": {
                "name": tool.name, "parameters": tool.input_schema,
                "description": tool.description, "strict": tool.strict}} for tool in functions]
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = _choice(choice)
            if choice.disable_parallel_tool_use is not None:
                fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {
                "enable_thinking": self.thinking.type != "disabled"}
        output = self.output_config or OutputConfig()
        if output.effort is not None:
            fields["reasoning_effort"] = output.effort
        if (form := output.format or self.output_format) is not None:
            fields["response_format"] = schema.ResponseFormat(
                type="json_schema", json_schema=schema.JsonSchema(
                    name=None, schema=form.json_schema))
        return schema.ChatRequest(
            messages=_messages(self), **fields, **self._sampling()), schema.left_out(others)

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    """A conversation to answer (/v1/messages)."""

    max_tokens: schema.MaxTokens | None = None
    stop_sequences: list[schema.StopText] | None = Field(None, max_length=schema.MAX_STOPS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**7)

    @override
    def _sampling(self) -> dict[str, Any]:
        return {"stop": self.stop_sequences} | {name: getattr(self, name) for name in (
            "max_tokens", "stream", "temperature", "top_p", "top_k")}


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise bad("tool_choice of type tool needs the field name", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: CountRequest) -> list[schema.Message]:
    system = request.system
    blocks = [system] if isinstance(system, str) else [block.text for block in system or ()]
    texts = [text for text in blocks if not text.startswith(_BILLING)]
    messages = [schema.Message(role="system", content="\n".join(texts))] if texts else []
    for number, turn in enumerate(request.messages):
        messages += _turn(turn, f"messages.{number}.content")
    return messages


def _turn(turn: Turn, where: str) -> list[schema.Message]:
    """Return the messages that a turn consists of: each result of a call has its own."""
    if isinstance(turn.content, str):
        return [schema.Message(role=turn.role, content=turn.content)]
    messages, thoughts, calls = [], [], []
    texts: list[str | schema.MediaPart] = []
    for number, block in enumerate(turn.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ImageBlock():
                texts.append(block.part(f"{where}.{number}"))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case CallBlock():
                calls.append(schema.ToolCall(id=block.id, function=schema.FunctionCall(
                    name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))))
            case ResultBlock():
                if texts:
                    messages.append(schema.Message(role=turn.role, content=_joined(texts)))
                    texts = []
                content = _result(block.content or "", f"{where}.{number}.content")
                messages.append(schema.Message(role="tool", content=content,
                                               tool_call_id=block.tool_use_id))
            case OtherBlock():
                raise _no_text(block, f"{where}.{number}")
            case _:
                pass
    if texts or calls or not messages:
        messages.append(schema.Message(
            role=turn.role, content=_joined(texts), tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) or None))
    return messages


def _result(content: str | Sequence[TextBlock | ImageBlock | OtherBlock], where: str
            ) -> str | list[schema.ContentPart]:
    if isinstance(content, str):
        return content
    found: list[str | schema.MediaPart] = []
    for number, block in enumerate(content):
        if isinstance(block, OtherBlock):
            raise _no_text(block, f"{where}.{number}")
        found.append(block.text if isinstance(block, TextBlock) else
                     block.part(f"{where}.{number}"))
    return _joined(found)


def _joined(parts: Sequence[str | schema.MediaPart]) -> str | list[schema.ContentPart]:
    """Texts as one, unless there are pictures between them."""
    texts = [one for one in parts if isinstance(one, str)]
    return "".join(texts) if len(texts) == len(parts) else [
        schema.TextPart(type="text", text=one) if isinstance(one, str) else one for one in parts]


def _no_text(block: OtherBlock, where: str) -> Exception:
    return bad(f"{where}: a content of type {block.type} is not supported, since models read text "
               "and pictures alone: leave it out, or send its text", where)


#: of a block, the field that its deltas continue, and what that is called in them
_FIELDS = {"text": ("text", "text_delta", "text"),
           "thinking": ("thinking", "thinking_delta", "thinking"),
           "tool_use": ("input", "input_json_delta", "partial_json")}


@dataclass(slots=True)
class BlockWriter(AnswerWriter):
    """Writes the one choice of a request. Arguments of calls are text until they are complete."""

    ends_with_mark: ClassVar[bool] = False
    blocks: list[dict[str, Any]] = field(default_factory=list)
    _events: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answer_id = self.answer_id or f"msg_{secrets.token_hex(14)}"

    # --- streams ------------------------------------------------------------------------------

    @override
    def opening(self) -> list[Mapping[str, Any]]:
        return []  # with the first token it is known what the cache had, and clients read it first

    @override
    def chunks(self, choice: ResponseChoice) -> list[Mapping[str, Any]]:
        ended = choice.complete
        if not self.ping and (ended or choice.reading.read):
            self.ping = {"type": "ping"}  # before the message has begun, clients expect none
            message = self._message([], None, None, self._counts() | {"output_tokens": 0})
            self._add("message_start", message=message)
            self._events.append(self.ping)
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
