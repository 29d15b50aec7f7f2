"""The requests of Anthropic's /v1/messages, and how they become requests for chats.

Knows shapes and names, no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag
from typing_extensions import override

from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad
from pipeinfer.server.schema_requests import OtherTool, Strict, Translated

#: a block of the system's text that Claude Code changes with every request, for a billing that is
#: not here: with it no prompt would begin like the one before
_BILLING = "x-anthropic-billing-header:"


class TextBlock(Strict):
    """A text."""

    type: Literal["text"]
    text: str


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
    return {"text": "Text", "thinking": "Thinking", "redacted_thinking": "Redacted",
            "tool_use": "Call", "tool_result": "Result"}.get(
                schema.type_of(block) or "text", "Other")


class ResultBlock(Strict):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[
        Annotated[TextBlock, Tag("Text")] | Annotated[OtherBlock, Tag("Other")],
        Discriminator(lambda block: "Text" if _kind(block) == "Text" else "Other")]] | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("Text")] | Annotated[ThinkingBlock, Tag("Thinking")]
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
    messages, texts, thoughts, calls = [], [], [], []
    for number, block in enumerate(turn.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case CallBlock():
                calls.append(schema.ToolCall(id=block.id, function=schema.FunctionCall(
                    name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))))
            case ResultBlock():
                if texts:
                    messages.append(schema.Message(role=turn.role, content="".join(texts)))
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
            role=turn.role, content="".join(texts), tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) or None))
    return messages


def _result(content: str | Sequence[TextBlock | OtherBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if isinstance(block, OtherBlock):
            raise _no_text(block, f"{where}.{number}")
    return "".join(block.text for block in content if isinstance(block, TextBlock))


def _no_text(block: OtherBlock, where: str) -> Exception:
    return bad(f"{where}: a content of type {block.type} is not supported, since the model reads "
               "text alone: leave it out, or send its text", where)
