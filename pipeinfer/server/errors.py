"""Errors in the OpenAI API's form: an object under "error", and an HTTP status."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.server.schema_replies import ErrorReply, MessageError, Reply

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error",
    413: "invalid_request_error", 415: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error", 500: "server_error",
    503: "unavailable_error", 504: "timeout_error",
}
#: the same in Anthropic's API, where its words differ
_ANTHROPIC_TYPES = {
    "conflict_error": "invalid_request_error", "server_error": "api_error",
    "unavailable_error": "overloaded_error",
}
RETRY_AFTER = 2  #: seconds after which a client should try again


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a choice ended without an answer. kind: one of those in `for_failure`."""

    kind: str
    message: str


class ApiError(Exception):
    """An error that is sent as the answer to a request. param: the wrong field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER))

    def body(self) -> ErrorReply:
        """Return the object for clients. Characters that UTF-8 cannot encode are replaced."""
        return {"error": {
            "message": _plain(self.message), "type": _TYPES.get(self.status, "server_error"),
            "param": None if self.param is None else _plain(self.param), "code": self.code,
        }}

    def message_body(self) -> MessageError:
        """Return the object for clients of Anthropic's API."""
        kind = "request_too_large" if self.status == 413 else (
            _TYPES.get(self.status, "server_error"))
        return {"type": "error", "error": {
            "type": _ANTHROPIC_TYPES.get(kind, kind), "message": _plain(self.message),
            "details": None if self.code is None else {"error_code": self.code}}}

    def reply(self, path: str) -> Reply:
        """Return the answer to a request for a path, in the form of its API."""
        of_messages = f"{path}/".startswith("/v1/messages/")
        return Reply(self.message_body() if of_messages else self.body(), self.status,
                     self.headers)


class TooLong(ApiError):
    """A prompt that does not fit the context, in the words for which agents search before they
    shorten a conversation.

    tokens: of the prompt, at least. n_ctx: of the context. param: the field with the prompt.
    """

    def __init__(self, tokens: int, n_ctx: int, param: str) -> None:
        super().__init__(400, f"This model's maximum context length is {n_ctx} tokens. However, "
                         f"your {param} resulted in {tokens} tokens: shorten the {param}",
                         param=param, code="context_length_exceeded")
        self._anthropic = f"prompt is too long: {tokens} tokens > {n_ctx} maximum"

    def message_body(self) -> MessageError:
        """Return the object for clients of Anthropic's API."""
        found = super().message_body()
        found["error"]["message"] = self._anthropic
        return found


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error (400) for a request that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def for_failure(failure: Failure) -> ApiError:
    """Return the error for a choice that ended without an answer."""
    status, code = {
        "context": (400, "context_length_exceeded"),
        "request": (400, "request_refused"),
        "draining": (503, "shutting_down"),
        "shutdown": (503, "shutting_down"),
        "failed": (503, "cluster_failed"),
        "timeout": (504, "timeout"),
    }.get(failure.kind, (500, "internal_error"))
    return ApiError(status, failure.message, code=code)


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
