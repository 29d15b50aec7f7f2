"""An HTTP client: whole answers and server-sent events, with a deadline on every wait.

For commands, experiments and training; one connection per request. It does not interpret what is
requested, and leaves the handling of failures to its caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
from msgspec import Struct

from pipeinfer.errors import RequestError

MOST_EVENT = 64 << 20  #: bytes of one event: the log-probabilities of a long answer
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading certificates takes longer than a request
END = "[DONE]"  #: the last event of a whole stream
_FAILURES = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError)


class HttpFailure(RequestError):
    """There was no complete answer: connection refused, stream broken off, or deadline exceeded.

    The text gives the reason in a few words.
    """


class HttpAnswer(Struct, frozen=True):
    """A complete answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 become U+FFFD."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError for a body that is not JSON."""
        return json.loads(self.body)


def ask(method: str, url: str, body: Any = None, *, timeout: float,
        headers: Mapping[str, str] | None = None, proxies: bool = False, socket_path: str = ""
        ) -> HttpAnswer:
    """Send one request and return the whole answer.

    body: sent as JSON.
    timeout: seconds for each wait: to connect, to send, for a part of the answer.
    proxies: whether to use the proxies of the environment.
    socket_path: of the Unix socket at which the server listens, "" for TCP.
    Raises HttpFailure.
    """
    with stream(method, url, body, timeout=timeout, headers=headers, proxies=proxies,
                socket_path=socket_path) as response:
        return whole(response, response.read())


@contextlib.contextmanager
def stream(method: str, url: str, body: Any = None, *, timeout: float,
           headers: Mapping[str, str] | None = None, proxies: bool = False,
           socket_path: str = "") -> Iterator[httpx2.Response]:
    """Send one request and yield the response before its body is read. Parameters as for `ask`;
    leaving the context early closes the connection."""
    given = options(url, timeout, proxies)
    if socket_path:
        given["transport"] = httpx2.HTTPTransport(uds=socket_path)
    with failures(), httpx2.Client(**given) as client, client.stream(
            method, url, headers=headers_of(headers, body), content=content_of(body)) as response:
        yield response


def events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream as they arrive. Raises HttpFailure if it breaks off before
    its end."""
    with failures():
        for sent in httpx2.EventSource(response, MOST_EVENT):
            if sent.data == END:
                return
            yield event(sent.data)
    raise HttpFailure("the stream ended early")


def options(url: str, timeout: float, proxies: bool) -> dict[str, Any]:
    secure = proxies or url.startswith("https:")
    return {"timeout": timeout, "trust_env": proxies, "verify": _trusted() if secure else _PLAIN}


def _trusted() -> ssl.SSLContext | bool:
    """The certificate authorities: those that SSL_CERT_FILE or SSL_CERT_DIR name, else the
    system's."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    return ssl.create_default_context(cafile=file, capath=folder) if file or folder else True


def headers_of(given: Mapping[str, str] | None, body: Any) -> dict[str, str]:
    kind = {} if body is None else {"Content-Type": "application/json"}
    return {"Connection": "close", **kind, **(given or {})}


def content_of(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def whole(response: httpx2.Response, body: bytes) -> HttpAnswer:
    return HttpAnswer(response.status_code, dict(response.headers), body)


def event(data: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HttpFailure("an event of the stream is not a JSON object")
    return found


@contextlib.contextmanager
def failures() -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise HttpFailure(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError | httpx2.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx2.RemoteProtocolError):
        return "the stream ended early"
    seen: BaseException | None = error
    while seen is not None:  # the library wraps the system's error
        if isinstance(seen, socket.gaierror):
            return "no such host"
        if isinstance(seen, ssl.SSLCertVerificationError):
            return (f"its certificate is not trusted, {seen.verify_message}: SSL_CERT_FILE may "
                    "name one of your own")
        if isinstance(seen, ssl.SSLError):
            return f"no HTTPS there: {seen.reason or seen}"
        if isinstance(seen, OSError) and seen.errno:
            return os.strerror(seen.errno)
        seen = seen.__cause__ or seen.__context__
    return str(error) or type(error).__name__
