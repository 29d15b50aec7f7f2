"""The HTTP process that outlives the job: its hub, and the execution of the supervisor's orders.

Orders come over a socket pair (`orders`), whose other end the supervisor has since it started this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any, assert_never

from pipeinfer.errors import ProtocolError
from pipeinfer.server.engine_client import Hub
from pipeinfer.server.engine_line import nobody
from pipeinfer.server.entered import Entered
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import Bye, Draining, EngineFrame
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.orders import Hold, Look, Move, Standby, Swap, decode, number_of
from pipeinfer.server.settings import Settings


class MovingHub(Hub):
    """A hub whose engines change: one serves, and one more may wait.

    url: the address for clients.
    new_model: whether the next engine may have another model although its settings are the same.
    orders: the task that executes the supervisor's commands.
    renewed: called when the settings have changed.
    """

    def __init__(self, settings: Settings, metrics: Metrics, url: str) -> None:
        super().__init__(settings, metrics, outlives=True)
        self.url, self.new_model = url, False
        self.orders: asyncio.Task[None] | None = None
        self.renewed: Callable[[], None] = lambda: None
        self._serves: Entered | None = None
        self._next: Entered | None = None
        self._standby = False  #: whether the next engine waits for `swap`
        self._reading: set[asyncio.Task[None]] = set()
        self._admits = asyncio.Event()
        self._admits.set()
        self._waiting = 0
        self._moving = False

    @property
    def waiting(self) -> int:
        """The number of requests that wait for admission."""
        return self._waiting

    async def admission(self) -> None:
        """Return when a new request may enter, or after --restart-timeout."""
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
        """See `Hub.check_room`. No request overtakes those that wait for admission."""
        if not self._admits.is_set():
            raise ApiError(429, "the server is being changed and enough requests wait; try again "
                                "later", code="queue_full")
        super().check_room(count)

    def hold(self, on: bool) -> None:
        """Hold new requests from now on, or admit all of them."""
        if on:
            self._admits.clear()
        else:
            self._admits.set()

    def move(self, why: str, new_model: bool) -> None:
        """Prepare for the end of the engine: its further frames count, except for Bye and
        Draining."""
        self._moving, self.new_model = True, new_model
        self._lost(why)

    def handle(self, frame: EngineFrame) -> None:
        """See `Hub.handle`."""
        if not (self._moving and isinstance(frame, Bye | Draining)):
            super().handle(frame)

    # --- engines ------------------------------------------------------------------------------

    def enter(self, engine: Entered) -> None:
        """Handle a new engine. It takes over at once, unless another one serves or it is to
        wait."""
        if self._next is not None:
            self._next.line.close()
        self._next = engine
        if self._serves is not None and (
                self.new_model or engine.settings.model != self.settings.model):
            engine.load(lambda: self._loaded(engine))
        task = asyncio.create_task(self._read(engine))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        self._take_next()

    async def _read(self, engine: Entered) -> None:
        reason = await engine.line.run(until=lambda: engine is self._serves and self._over())
        engine.lose(reason)
        if engine is self._next and not self._standby:
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
        """Let the next engine serve if there is no other any more."""
        engine, before = self._next, self._serves
        if engine is None or self._standby or (before is not None and before.state != "gone"):
            return
        new_model, self.new_model, self._next = self.new_model, False, None
        old, self.settings = self.settings, engine.settings
        self._serves, self._line = engine, engine.line
        if engine.settings != old or new_model:
            self.renewed()
        if before is not None and (engine.settings.model != old.model or new_model):
            self.end_all("the server has come back with another model")
            self.tokenizer = engine.tokenizer
        engine.talk_to(self.handle)

    def _loaded(self, engine: Entered) -> None:
        """Handle the end of loading an engine's vocabulary, successful or not."""
        if engine is self._serves:
            self.tokenizer = engine.tokenizer
            if engine.tokenizer is None:
                self.fail(engine.reason)
                self.left.set()

    def wait_for_swap(self, on: bool, new_model: bool) -> None:
        """Set whether the next engine loads alongside the serving one; if not, disconnect one
        that does."""
        self._standby, self.new_model = on, new_model
        if not on and self._next is not None:
            self._next.line.close()
            self._next = None

    def swap(self, why: str, lost: bool) -> bool:
        """Let the next engine take over; return whether it does. A repeated call is harmless.

        lost: the serving engine has ended, even if its link is not closed yet. Then an engine that
            connects later takes over, too.
        """
        serves = self._serves is not None and self._serves.state != "gone"
        if self._next is not None and self._next.state == "gone":
            return False
        if self._next is None and self._standby and serves and not lost:
            return False  # none has entered
        if self._serves is not None and serves and (lost or self._next is not None):
            self._serves.line.hear = nobody
            self._serves.lose(why)
            self._lost(why)
        self._standby = False
        self._take_next()
        return True

    def leave(self) -> None:
        """See `Hub.leave`. Waiting requests are admitted, so that they get an error."""
        super().leave()
        self._admits.set()

    def _welcome(self, facts: dict[str, Any]) -> None:
        self._moving = False
        super()._welcome(facts)
        self._admits.set()

    def look(self) -> dict[str, Any]:
        """Return the state for the supervisor."""
        state = "loading" if self.tokenizer is None and self.state == "ready" else self.state
        engine = self._next
        return {"beside": engine.state if engine is not None else "expected" * self._standby,
                "beside_reason": engine.reason if engine is not None else "",
                "state": state, "reason": self.reason, "url": self.url, "open": len(self.open),
                "waiting": self._waiting, "model": self.settings.model,
                "name": self.settings.name, "lost": self.facts.get("lost", []),
                "ranks": self.facts.get("ranks", []),
                "stages": len({one["stage"] for one in self.facts.get("stages", ())})}


async def obey(hub: MovingHub, sock: socket.socket) -> None:
    """Execute commands until the other end is closed."""
    reader, writer = await asyncio.open_connection(sock=sock)
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            writer.write(json.dumps(_answer(hub, line)).encode() + b"\n")
            await writer.drain()
    writer.close()


def _answer(hub: MovingHub, line: bytes) -> dict[str, Any]:
    try:
        order = decode(line)
    except ProtocolError as error:
        return {"error": str(error), "number": number_of(line)}
    found: dict[str, Any] = {}
    match order:
        case Look():
            found = hub.look()
        case Hold(on):
            hub.hold(on)
        case Move(why, new_model):
            hub.move(why, new_model)
        case Standby(on, new_model):
            hub.wait_for_swap(on, new_model)
        case Swap(why, lost):
            found = {"swapped": hub.swap(why, lost)}
        case _:
            assert_never(order)
    return {"open": len(hub.open), **found, "number": order.number}
