"""What the supervisor asks and tells the HTTP process that outlives the job: one JSON object a
line, over a socket pair, and an answer to each with the same `number`.

    {"op": "look"}                             how things stand
    {"op": "hold", "on": true}                 new requests wait, running ones go on
    {"op": "move", "why": TEXT, "anew": BOOL}  the engine is going to be ended, and another comes;
                                               anew: maybe with another model in the same place

Who holds the other end has started this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from pipeinfer.server.engine_client import Hub
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import Bye, Draining, EngineFrame
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings


class MovingHub(Hub):
    """A hub whose engines come and go. url: where clients are heard; anew: the next engine may have
    another model though its settings are the same; orders: the task that obeys the supervisor."""

    def __init__(self, settings: Settings, metrics: Metrics, url: str) -> None:
        super().__init__(settings, metrics, outlives=True)
        self.url, self.anew = url, False
        self.orders: asyncio.Task[None] | None = None
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
        return {"state": state, "reason": self.reason, "url": self.url, "open": len(self.open),
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
            case _:
                found = {"error": "no such order"}
        return {**found, "number": order.get("number")}
    except (ValueError, AttributeError) as error:
        return {"error": str(error)}
