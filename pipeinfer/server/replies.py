"""The shapes of answers, for the OpenAPI description. What is sent is built in `answers`."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse


class Reply(JSONResponse):
    """A JSON answer that may hold half a surrogate pair, which a request's JSON can bring."""

    def render(self, content: Any) -> bytes:
        """The body: UTF-8, halves of pairs as escapes."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


class ErrorDetail(BaseModel):
    """What went wrong. param: the field that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error has this form."""

    error: ErrorDetail


class CachedTokens(BaseModel):
    """cached_tokens: prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(BaseModel):
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


class Answer(BaseModel):
    """What both kinds of answers share. pipeinfer: only with pipeinfer.detail."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage
    timings: Timings
    pipeinfer: dict[str, Any] | None = None


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(Answer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ReplyMessage(BaseModel):
    """What the model said, and the calls it wants made."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """Every model that can be asked."""

    object: Literal["list"]
    data: list[Model]


class Piece(BaseModel):
    """A token and its text (bytes where it is no UTF-8 by itself)."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    """A text's tokens."""

    tokens: list[int] | list[Piece]


class Content(BaseModel):
    """A text."""

    content: str


class Prompt(BaseModel):
    """What the model would get."""

    prompt: str


class Health(BaseModel):
    """status: ok, loading, draining, failed or stopped. recoveries: how often the job went on after
    it had lost ranks; lost: which."""

    status: Literal["ok", "loading", "draining", "failed", "stopped"]
    reason: str | None = None
    stages: dict[str, Any] | None = None
    recoveries: int = 0
    lost: list[int] = []


class Rebalanced(BaseModel):
    """What came of dealing the layers out anew, and the stages from now on."""

    changed: bool
    message: str
    stages: list[dict[str, Any]]


class Props(BaseModel):
    """What the server is and does."""

    model_alias: str
    total_slots: int
    n_ctx: int
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    default_generation_settings: dict[str, Any]
    pipeinfer: dict[str, Any]


class Slot(BaseModel):
    """A place for a request; fields of the lane when it is taken."""

    id: int
    n_ctx: int
    is_processing: bool
    lane: dict[str, Any] | None = None
