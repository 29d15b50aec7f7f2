"""The HTTP process's end of the link: who is open, what state the engine is in, who watches.

One object per process, used from its event loop only. Knows frames and choices, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.errors import ProtocolError
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.choice import Failure, Generation
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import HEADER, MAX_FRAME, decode_body, encode
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings

_WATCH_FRAMES = 64  #: frames kept for a page that is slow to read
_MOST_WATCHERS = 64
_log = logging.getLogger("pipeinfer.server")
_ABORTED = {
    "poison": Failure("internal", "several stages failed one after the other while they worked on "
                                  "it: it was given up so that others can go on"),
    "shutdown": Failure("shutdown", "the server is shutting down and the time that running "
                                    "requests get is over"),
    "timeout": Failure("timeout", "the request took longer than the server allows "
                                  "(--request-timeout)"),
}


@dataclass(slots=True, eq=False)
class Watcher:
    """A client of the pipeline page. The oldest frames go when it does not keep up."""

    frames: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_WATCH_FRAMES))
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, frame: dict[str, Any]) -> None:
        """Add a frame."""
        self.frames.append(frame)
        self.news.set()


class Hub:
    """State: loading, ready, draining, failed or stopped; `reason` says why it failed."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.state, self.reason = "loading", ""
        self.loading: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.tokenizer: Tokenizer | None = None
        self.open: dict[int, Generation] = {}
        self.left = asyncio.Event()  #: the engine has gone: said bye, failed or died
        self._ids = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._watchers: set[Watcher] = set()
        self._rebalances: dict[int, asyncio.Future[dict[str, Any]]] = {}

    # --- requests -----------------------------------------------------------------------------

    def check_ready(self) -> Tokenizer:
        """The vocabulary, when requests can be taken. Raises ApiError (503) otherwise."""
        if self.state == "ready" and self.tokenizer is not None:
            return self.tokenizer
        if self.state in ("loading", "ready"):
            raise ApiError(503, "the model is still loading; try again soon", code="loading")
        if self.state == "failed":
            raise ApiError(503, f"the cluster has failed: {self.reason}", code="cluster_failed")
        raise ApiError(503, "the server is shutting down", code="shutting_down")

    def check_room(self, count: int) -> None:
        """Raises ApiError: 400 for more choices than ever fit, 429 for more than fit now."""
        most = self.settings.most_open
        if count > most:
            raise ApiError(400, f"the request asks for {count} choices; this server takes {most} "
                                "at a time", param="n", code="too_many_choices")
        if len(self.open) + count > most:
            raise ApiError(429, f"the queue is full: {self.settings.parallel} requests run and "
                                f"{self.settings.queue} wait", code="queue_full")

    def submit(
        self, prompt: Sequence[int], index: int, fields: dict[str, Any], stops: Sequence[str],
        news: asyncio.Event,
    ) -> Generation:
        """Send one choice to the engine; its tokens arrive in what is returned.

        fields: max_tokens, ignore_eos and params of the submit frame. Check room before.
        """
        tokenizer = self.check_ready()
        request_id = next(self._ids)
        generation = Generation(request_id, index, len(prompt), tokenizer, stops, news)
        self.open[request_id] = generation
        self._send({"op": "submit", "id": request_id, "prompt": list(prompt), **fields})
        return generation

    def abort(self, generation: Generation, reason: str) -> None:
        """End a choice that nobody waits for; harmless when it has ended."""
        if generation.request_id in self.open and not generation.ended:
            self._send({"op": "abort", "id": generation.request_id, "reason": reason})

    async def rebalance(self, timeout: float) -> dict[str, Any]:
        """Have the engine deal the layers out anew; what came of it. Raises ApiError."""
        self.check_ready()
        if self._rebalances:
            raise ApiError(429, "the layers are being dealt out already", code="rebalancing")
        number = next(self._ids)
        answer = self._rebalances[number] = asyncio.get_running_loop().create_future()
        self._send({"op": "rebalance", "id": number})
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise ApiError(504, f"no answer within {timeout:g} s", code="timeout") from None
        finally:
            self._rebalances.pop(number, None)

    # --- watchers -----------------------------------------------------------------------------

    def check_watchers(self) -> None:
        """Raises ApiError (429) when enough clients look on."""
        if len(self._watchers) >= _MOST_WATCHERS:
            raise ApiError(429, f"{_MOST_WATCHERS} clients watch the pipeline already",
                           code="too_many_watchers")

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A Watcher that gets the engine's status and runs while the block lasts."""
        watcher = Watcher()
        self._watchers.add(watcher)
        if len(self._watchers) == 1:
            self._send({"op": "watch", "on": True})
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._send({"op": "watch", "on": False})

    # --- the link -----------------------------------------------------------------------------

    async def run(self, sock: socket.socket) -> None:
        """Follow the link until the engine has gone."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        try:
            while self.state not in ("failed", "stopped"):
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                if size > MAX_FRAME:
                    raise ProtocolError(f"a frame announces {size} bytes")
                self.handle(decode_body(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            self.fail("rank 0 has died")
        except Exception as error:  # whatever it is, clients must not wait for nothing
            _log.exception("a frame of rank 0 can not be handled")
            self.fail(f"rank 0 is not understood: {error}")
        self.left.set()

    def handle(self, frame: dict[str, Any]) -> None:
        """One frame of the engine. Raises ProtocolError for an unknown one."""
        match frame["op"]:
            case "news":
                for item in frame["items"]:
                    self._item(item)
            case "status":
                self.status = frame
                self.metrics.status(frame, self.facts)
                self._show(frame)
            case "runs":
                self._show(frame)
            case "loading":
                self.loading = frame["stages"]
            case "ready":
                self.state, self.facts = "ready", frame["facts"]
                if self._watchers:
                    self._send({"op": "watch", "on": True})
            case "changed":
                self.facts = frame["facts"]
                self._show({"op": "facts", "state": self.state, "facts": self.facts})
            case "rebalanced":
                if (waiting := self._rebalances.pop(frame["id"], None)) is not None:
                    waiting.set_result(frame)
            case "draining":
                self.state = "draining"
                self._show({"op": "state", "state": self.state})
            case "failed":
                self.fail(str(frame["message"]))
            case "bye":
                self.state = "stopped"
                self._end_all(Failure("shutdown", "the server has shut down"))
            case other:
                raise ProtocolError(f"unknown frame {other!r}")

    def _item(self, item: list[Any]) -> None:
        generation = self.open.get(item[1])
        if generation is None:
            return
        match item:
            case ["t", _, token, speculated, logprob, top, text]:
                self._token(generation, token, speculated, logprob, top,
                            None if text is None else text.encode("latin-1"))
            case ["end", request_id, reason, stats]:
                del self.open[request_id]
                if (failure := _ABORTED.get(reason)) is not None and not generation.stopped:
                    generation.stats = stats
                    generation.fail(failure)
                generation.end(reason, stats)
                self.metrics.ended(generation, reason)
            case ["error", request_id, kind, message]:
                del self.open[request_id]
                generation.fail(Failure(kind, message))
                self.metrics.ended(generation, "error")
            case _:
                raise ProtocolError(f"unknown news {item[0]!r}")

    def _token(self, generation: Generation, token: int, speculated: bool,
               logprob: float | None, top: list[list[Any]], seen: bytes | None) -> None:
        before = generation.counts.last
        try:
            alternatives = [(int(t), p) for t, p in top]
            if generation.push(token, speculated, logprob, alternatives, seen):
                self._send({"op": "abort", "id": generation.request_id, "reason": "stop"})
        except Exception as error:  # one request's trouble is not the others'
            _log.exception("token %r can not be handled", token)
            self._send({"op": "abort", "id": generation.request_id, "reason": "error"})
            generation.fail(Failure("internal", f"a token can not be handled: {error}"))
        self.metrics.token(generation, before)

    def fail(self, reason: str) -> None:
        """The engine is lost: every open choice ends with an error."""
        self.state, self.reason = "failed", reason
        self._end_all(Failure("failed", f"the cluster has failed: {reason}"))

    def _end_all(self, failure: Failure) -> None:
        for generation in self.open.values():
            generation.fail(failure)
            self.metrics.ended(generation, "error")
        self.open.clear()
        for waiting in self._rebalances.values():
            if not waiting.done():
                waiting.set_exception(ApiError(503, failure.message, code=(
                    "cluster_failed" if failure.kind == "failed" else "shutting_down")))
        self._show({"op": "state", "state": self.state, "reason": self.reason,
                    "time": time.time()})

    def _show(self, frame: dict[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.push(frame)

    def _send(self, frame: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(frame))
