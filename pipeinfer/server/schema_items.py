"""The requests of /v1/responses, and how they become requests for chats.

Nothing is stored between requests: a conversation is what `input` holds. Knows shapes and names, no
model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag

from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import ApiError, bad
from pipeinfer.server.schema_requests import Strict

#: of other fields of the OpenAI API, why they are refused
_REFUSED = {
    "previous_response_id": "this server stores no responses: send the whole conversation as input",
    "conversation": "this server stores no conversations: send the whole conversation as input",
    "prompt": "this server stores no prompts: use instructions and input",
    "background": "this server answers at once: leave it out, or use stream",
    "top_logprobs": "use /v1/chat/completions for log probabilities",
}
#: fields of chats, and what they are made of here
_NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
_INT32 = 2**31 - 1


class TextPart(Strict):
    """A part of a content; only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    cache_control: JsonValue = None
    annotations: JsonValue = None
    logprobs: JsonValue = None
    parsed: JsonValue = None


class MessageItem(Strict):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    id: str | None = None
    status: JsonValue = None
    phase: JsonValue = None


class CallItem(Strict):
    """A call that the model made; arguments as JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: JsonValue = None
    parsed_arguments: JsonValue = None


class ResultItem(Strict):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]
    id: str | None = None
    status: JsonValue = None


class ReasoningItem(Strict):
    """Accepted without effect: this server makes none."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: JsonValue = None
    content: JsonValue = None
    encrypted_content: JsonValue = None
    status: JsonValue = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return {"function_call": "Call", "function_call_output": "Result",
            "reasoning": "Reasoning"}.get(kind, "Message")


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("Message")] | Annotated[CallItem, Tag("Call")]
    | Annotated[ResultItem, Tag("Result")] | Annotated[ReasoningItem, Tag("Reasoning")],
    Discriminator(_kind)]


class FunctionTool(Strict):
    """A function that the model may call; functions are the only kind of tools."""

    type: Literal["function"]
    name: schema.FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    """The functions that may be called, and whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=128)


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
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """effort: a variable for the chat template."""

    effort: str | None = None
    summary: JsonValue = None
    generate_summary: JsonValue = None


class ResponseRequest(Strict):
    """Items to answer (/v1/responses), without anything that is stored."""

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
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None) = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    # accepted without effect
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: JsonValue = None
    metadata: JsonValue = None
    user: JsonValue = None
    service_tier: JsonValue = None
    safety_identifier: JsonValue = None
    prompt_cache_key: JsonValue = None
    prompt_cache_retention: JsonValue = None
    # refused with a reason of their own
    previous_response_id: JsonValue = None
    conversation: JsonValue = None
    prompt: JsonValue = None
    background: JsonValue = None
    top_logprobs: JsonValue = None


def to_chat(request: ResponseRequest) -> schema.ChatRequest:
    """The same as a request for a chat. Raises ApiError for what needs storage."""
    for name, reason in _REFUSED.items():
        if getattr(request, name) not in (None, False, 0):
            raise bad(f"{name} is not supported: {reason}", name, "unsupported_field")
    fields: dict[str, Any] = {name: value for name in (
        "model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "parallel_tool_calls",
    ) if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        fields["max_tokens"] = request.max_output_tokens
    if request.tools:
        fields["tools"] = [{"type": "function", "function": tool.model_dump(
            exclude={"type"}, exclude_none=True)} for tool in request.tools]
    if isinstance(request.tool_choice, NamedFunction):
        fields["tool_choice"] = _named(request.tool_choice)
    elif isinstance(request.tool_choice, AllowedFunctions):
        allowed = request.tool_choice
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {
            "mode": allowed.mode, "tools": [_named(one) for one in allowed.tools]}}
    elif request.tool_choice is not None:
        fields["tool_choice"] = request.tool_choice
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and (form := request.text.format) is not None:
        fields["response_format"] = _format(form)
    return schema.ChatRequest(messages=_messages(request), **fields)


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Errors name the fields that the client sent, not those of a chat."""
    try:
        yield
    except ApiError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


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
    for item in items:
        match item:
            case MessageItem():
                messages.append(schema.Message(role=item.role, content=_text(item.content)))
            case CallItem():
                call = schema.ToolCall(id=item.call_id, function=schema.FunctionCall(
                    name=item.name, arguments=item.arguments))
                if not messages or messages[-1].role != "assistant":
                    messages.append(schema.Message(role="assistant", content=None))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            case ResultItem():
                messages.append(schema.Message(
                    role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case _:
                pass
    if not messages:
        raise bad("input holds nothing to answer", "input")
    return messages


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
