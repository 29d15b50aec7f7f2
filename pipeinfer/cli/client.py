"""A client of `pipeinfer serve`, or of any server with the OpenAI API.

It streams one answer at a time, and uses no terminal and no model.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import click

from pipeinfer.cli.terminal import plain
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpAnswer, HttpFailure

_POLL_SECONDS = 0.5  #: between two checks whether a server has loaded its model
_TELL_SECONDS = 10.0  #: between two notes that a server is loading


class Remote:
    """A server at `url`, such as http://host:8080; a path in it is put before every request's
    path.

    The path may end in /v1, as in the addresses for other clients. unix:PATH is a Unix socket.
    """

    def __init__(self, url: str, api_key: str = "", timeout: float = 300.0) -> None:
        """Raises UsageError for a text that is not such an address."""
        scheme, _, rest = url.partition(":")
        self._socket = rest if scheme == "unix" else ""
        address = "http://localhost" if self._socket else url
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            parts.port  # noqa: B018  (a property that checks)
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            why = "a part of the name is empty or has over 63 letters" if isinstance(
                error, UnicodeError) else error
            raise UsageError(f"--url {url} is not an address: {why}") from error
        api_key = api_key.strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("--api-key holds a character that no key has: give it in ASCII, on "
                             "one line")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {url} is not an address such as http://host:8080")
        self.url, self._timeout = url, timeout
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._base = f"{parts.scheme}://{parts.netloc}{path}"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def wait_until_ready(self, tell: Callable[[str], None], every: float = _POLL_SECONDS) -> None:
        """Return once requests are accepted. tell: called now and then with the reason
        of a delay. every: seconds between two checks.

        Raises RequestError when there is no server, the cluster has failed, or nothing changes
        before the timeout.
        """
        deadline, told = time.monotonic() + self._timeout, 0.0
        while True:
            status, health = self._get("/health")
            state = health.get("status", "")
            if status == 200 or state not in ("loading", "draining"):
                break
            if state == "draining" or time.monotonic() > deadline:
                raise RequestError(f"the server at {self.url} accepts no requests now: it is "
                                   f"{state}")
            if time.monotonic() > told:
                from pipeinfer.server.frames import loading_text

                text = loading_text(health.get("stages", {}))
                tell(f"the model at {self.url} is loading{f' ({text})' if text else ''}")
                told = time.monotonic() + _TELL_SECONDS
            time.sleep(every)
        if state in ("failed", "stopped"):
            raise RequestError(f"the cluster at {self.url} has failed: "
                               f"{health.get('reason') or 'see its log'}; restart it")

    def rebalance(self) -> dict[str, Any]:
        """Let the server move its layers; return its answer. Raises RequestError."""
        try:
            answer = self._ask("POST", "/rebalance", {})
        except HttpFailure as error:
            raise RequestError(f"no server answers at {self.url} ({error})") from error
        if answer.status != 200:
            raise _refusal(answer.status, _object(answer.body), answer.headers.get("retry-after"))
        return _object(answer.body)

    def model(self) -> str:
        """Return the name of the model. Raises RequestError."""
        status, answer = self._get("/v1/models")
        if status != 200:
            raise _refusal(status, answer, None)
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RequestError(f"the program at {self.url} does not speak the OpenAI API: check "
                               "--url") from (
                error)

    def facts(self) -> dict[str, Any]:
        """Return what a server of pipeinfer reports of its job, {} for another one."""
        return dict(self._get("/props")[1].get("pipeinfer") or {})

    def state(self) -> str:
        """Return the state of the server, "" if it does not answer."""
        try:
            return str(self._get("/health")[1].get("status", ""))
        except RequestError:
            return ""

    def chat(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
             ) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of the answer as they arrive. Closing the iterator ends the request.

        fields: added to the request. Raises RequestError when it is refused, fails, or breaks off.
        """
        body = {**fields, "messages": list(messages), "stream": True}
        try:
            with http_client.stream("POST", f"{self._base}/v1/chat/completions", body,
                                    timeout=self._timeout, headers=self._headers,
                                    socket_path=self._socket) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, _object(response.read()),
                                   response.headers.get("retry-after"))
                for chunk in http_client.events(response):
                    if "error" in chunk:
                        raise _refusal(500, chunk, None)
                    yield chunk
        except HttpFailure as error:
            raise RequestError(f"the connection to {self.url} was lost: {error}") from error

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            answer = self._ask("GET", path)
        except HttpFailure as error:
            raise RequestError(
                f"no server answers at {self.url} ({error}): start `pipeinfer serve` there, give "
                "another --url, or load a model here with -m") from error
        return answer.status, _object(answer.body)

    def _ask(self, method: str, path: str, body: Any = None) -> HttpAnswer:
        return http_client.ask(method, self._base + path, body, timeout=self._timeout,
                               headers=self._headers, socket_path=self._socket)


def _refusal(status: int, answer: Mapping[str, Any], retry_after: str | None) -> RequestError:
    """The server's error in words that say what to do."""
    error = answer.get("error")
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message") or f"the server answered with status {status}")
    if status == 401:
        return RequestError("the server wants an API key: give it with --api-key or "
                            "PIPEINFER_API_KEY")
    if status == 429:
        wait = f" in {retry_after} s" if retry_after else ""
        return RequestError(f"{message}; try again{wait}")
    if error.get("code") == "context_length_exceeded":
        return RequestError(f"{message}; /clear begins a new conversation")
    return RequestError(message)


def _object(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}


DEFAULT_URL = "http://127.0.0.1:8080"


@click.command("rebalance")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server.")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY",
              help="Key for that server. PIPEINFER_API_KEY keeps it off the command line.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=300.0, show_default=True,
              help="Seconds to wait for an answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rebalance_command(url: str, api_key: str, timeout: float, as_json: bool) -> None:
    """Redistribute a running server's layers by how long each stage takes now.

    Slices of a grid stay where they are.

    Requests that run go on: they are replayed over the new stages, with the same tokens.
    """
    found = Remote(url, api_key.split(",")[0], timeout).rebalance()
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(plain(found["message"]))
    for stage in found["stages"]:
        start, stop = stage["layers"]
        click.echo(f"stage {stage['node']}: layers {start}-{stop - 1} on rank {stage['rank']} "
                   f"({stage['host']})")
