"""The answers that clients get, shape by shape; they are built as these types and nothing else.

Typed dictionaries rather than models: what is sent is the object that was built, with its fields in
the order in which they were given, and texts with half a surrogate pair go through as they are.
The types are checked where answers are built, and the API's description is made of them.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NotRequired, TypeAlias

from starlette.responses import JSONResponse
from typing_extensions import TypedDict  # typing's own is not known to pydantic before Python 3.12


class Reply(JSONResponse):
    """A JSON answer that may hold half a surrogate pair, which a request's JSON can bring."""

    def render(self, content: Any) -> bytes:
        """The body: UTF-8, halves of pairs as escapes."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


class ErrorDetail(TypedDict):
    """What went wrong. param: the field that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """Every error has this form."""

    error: ErrorDetail


class ErrorCode(TypedDict):
    """The kind of an error, for programs."""

    error_code: str


class MessageErrorDetail(TypedDict):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str
    details: ErrorCode | None


class MessageError(TypedDict):
    """Every error of Anthropic's API has this form."""

    type: Literal["error"]
    error: MessageErrorDetail


# --- counts -----------------------------------------------------------------------------------


class CachedTokens(TypedDict):
    """cached_tokens: prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of a whole answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(TypedDict):
    """Counts, and times in milliseconds."""

    prompt_n: int
    cache_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    drafted_n: int
    accepted_n: int
    runs_n: int
    cancelled_runs_n: int
    restarts_n: NotRequired[int]
    same_arithmetic: NotRequired[bool]


class Detail(TypedDict):
    """The tokens of a choice, what each added, and whether it was speculated."""

    tokens: list[int]
    texts: list[str]
    speculated: list[bool]


class Details(TypedDict):
    """Detail of several choices."""

    choices: list[Detail]


# --- log-probabilities ------------------------------------------------------------------------


class TextLogprobs(TypedDict):
    """Of /v1/completions: a list per field, an element per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Alternative(TypedDict):
    """A token that might have been chosen."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(Alternative):
    """The token that was chosen, and the likeliest."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """Log probabilities as /v1/chat/completions gives them."""

    content: list[ChatLogprob]
    refusal: None


# --- answers ----------------------------------------------------------------------------------

End: TypeAlias = Literal["stop", "length"]
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


class CalledFunction(TypedDict):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class MoreArguments(TypedDict):
    """What follows of a call's arguments."""

    arguments: str


class ReplyMore(TypedDict):
    """More of a call in a stream. index: the call's number."""

    index: int
    function: MoreArguments


class ReplyCall(TypedDict):
    """A call that the model wants made. index: its number, in streams only."""

    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: CalledFunction


class TextChoice(TypedDict):
    """One continuation of a prompt (/v1/completions)."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: End


class TextDelta(TypedDict):
    """What a chunk adds to one continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: End | None


class ReplyMessage(TypedDict):
    """What the model said, and the calls it wants made."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ReplyCall]]


class ChatChoice(TypedDict):
    """One answer to a conversation (/v1/chat/completions)."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class MessageDelta(TypedDict, total=False):
    """What a chunk adds to a message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ReplyCall | ReplyMore]


class ChatDelta(TypedDict):
    """What a chunk adds to one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class HeadFigures(TypedDict):
    """What answers and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class Answer(HeadFigures):
    """What both kinds of answers share. pipeinfer: only with pipeinfer.detail. notes: on parts of
    the request that were not honoured."""

    usage: Usage
    timings: Timings
    notes: NotRequired[list[str]]
    pipeinfer: NotRequired[Detail | Details]


class Completion(Answer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class PromptFigures(TypedDict):
    """How many tokens of a prompt are computed. cache: those that were stored."""

    total: int
    processed: int
    cache: int
    time_ms: int


class Chunk(HeadFigures):
    """A part of a streamed answer; the last one of a choice has timings and notes, the last of all
    usage."""

    object: Literal["text_completion", "chat.completion.chunk"]
    choices: list[TextDelta] | list[ChatDelta]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    notes: NotRequired[list[str]]
    pipeinfer: NotRequired[Detail]
    prompt_progress: NotRequired[PromptFigures]


# --- the other routes -------------------------------------------------------------------------


class ModelCapabilities(TypedDict):
    """What a model can be asked for. chat_template: whether it has its own. tools: whether that
    template knows tools, or the server describes them."""

    chat: bool
    chat_template: bool
    completions: bool
    tools: Literal["template", "generic"]
    structured_outputs: bool
    logprobs: bool
    embeddings: bool
    decomposers: list[str]


class Model(TypedDict):
    """A model that can be asked. context_length: in tokens; this and capabilities once loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: NotRequired[int]
    capabilities: NotRequired[ModelCapabilities]


class ModelList(TypedDict):
    """Every model that can be asked."""

    object: Literal["list"]
    data: list[Model]


class Piece(TypedDict):
    """A token and its text (bytes where it is no UTF-8 by itself)."""

    id: int
    piece: str | list[int]


class InputEmbedding(TypedDict):
    """One input's embedding, of length 1: numbers, or their float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The embeddings of all inputs, in order."""

    object: Literal["list"]
    data: list[InputEmbedding]
    model: str
    usage: EmbeddingUsage


class InputTokens(TypedDict):
    """How many tokens the prompt of a conversation has."""

    input_tokens: int


class Tokens(TypedDict):
    """The token ids of a text."""

    tokens: list[int] | list[Piece]


class Content(TypedDict):
    """The text that token ids stand for."""

    content: str


class Prompt(TypedDict):
    """The prompt that the model would get for a conversation."""

    prompt: str


class Health(TypedDict):
    """status: ok, loading, draining, failed or stopped. recoveries: how often the job went on after
    it had lost ranks; lost: which."""

    status: Literal["ok", "loading", "restarting", "draining", "failed", "stopped"]
    recoveries: NotRequired[int]
    lost: NotRequired[list[int]]
    stages: NotRequired[dict[str, Any]]
    reason: NotRequired[str]


class RebalanceReply(TypedDict):
    """Whether the layers were redistributed, and the stages from now on."""

    changed: bool
    message: str
    stages: list[dict[str, Any]]


class Deleted(TypedDict):
    """An answer that was deleted."""

    id: str
    object: str
    deleted: bool


class RebalancePlan(TypedDict):
    """What a rebalance would change: the stages then, and the judged gain in speed (times)."""

    changes: bool
    message: str
    gain: float
    stages: list[dict[str, Any]]


class Props(TypedDict):
    """What the server is and does. race: whether it takes POST /race."""

    model_alias: str
    total_slots: int
    n_ctx: int
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    default_generation_settings: dict[str, Any]
    pipeinfer: dict[str, Any]
    race: bool


class Slot(TypedDict):
    """A place for a request; fields of the lane when it is taken."""

    id: int
    n_ctx: int
    is_processing: bool
    lane: dict[str, Any] | None
