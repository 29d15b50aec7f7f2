"""Middleware for every HTTP request: keys, sizes, timeouts, origins, headers, counting.

Plain ASGI, so that streams pass unchanged. It handles headers and bytes, no fields of requests.

A browser sends requests of any page to any address. A page of another site is recognised by the
browser's headers (`Origin`, `Sec-Fetch-Site`), or by the host name, if that name was made to point
to this machine. Programs other than browsers send none of these headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeinfer.server.errors import ApiError
from pipeinfer.server.keys import LIMIT_HEADERS, METER, Allowance, Meter, digest
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings

POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
          "connect-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; "
          "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
          "trusted-types dompurify")
_HEADERS = [
    (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", POLICY.encode()),
]
_HOST = re.compile(rb"((\[[0-9A-Fa-f:.]+(%[\w.]+)?\]|[\w.-]+)(:[0-9]{0,5})?)?")
_CLOSE = {"Connection": "close"}
_LARGE = 256 << 10  #: bytes of a request after which freed memory is returned
_TRIM_SECONDS = 1.0
MAX_HEADERS = 64 << 10  #: bytes; what comes in pieces is cut off there by the parser, too
_log = logging.getLogger("pipeinfer.requests")
_http_log = logging.getLogger("pipeinfer.http")
_http_log.setLevel(logging.ERROR)  # a client that sends no HTTP must not fill the log


class Connection(H11Protocol):
    """Lets a handler abort its connection, and closes connections on which no request arrives in
    time.

    patience: seconds for the first request, and for one that has begun.
    """

    patience = 30.0

    @classmethod
    def patient(cls, seconds: float) -> type[Connection]:
        """Return the class with another patience, if that is shorter."""
        return type(cls.__name__, (cls,), {"patience": min(cls.patience, seconds)})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the transport for handlers, and start to wait for a request."""
        super().connection_made(transport)
        self.logger = _http_log
        self.app_state = {**self.app_state, "transport": transport}
        self._deadline: asyncio.TimerHandle | None = None
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Handle bytes; a request has a deadline until its headers are complete, however they
        arrive."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()
        else:
            self._expect_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for no further request."""
        self._expect_nothing()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP. If it comes during a request, its handler sees a
        disconnected client, since it could not answer any more."""
        cycle = self.cycle
        started = False
        if cycle is not None and not cycle.response_complete:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        try:
            if not started:
                super().send_400_response(msg)
        except h11.LocalProtocolError:
            pass
        self.transport.close()

    def _expect_request(self) -> None:
        # a timer of its own: each byte that comes ends the base class's
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.patience, self.timeout_keep_alive_handler)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _trim() -> None:
    """Return freed memory to the system; threads keep what long texts needed."""
    with contextlib.suppress(AttributeError, OSError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


class Guard:
    """Refuses pages of other sites, requests without a key, and requests that are too long or
    too slow."""

    def __init__(self, app: ASGIApp, settings: Settings, public: frozenset[str],
                 meters: dict[str, Meter]) -> None:
        self._app, self._public = app, public
        self._salt = secrets.token_bytes(32)
        self._keys = [self._digest(key.encode()) for key in settings.keys]
        self._meters = [meters.setdefault(key, Meter(Allowance())) for key in settings.keys]
        serve = settings.serve
        for number, (meter, (key, one)) in enumerate(
                zip(self._meters, settings.keys.items(), strict=True), 1):
            meter.allow(one, number)
            meter.salt = digest(key.encode()) if serve.separate_keys else b""
        self._origins = Origins(serve.allow_host, settings.check_hosts, serve.cors_origin)
        self._max_body, self._seconds = settings.most_body, serve.client_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that is allowed."""
        try:
            await self._pass_on(scope, receive, send)
        finally:
            if scope.get("large"):
                # later: what the request held is freed after this returns
                asyncio.get_running_loop().call_later(_TRIM_SECONDS, _trim)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            _check_headers(scope["http_version"], scope["headers"])
            self._origins.check(scope["method"], headers)
            meter = self._check_key(scope["path"], headers)
            self._check_length(headers)
            counted = meter is not None and _check_limits(meter, scope["method"], scope["path"])
        except ApiError as error:
            await error.reply(scope["path"])(scope, receive, send)
            return
        if meter is None:
            await self._app(scope, self._bounded(scope, receive), send)
            return
        meter.connected += 1
        meter.open += counted
        token = METER.set(meter)
        try:
            await self._app(scope, self._bounded(scope, receive), _with_limits(meter, send))
        finally:
            METER.reset(token)
            meter.connected -= 1
            meter.open -= counted

    def _check_key(self, path: str, headers: MutableMapping[bytes, bytes]) -> Meter | None:
        """Return the meter of the request's key; None if no key is needed. Raises ApiError
        (401)."""
        if not self._keys or path in self._public:
            return None
        given = key_of(headers)
        # Digests have one length, so the time reveals neither a key nor its length; a missing key
        # is compared, too.
        digest = self._digest(given)
        known = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(known):
            raise ApiError(401, "a valid API key is required: send the header Authorization: "
                                "Bearer KEY", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})
        return self._meters[known.index(True)]

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt).digest()

    def _check_length(self, headers: MutableMapping[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_body):
            raise ApiError(413, self._too_long())

    def _too_long(self) -> str:
        return f"the request is longer than the {self._max_body} bytes that this server accepts"

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        size, complete = 0, False

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:  # only a disconnect can follow
                return await receive()
            try:
                # a client that stops amid its request must not hold a connection
                async with asyncio.timeout(self._seconds):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the request's body did not arrive in time") from None
            size += len(message.get("body", b""))
            scope["large"], complete = size > _LARGE, not message.get("more_body", False)
            if size > self._max_body:
                raise HTTPException(413, self._too_long())
            return message

        return bounded


def key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a request, b"" for none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def scopes_of(method: str, path: str) -> tuple[str, ...]:
    """Return the scopes of which a key needs one for a path."""
    if path == "/rebalance":
        return ("change",)
    if path in ("/metrics", "/slots", "/pipeline", "/rebalance/plan"):
        return ("watch",)
    if path == "/props" or (method in ("GET", "HEAD") and path.startswith("/v1/models")):
        return ("ask", "watch")
    return ("ask",)


def _check_limits(meter: Meter, method: str, path: str) -> bool:
    """Whether a request counts as one for an answer.

    Raises ApiError if the key does not allow it, or not now.
    """
    needed, allowance = scopes_of(method, path), meter.allowance
    if not set(needed) & set(allowance.scopes):
        raise ApiError(403, f"this key has the scope {','.join(allowance.scopes)}; {path} needs "
                            f"{' or '.join(needed)}", code="insufficient_scope")
    if meter.at_connection_limit:
        raise _limit_error(
            meter, f"this key may have {allowance.connections} requests open at a time")
    if method != "POST" or needed != ("ask",):
        return False
    if meter.at_request_limit:
        raise _limit_error(meter, f"this key may have {allowance.at_once} requests at a time")
    now = time.monotonic()
    if (seconds := meter.wait(now)) > 0:
        bound = f"send {allowance.per_minute} requests" if meter.requests.wait(1.0, now) else (
            f"use {allowance.tokens_per_minute} tokens")
        raise _limit_error(meter, f"this key may {bound} per minute", seconds)
    return True


def _limit_error(meter: Meter, message: str, seconds: float | None = None) -> ApiError:
    headers = {name.decode(): value.decode() for name, value in meter.headers(time.monotonic())}
    if seconds is not None:
        headers["Retry-After"] = str(math.ceil(seconds))
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _with_limits(meter: Meter, send: Send) -> Send:
    """Wrap `send` to add headers with the remaining amounts of the key."""
    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *meter.headers(time.monotonic())]
        await send(message)

    return counted


def _check_headers(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ApiError for a request that another program on its way might read otherwise."""
    given = dict(headers)
    wrong = ""
    if version not in ("1.0", "1.1"):
        wrong = f"HTTP/{version} is not supported: use HTTP/1.1"
    elif b"content-length" in given and b"transfer-encoding" in given:
        wrong = "Content-Length and Transfer-Encoding exclude each other"
    elif not _HOST.fullmatch(given.get(b"host", b"")):
        wrong = "the header Host is neither a name nor an address"
    elif given.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "send the body without a Content-Encoding", headers=_CLOSE)
    if wrong:
        raise ApiError(400, wrong, headers=_CLOSE)
    if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADERS:
        raise ApiError(431, f"the headers are longer than the {MAX_HEADERS} bytes that this server "
                            "accepts", headers=_CLOSE)


class Accounting:
    """Counts answers, adds security headers for browsers, and logs requests if enabled."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: bool) -> None:
        self._app, self._metrics, self._logs = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request and count the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = normalized(scope)
        start, status, number = time.monotonic(), 0, f"req_{secrets.token_hex(12)}"

        async def seen(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.answered(status)
                message["headers"] = [*message.get("headers", ()), *_HEADERS,
                                      (b"x-request-id", number.encode())]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            if self._logs:
                client = scope.get("client") or ("-",)
                _log.warning("%s %s %s %s %.0f ms %s", client[0], scope["method"],
                             ascii(scope["path"])[1:-1], status or "-",
                             1e3 * (time.monotonic() - start), number)


def normalized(scope: Scope) -> Scope:
    """Return a request whose path has no doubled and no trailing slash.

    The host of an absolute-form target, `GET http://host/path`, replaces the header (RFC 9112,
    3.2.2). No redirect does this: a proxy's path and https are unknown here.
    """
    path, headers = scope["path"], scope["headers"]
    if absolute := re.match(r"https?://([^/]*)", path, re.IGNORECASE):
        path = path[absolute.end():]
        headers = [*(one for one in headers if one[0] != b"host"),
                   (b"host", absolute[1].encode())]
    path = re.sub("/+", "/", f"/{path}").rstrip("/") or "/"
    return {**scope, "path": path, "headers": headers}


def wrap(app: ASGIApp, settings: Settings, metrics: Metrics, public: frozenset[str],
             meters: dict[str, Meter]) -> ASGIApp:
    """Return the application with all middleware. public: paths that need no key. meters: of the
    keys; gets those that are new."""
    inner: ASGIApp = Guard(app, settings, public, meters)
    if settings.serve.cors_origin:
        inner = CORSMiddleware(
            inner, allow_origins=settings.serve.cors_origin, allow_headers=["*"],
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            expose_headers=["Retry-After", *LIMIT_HEADERS])
    return Accounting(inner, metrics, settings.serve.log_requests)


_OWN_SITES = (b"same-origin", b"none")


@dataclass(frozen=True, slots=True)
class Origins:
    """The allowed names and origins.

    names: host names of the server, besides localhost and addresses. strict: refuse other names.
    allowed: origins of other sites that may use it, "*" for all.
    """

    names: tuple[str, ...]
    strict: bool
    allowed: tuple[str, ...] = ()

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError (403) for a request that a page of another site may have made."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.strict and host and not self._goes_by(_name(f"//{host}")):
            raise ApiError(403, f"this server does not go by the host name {host[:300]!r}: use its "
                                "address, or start it with --allow-host NAME",
                           code="host_not_allowed")
        if "*" in self.allowed or not self._is_foreign(method, host, headers):
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        raise ApiError(403, f"a page of another site ({origin[:300] or 'not named'}) made this "
                            "request: start the server with --cors-origin to let that site use "
                            "it",
                       code="origin_not_allowed")

    def _goes_by(self, name: str) -> bool:
        if name in ("localhost", *self.names):
            return True
        try:  # an address is safe: only names can be made to point here
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_foreign(self, method: str, host: str, headers: Mapping[bytes, bytes]) -> bool:
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin in self.allowed:
            return False
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            follows_a_link = (method in ("GET", "HEAD") and not origin
                              and headers.get(b"sec-fetch-mode") == b"navigate"
                              and headers.get(b"sec-fetch-dest") == b"document")
            return site not in _OWN_SITES and not follows_a_link
        if not origin:
            return False
        return origin.partition("://")[2] != host and _name(origin) not in self.names


def _name(url: str) -> str:
    """Return the host name of an address in lower case; "" if it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
