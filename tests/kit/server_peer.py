"""A real HTTP process with a scripted engine at the other end of its link, for tests.

Everything between a client's socket and the frames is the product's own; only what the engine
answers is written by the test. `tests/mpi/test_serve.py` has the real engine.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from pipeinfer.config import ServeConfig
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import http_process
from pipeinfer.server.frames import (
    Abort,
    Bye,
    ClientFrame,
    Ended,
    EngineFrame,
    News,
    NewsItem,
    Ready,
    Submit,
    Token,
)
from pipeinfer.server.keys import Allowance
from pipeinfer.server.link import Link
from pipeinfer.server.settings import Settings

MODEL = EMBEDDED / "target.gguf"
SECONDS = 30.0
FACTS: dict[str, Any] = {
    "model": "m.gguf", "draft": "", "policy": "pipeinfer", "n_ctx": 256, "stages": []}
F = TypeVar("F", bound=ClientFrame)


def settings_of(model: str, name: str = "m", **given: Any) -> Settings:
    """Settings with these fields, or these of its server's options; `keys` may be names alone."""
    if not isinstance(keys := given.pop("keys", {}), dict):
        keys = dict.fromkeys(keys, Allowance())
    own = {name: given.pop(name) for name in list(given) if name in Settings.__struct_fields__}
    return Settings(model, name, serve=ServeConfig(**given), keys=keys, **own)


class Peer:
    """The engine's end. `answer(frame)` gives news items for a submitted request, None holds it
    until it is aborted."""

    answer: Callable[[Submit], Sequence[NewsItem] | None]

    def __init__(self, link: Link, tokenizer: Tokenizer) -> None:
        self.link, self.tokenizer = link, tokenizer
        self._seen: list[ClientFrame] = []
        self._forgotten: set[int] = set()
        self.answer = lambda frame: self.say(frame.id, "ok")
        self._arrived, self._changed = threading.Event(), threading.Condition()
        self._over, self._sending, self._answering = False, threading.Lock(), threading.Lock()
        link.on_frame = self._arrived.set
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def seen(self) -> list[ClientFrame]:
        """The frames so far, that which is being answered included."""
        with self._answering:
            return list(self._seen)

    def say(self, request_id: int, text: str, reason: str | None = "stop",
            each: Sequence[int] = (), **stats: Any) -> list[NewsItem]:
        """News: the tokens of a text and the end."""
        items: list[NewsItem] = [
            Token(request_id, token, i % 2 == 1, -0.5, ((token, -0.5), (1, -3.0)),
                  reused=stats.get("reused"))
            for i, token in enumerate(each or self.tokenizer.encode(text, add_bos=False))]
        return [*items, Ended(request_id, reason, stats)] if reason else items

    def send(self, frame: EngineFrame) -> None:
        """A frame to the HTTP process; from any thread."""
        with self._sending:
            self.link.send(frame)

    def news(self, items: Sequence[NewsItem]) -> None:
        """News to the HTTP process; from any thread."""
        self.send(News(tuple(items)))

    def wait_for(self, kind: type[F], count: int = 1, **fields: Any) -> F:
        """The `count`-th frame of this kind, waiting for it."""
        def found() -> list[F]:
            return [f for f in self._seen if isinstance(f, kind)
                    and all(getattr(f, k) == v for k, v in fields.items())]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, SECONDS), self._seen
        return found()[count - 1]

    def reset(self) -> None:
        """Forget what was seen, that which is being answered included, and answer as at first.

        An Abort of a request that was seen before is answered, but not among those seen after.
        """
        with self._answering:
            with self._changed:
                self._forgotten.update(f.id for f in self._seen if isinstance(f, Submit))
                self._seen.clear()
            self.answer = lambda frame: self.say(frame.id, "ok")

    def close(self) -> None:
        """End the thread that answers."""
        self._over = True
        self._arrived.set()
        self._thread.join(SECONDS)

    def _run(self) -> None:
        while not self._over and not self.link.closed:
            with self._sending:
                waits = self.link.pump()
            self._arrived.wait(0.02 if waits else SECONDS)
            self._arrived.clear()
            while self._answer_next():
                pass

    def _answer_next(self) -> bool:
        with self._answering:  # the client has its answer before the frame is among those seen
            if (frame := self.link.take()) is None:
                return False
            items = self._reply(frame)
            if items:
                self.news(items)
            if not (isinstance(frame, Abort) and frame.id in self._forgotten):
                with self._changed:
                    self._seen.append(frame)
                    self._changed.notify_all()
            return True

    def _reply(self, frame: ClientFrame) -> Sequence[NewsItem] | None:
        match frame:
            case Submit():
                return self.answer(frame)
            case Abort(request_id, reason):
                return [Ended(request_id, reason)]
        return None


class Reached:
    """A server at `url`, as clients reach it."""

    url: str

    def get(self, path: str, **options: Any) -> requests.Response:
        """The HTTP answer to a GET of `path`."""
        return requests.get(self.url + path, timeout=SECONDS, **options)

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        """The answer to a POST of JSON."""
        return requests.post(self.url + path, json=body, timeout=SECONDS, **options)

    def stream(self, path: str, body: dict[str, Any]) -> requests.Response:
        """The answer to a POST of JSON, which comes in events."""
        return self.post(path, {**body, "stream": True}, stream=True)

    def connect(self) -> socket.socket:
        """A connection over which nothing has been sent."""
        where = urlsplit(self.url)
        return socket.create_connection((where.hostname, where.port or 0), SECONDS)

    def raw(self, data: bytes) -> bytes:
        """All that these bytes are answered with, until the server ends the connection."""
        with self.connect() as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    def until(self, true: Callable[[], Any], seconds: float = SECONDS) -> None:
        """Wait until `true()` holds. Raises AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Front(Reached):
    """The HTTP process. url, and its Peer once `ready` has been sent."""

    def __init__(self, model: Path, **settings: Any) -> None:
        listener = http_process.listen("127.0.0.1", 0, settings.get("client_timeout", 60.0))
        self.child = http_process.start_own(settings_of(str(model), **settings), listener)
        self.tokenizer = open_tokenizer(model)
        self.peer = Peer(self.child.link, self.tokenizer)
        self.url = self.child.url

    def ready(self, **facts: Any) -> Front:
        """Requests are taken from now on."""
        self.peer.send(Ready(FACTS | facts))
        self.until(lambda: self.get("/health").status_code == 200)
        return self

    def close(self) -> int:
        """End both; the exit status of the HTTP process."""
        with contextlib.suppress(Exception):
            self.peer.send(Bye())
        self.peer.close()
        code = self.child.end(SECONDS)
        self.tokenizer.close()
        return code


@contextlib.contextmanager
def front(model: Path, *, ready: bool = True, facts: dict[str, Any] | None = None, **settings: Any
          ) -> Iterator[Front]:
    """A running front, ended in any case."""
    server = Front(model, **settings)
    try:
        yield server.ready(**(facts or {})) if ready else server
    finally:
        server.close()
