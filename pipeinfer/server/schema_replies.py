"""The shapes of answers that are this server's own: errors, counts, state.

Typed dictionaries rather than models: what is sent is the object that was built, with its fields in
the order in which they were given, and texts with half a surrogate pair go through as they are.
Those of OpenAI's and Anthropic's APIs are plain dictionaries; the tests hold them against the
official clients' types.
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
    restored_n: NotRequired[int]
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


End: TypeAlias = Literal["stop", "length"]
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


# --- the other routes -------------------------------------------------------------------------


class Piece(TypedDict):
    """A token and its text (bytes where it is no UTF-8 by itself)."""

    id: int
    piece: str | list[int]


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
    """status: ok, asleep, loading, draining, failed or stopped. recoveries: how often the job went
    on after it had lost ranks; lost: which."""

    status: Literal["ok", "asleep", "loading", "restarting", "draining", "failed", "stopped"]
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
    """What the server is and does. models: names that requests may give, if several. race: whether
    it takes POST /race."""

    model_alias: str
    models: list[str]
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
