"""What the supervisor asks and tells the HTTP process that outlives the job: one JSON object a
line, over a socket pair, and an answer to each with the same `number`.

    {"op": "look"}                             how things stand
    {"op": "hold", "on": true}                 new requests wait, running ones go on
    {"op": "move", "why": TEXT, "anew": BOOL}  the engine is going to be ended, and another comes;
                                               anew: maybe with another model in the same place
    {"op": "beside", "on": true, "anew": BOOL} the next engine that enters loads while this one
                                               serves, and waits for `swap`; false: it goes away
    {"op": "swap", "why": TEXT, "lost": BOOL}  it takes over, with every open request; "swapped"
                                               says whether. lost: the one that serves has ended

Who holds the other end has started this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from pipeinfer.server.engine_client import Hub
from pipeinfer.server.engine_line import nobody
from pipeinfer.server.entered import Entered
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import Bye, Draining, EngineFrame
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings


class MovingHub(Hub):
    """A hub whose engines come and go, one at a time, and one more that waits. url: where clients
    are heard; anew: the next engine may have another model though its settings are the same;
    orders: the task that obeys the supervisor; renewed: called when the settings are other ones."""

    def __init__(self, settings: Settings, metrics: Metrics, url: str) -> None:
        super().__init__(settings, metrics, outlives=True)
        self.url, self.anew = url, False
        self.orders: asyncio.Task[None] | None = None
        self.renewed: Callable[[], None] = lambda: None
        self._serves: Entered | None = None
        self._next: Entered | None = None
        self._beside = False  #: the next one waits for `swap`
        self._reading: set[asyncio.Task[None]] = set()
        self._admits = asyncio.Event()
        self._admits.set()
        self._waiting = 0
        self._moving = False

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return self._waiting

    async def admission(self) -> None:
        """Return when a new request may come in, or after --restart-timeout."""
        if self._admits.is_set() or self._waiting >= self.settings.most_open:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self.settings.restart_timeout):
                await self._admits.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def check_room(self, count: int) -> None:
        """As `Hub`; nobody overtakes those who wait to be let in."""
        if not self._admits.is_set():
            raise ApiError(429, "the server is being changed and enough requests wait; try again "
                                "later", code="queue_full")
        super().check_room(count)

    def hold(self, on: bool) -> None:
        """Let no new request in from now on, or all of them."""
        if on:
            self._admits.clear()
        else:
            self._admits.set()

    def move(self, why: str, anew: bool) -> None:
        """The engine is going to be ended; what it still says counts, but for its goodbye."""
        self._moving, self.anew = True, anew
        self._lost(why)

    def handle(self, frame: EngineFrame) -> None:
        """As `Hub`."""
        if not (self._moving and isinstance(frame, Bye | Draining)):
            super().handle(frame)

    # --- engines ------------------------------------------------------------------------------

    def enter(self, engine: Entered) -> None:
        """An engine has come. It takes over at once, unless there is one or it is to wait."""
        if self._next is not None:
            self._next.line.close()
        self._next = engine
        if self._serves is not None and (self.anew or engine.settings.model != self.settings.model):
            engine.load(lambda: self._loaded(engine))
        task = asyncio.create_task(self._read(engine))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        self._take_next()

    async def _read(self, engine: Entered) -> None:
        reason = await engine.line.run(until=lambda: engine is self._serves and self._over())
        engine.lose(reason)
        if engine is self._next and not self._beside:
            self._next = None
        if engine is not self._serves:
            return
        if not self._over():
            self._lost(reason)
        if self.state == "restarting":
            self._take_next()
        else:
            self.left.set()

    def _take_next(self) -> None:
        """The next engine serves, if it may: when there is no other any more."""
        engine, before = self._next, self._serves
        if engine is None or self._beside or (before is not None and before.state != "gone"):
            return
        anew, self.anew, self._next = self.anew, False, None
        old, self.settings = self.settings, engine.settings
        self._serves, self._line = engine, engine.line
        if engine.settings != old or anew:
            self.renewed()
        if before is not None and (engine.settings.model != old.model or anew):
            self.end_all("the server has come back with another model")
            self.tokenizer = engine.tokenizer
        engine.talk_to(self.handle)

    def _loaded(self, engine: Entered) -> None:
        """An engine's vocabulary is there, or cannot be had."""
        if engine is self._serves:
            self.tokenizer = engine.tokenizer
            if engine.tokenizer is None:
                self.fail(engine.reason)
                self.left.set()

    def wait_for_swap(self, on: bool, anew: bool) -> None:
        """Whether the next engine loads beside the one that serves; if not, one that does goes."""
        self._beside, self.anew = on, anew
        if not on and self._next is not None:
            self._next.line.close()
            self._next = None

    def swap(self, why: str, lost: bool) -> bool:
        """The next engine takes over. lost: the one that serves has gone, even if its link has not
        said so yet; then also one that enters later. Whether that is so; harmless to say again."""
        serves = self._serves is not None and self._serves.state != "gone"
        if self._next is not None and self._next.state == "gone":
            return False
        if self._next is None and self._beside and serves and not lost:
            return False  # none has entered
        if self._serves is not None and serves and (lost or self._next is not None):
            self._serves.line.hear = nobody
            self._serves.lose(why)
            self._lost(why)
        self._beside = False
        self._take_next()
        return True

    def leave(self) -> None:
        """As `Hub`; who waits is let in to be told."""
        super().leave()
        self._admits.set()

    def _welcome(self, facts: dict[str, Any]) -> None:
        self._moving = False
        super()._welcome(facts)
        self._admits.set()

    def look(self) -> dict[str, Any]:
        """How things stand."""
        state = "loading" if self.tokenizer is None and self.state == "ready" else self.state
        engine = self._next
        return {"beside": engine.state if engine is not None else "expected" * self._beside,
                "beside_reason": engine.reason if engine is not None else "",
                "state": state, "reason": self.reason, "url": self.url, "open": len(self.open),
                "waiting": self._waiting, "model": self.settings.model,
                "name": self.settings.name, "lost": self.facts.get("lost", []),
                "ranks": self.facts.get("ranks", []),
                "stages": len({one["stage"] for one in self.facts.get("stages", ())})}


async def obey(hub: MovingHub, sock: socket.socket) -> None:
    """Answer until the other end is closed."""
    reader, writer = await asyncio.open_connection(sock=sock)
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            writer.write(json.dumps(_answer(hub, line)).encode() + b"\n")
            await writer.drain()
    writer.close()


def _answer(hub: MovingHub, line: bytes) -> dict[str, Any]:
    try:
        match order := json.loads(line):
            case {"op": "look"}:
                found = hub.look()
            case {"op": "hold", "on": bool(on)}:
                hub.hold(on)
                found = {"open": len(hub.open)}
            case {"op": "move", "why": str(why), "anew": bool(anew)}:
                hub.move(why, anew)
                found = {"open": len(hub.open)}
            case {"op": "beside", "on": bool(on), "anew": bool(anew)}:
                hub.wait_for_swap(on, anew)
                found = {"open": len(hub.open)}
            case {"op": "swap", "why": str(why), "lost": bool(lost)}:
                found = {"swapped": hub.swap(why, lost), "open": len(hub.open)}
            case _:
                found = {"error": "no such order"}
        return {**found, "number": order.get("number")}
    except (ValueError, AttributeError) as error:
        return {"error": str(error)}
