"""The requests that clients send, field by field, and which fields are ignored or refused.

Every declared field is honoured. Any other one has no effect, which the answer's notes say, unless
it is one of SILENT or REFUSED. Knows shapes, bounds and names, no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    WithJsonSchema,
)

from pipeinfer.server.errors import ApiError, bad
from pipeinfer.strategies import registry

#: has no effect, and no note says so: many clients always send these
SILENT = frozenset((
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "cache_prompt", "cache_control", "client_metadata", "include",
    "max_tool_calls", "context_management", "inference_geo", "speed", "diagnostics"))
#: what to use instead of a field that has no effect
INSTEAD = {
    "repetition_penalty": "repeat_penalty", "n_predict": "max_tokens", "n_probs": "logprobs",
    "guided_json": "response_format", "guided_grammar": "grammar", "guided_regex": "grammar",
    "guided_choice": "grammar",
}
#: without these the answer would be one to another question
REFUSED = {
    "functions": "use tools", "function_call": "use tool_choice",
    "suffix": "text can only be continued, not filled in",
    "previous_response_id": "this server stores no responses: send the whole conversation as input",
    "conversation": "this server stores no conversations: send the whole conversation as input",
    "prompt": "this server stores no prompts: use instructions and input",
    "background": "this server answers at once: leave it out, or use stream",
    "container": "this server runs no code",
    "thread": "this server stores no conversations: send all of the messages",
}
#: a code that lets Anthropic's own clients go on without the field
_CODES = {"thread": "thread_unsupported_request"}

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
    """No conversions between types. Unknown fields have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Body(Strict):
    """A whole request, whose unknown fields `ignored` reports."""

    model_config = ConfigDict(extra="allow")


def ignored(body: Body) -> list[str]:
    """Return notes on the fields of a request that have no effect. Raises ApiError for a field
    without which the answer would be one to another question."""
    notes = []
    for name, value in (body.model_extra or {}).items():
        if value in (None, False, 0) or name in SILENT:
            continue
        if reason := REFUSED.get(name):
            raise bad(f"{name} is not supported: {reason}", name,
                      _CODES.get(name, "unsupported_field"))
        use = f": use {INSTEAD[name]}" if name in INSTEAD else ""
        notes.append(f"{name[:100]} has no effect here{use}")
    return notes


class StreamOptions(Strict):
    """include_usage: a last chunk with the counts."""

    include_usage: bool = False


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
    """What the answer has to be. bare_schema: as llama.cpp's server takes it, with either type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    bare_schema: dict[str, JsonValue] | None = Field(default=None, alias="schema")


class Sampling(Body):
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
    """A part of a message's content that is text, or that of a refusal."""

    type: Literal["text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ImageUrl(Strict):
    """A data: URI, or an http(s) URL of one of --image-urls. detail has no effect."""

    url: str
    detail: str | None = None


class Sound(Strict):
    """Base64 of a WAV, MP3 or FLAC file; its format is read from there."""

    data: str
    format: str | None = None


class MediaPart(Strict):
    """A picture or a sound in a message's content."""

    type: Literal["image_url", "input_audio"]
    image_url: ImageUrl | str | None = None
    input_audio: Sound | None = None
    _place: str = ""

    @property
    def place(self) -> str:
        """Where it is in the request, if that is of another API; else empty."""
        return self._place

    @property
    def source(self) -> str:
        """A URI, or base64."""
        if self.type == "input_audio":
            return self.input_audio.data if self.input_audio is not None else ""
        url = self.image_url
        return url.url if isinstance(url, ImageUrl) else url or ""

    @classmethod
    def of(cls, source: str, place: str) -> MediaPart:
        """Return a picture of another API. place: where it is in the request."""
        part = cls(type="image_url", image_url=source)
        part._place = place
        return part


def _is_media(part: Any) -> str:
    return "Media" if type_of(part) in ("image_url", "input_audio") else "Text"


ContentPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[MediaPart, Tag("Media")],
    Discriminator(_is_media)]


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
    """One turn of a conversation. refusal: in place of content. reasoning: another name of
    reasoning_content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


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


class Conversation(Body):
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

    @property
    def has_media(self) -> bool:
        """Whether it has a picture or a sound."""
        return any(isinstance(part, MediaPart) for message in self.messages
                   for part in message.content or ())


class Translated(Body):
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
    """A tool that is no function: accepted and repeated, but this server does not run it."""

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


class DetokenizeRequest(Strict):
    """Token ids to turn into text."""

    tokens: list[Token]


class TemplateRequest(Conversation):
    """A conversation to the text that the model would get."""
