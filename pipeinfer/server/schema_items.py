"""The requests of /v1/responses, and how they become requests for chats.

Nothing is stored between requests: a conversation is what `input` holds. Knows shapes and names, no
model.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag
from typing_extensions import override

from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad
from pipeinfer.server.schema_requests import OtherTool, Strict, Translated

#: types of items that other tools than functions bring into a conversation
_OF_TOOLS = re.compile(r"_call$|_call_output$|^mcp_|^tool_search_output$|^compaction")


class TextPart(Strict):
    """A part of a content; only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(Strict):
    """One turn of a conversation. reasoning: what the model thought."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
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
    output: str | list[TextPart]


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
            "parallel_tool_calls") if (value := getattr(self, name)) is not None}
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
    for item in items:
        match item:
            case ReasoningItem():
                thought += item.text
                continue
            case MessageItem():
                own = thought if item.role == "assistant" else None
                messages.append(schema.Message(
                    role=item.role, content=_text(item.content),
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
                    role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case _:
                continue
        thought = ""
    if not messages:
        raise bad("input holds nothing to answer", "input")
    return messages


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
