"""The requests that clients send, field by field, and which fields are ignored or refused.

Every field of the OpenAI API and of llama.cpp's server that clients are known to send is either
declared here, and then honoured or (IGNORED) accepted without effect, or refused by name: an
unknown field is a 400, never dropped in silence. Knows shapes, bounds and names, no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    model_validator,
)

from pipeinfer.server.errors import ApiError
from pipeinfer.strategies import registry

#: accepted without effect, with the reason that docs/api.md gives
IGNORED = {
    "user": "this server has no accounts",
    "metadata": "nothing is stored",
    "service_tier": "there is only one service tier",
    "safety_identifier": "this server has no accounts",
    "prompt_cache_key": "prompts with the same beginning share it automatically",
    "prompt_cache_retention": "the least recently used prompt is dropped first",
    "cache_prompt": "prompts with the same beginning share it automatically",
}

#: refused with this reason; null counts as not given
REFUSED = {
    "audio": "this server generates only text",
    "prediction": "draft tokens come from the server alone",
    "web_search_options": "this server does not search the web",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "verbosity": "the model has no such setting",
    "suffix": "text can only be continued, not filled in",
    "repetition_penalty": "use repeat_penalty",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "guided_json": "use response_format",
    "guided_grammar": "use grammar",
    "guided_regex": "use grammar",
    "guided_choice": "use grammar",
    "typical_p": "this sampler is not supported",
    "top_a": "this sampler is not supported",
    "mirostat": "this sampler is not supported",
    "dry_multiplier": "this sampler is not supported",
    "xtc_probability": "this sampler is not supported",
    "dynatemp_range": "this sampler is not supported",
    "samplers": "the order is fixed: bias, penalties, top_k, top_p, min_p, temperature",
    "use_beam_search": "beam search is not supported",
    "lora": "adapters are not supported",
    "slot_id": "slots are assigned automatically",
    "id_slot": "slots are assigned automatically",
}

MAX_STOPS, MAX_STOP_LENGTH, MAX_CHOICES = 16, 1024, 128
MOST_INPUTS = 2048  #: of a request for embeddings, as in the OpenAI API
MAX_BIASES = 1024  #: each costs time at every token
_INT32 = 2**31 - 1

StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
FunctionName: TypeAlias = Annotated[str, Field(
    min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:/-]+$")]
Token: TypeAlias = Annotated[int, Field(ge=0, le=_INT32)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def _known(name: str) -> str:
    if name not in ("none", *registry.decomposers()):
        raise ValueError(f"choose from none, {', '.join(registry.decomposers())}")
    return name


DecomposerName: TypeAlias = Annotated[str, AfterValidator(_known), WithJsonSchema(
    {"type": "string", "enum": ["none", *registry.decomposers()]})]


class Strict(BaseModel):
    """No unknown fields, no conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """Clients write out fields that they do not use as null."""
        if isinstance(data, dict):
            return {k: v for k, v in data.items()
                    if v is not None or k not in REFUSED or k in cls.model_fields}
        return data


class StreamOptions(Strict):
    """include_usage: a last chunk with the counts."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Extras(Strict):
    """detail: say which tokens were speculated."""

    detail: bool = False


class JsonSchema(Strict):
    """A named JSON schema that the answer must follow."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    json_schema: dict[str, JsonValue] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Strict):
    """What /v1/completions and /v1/chat/completions share."""

    model: str | None = Field(None, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**7)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=2**24)
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[list[Annotated[list[int | float], Field(min_length=2, max_length=2)]],
                    Field(max_length=MAX_BIASES)]
        | None
    ) = None
    ignore_eos: bool | None = None
    return_progress: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    pipeinfer: Extras | None = None
    store: bool | None = None
    # accepted without effect
    user: JsonValue = None
    metadata: JsonValue = None
    service_tier: JsonValue = None
    safety_identifier: JsonValue = None
    prompt_cache_key: JsonValue = None
    prompt_cache_retention: JsonValue = None
    cache_prompt: JsonValue = None


class CompletionRequest(Sampling):
    """Continue texts (or token ids). parse_special: as for /tokenize, but off by default."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]],
                    Field(min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(None, ge=-1, le=_INT32)
    parse_special: bool | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)


class TextPart(Strict):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: JsonValue = None


class FunctionCall(Strict):
    """A call that the model made; arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the model made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One turn of a conversation. reasoning: another name of reasoning_content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # accepted without effect: what other servers' answers have, and clients' own notes
    refusal: JsonValue = None
    annotations: JsonValue = None
    id: JsonValue = None
    timestamp: JsonValue = None
    cache_control: JsonValue = None
    reasoning_details: JsonValue = None
    thinking_blocks: JsonValue = None
    provider_specific_fields: JsonValue = None


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    cache_control: JsonValue = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function
    cache_control: JsonValue = None


class NamedFunction(Strict):
    """The name of the function that must be called."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """The tools that may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class AllowedChoice(Strict):
    """A choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Conversation(Strict):
    """What a chat template gets. continue_final_message: the answer goes on with the last
    message; unless it is false, so does that to a last message of the assistant."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=128)
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def _not_zero(count: int) -> int:
    if not count:
        raise ValueError("at least 1, or -1 for as many as the context holds")
    return count


MaxTokens: TypeAlias = Annotated[int, Field(ge=-1, le=_INT32), AfterValidator(_not_zero)]


class ChatRequest(Sampling, Conversation):
    """A conversation to answer (/v1/chat/completions)."""

    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    decomposer: DecomposerName | None = None
    reasoning_format: Literal["none", "deepseek", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None


class Translated(Strict):
    """A request of another API, which becomes one for a chat."""

    #: fields of chats, and what they are called or made of in this API
    NAMES: ClassVar[Mapping[str, str]] = {}

    def to_chat(self) -> tuple[ChatRequest, list[str]]:
        """Return the request for a chat, and notes on what is left out of it. Raises ApiError."""
        raise NotImplementedError


@contextlib.contextmanager
def own_names(body: object) -> Iterator[None]:
    """Let errors name the fields that the client sent, not those of a chat."""
    try:
        yield
    except ApiError as error:
        if isinstance(body, Translated):
            error.param = body.NAMES.get(error.param or "", error.param)
        raise


class OtherTool(Strict):
    """A tool that is no function: accepted, but this server does not run it."""

    model_config = ConfigDict(extra="allow")
    type: str


def type_of(value: Any) -> str | None:
    """Return the field `type` of one of a union, which pydantic gives as a client sent it or made;
    None without one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def tool_kind(tool: Any, function: str) -> str:
    """Return the name of the branch of a union to which a tool belongs. function: the type of
    functions."""
    return "Function" if type_of(tool) in (None, function) else "Other"


def left_out(others: Iterable[OtherTool]) -> list[str]:
    """Return notes on tools that are left out."""
    return [f"tools: {kind} is left out: this server runs no tools, and models call functions alone"
            for kind in dict.fromkeys(tool.type for tool in others)]


class RebalanceRequest(Strict):
    """Nothing to say yet. A form of another site cannot send even that: it is JSON."""


class RaceRequest(Strict):
    """What the policies of a race answer."""

    prompt: str = Field(min_length=1, max_length=8000)


class TokenizeRequest(Strict):
    """Text to tokens. parse_special: control tokens written out in the text become tokens."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class EmbeddingRequest(Strict):
    """Texts (or token ids) to embed (/v1/embeddings)."""

    model: str | None = Field(None, max_length=1024)
    input: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]],
                    Field(min_length=1, max_length=MOST_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=_INT32)
    # accepted without effect
    user: JsonValue = None


class DetokenizeRequest(Strict):
    """Token ids to turn into text."""

    tokens: list[Token]


class TemplateRequest(Conversation):
    """A conversation to the text that the model would get."""
