"""Moves the job of `pipeinfer up` to other hosts or options: the serving job ends, and the next
one starts.

The HTTP process keeps every client and passes open requests on; if answers could differ, open
requests complete first. If the next job does not start, the one before starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from pipeinfer.errors import UsageError
from pipeinfer.server.orders import Hold, Move
from pipeinfer.supervise.commands_socket import Report
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.serving import Serving
from pipeinfer.supervise.state import Folder
from pipeinfer.supervise.supervisor import Running, Supervisor

_END = 2.0  #: seconds for a moved job to end before it is killed
_BEGIN = 600.0  #: seconds for the next one to be ready
_HISTORY = 20


@dataclass(frozen=True, slots=True)
class JobChange:
    """A planned move.

    why: reason, for the user.
    undo: restores the settings of the job before.
    words: other options, None for the same.
    waits: why open requests must complete first, "" if they continue.
    wait: most seconds for that. force: continue after that with requests still open.
    new_model: whether the model may be another one under the same path.
    """

    why: str
    undo: Callable[[], None]
    words: list[str] | None = None
    waits: str = ""
    wait: float = 0.0
    force: bool = False
    new_model: bool = False


class Mover(Supervisor):
    """A supervisor that can move its job. folder: where its logs are."""

    def __init__(self, serving: Serving, restarts: int, folder: Folder, say: Report) -> None:
        door = HttpDoor(serving.environ, say)
        super().__init__(serving, restarts, door, say)
        self._serving, self._http, self._folder = serving, door, folder
        self._phase, self._quiet_since = "starting", 0.0
        self._history: list[dict[str, Any]] = []
        self._ready = asyncio.Event()
        self._busy = asyncio.Lock()
        self._meant = False  #: the running job is ended in order to move
        self._undo: Callable[[], None] | None = None  #: restores the settings that worked
        self._refused = ""  #: why the new settings were not used
        self._failed_move = ""  #: why the last move failed
        self._model: tuple[object, ...] = ()
        self._served: dict[str, Any] = {}  #: place and options of the job that serves

    def stop(self, *, at_once: bool = False) -> None:
        """Handle a request to end, see `Supervisor.stop`."""
        super().stop(at_once=at_once)
        self._phase = "ending"

    # --- the loop's events --------------------------------------------------------------------

    @override
    def begun(self) -> dict[str, Any]:
        self._ready.clear()
        self._phase = "starting"
        self._take_note()
        return self._row()

    @override
    async def ended(self, running: Running, status: int, lived: float) -> bool:
        running.row |= {"exit": status, "lived": round(lived, 1), "moved": self._meant,
                        "why": self._serving.logs.error(running.row["number"])}
        meant, self._meant = self._meant, False
        self._ready.clear()
        if meant or self._undo is None:
            return meant
        self._undo()
        self._undo = None
        why = running.row["why"] or f"see {self._folder.path / 'logs'}"
        self._refused = (f"the changed job does not start (exit code {status}; {why}): "
                         "back to what there was before")
        self._failed_move = self._refused
        self.say(self._refused)
        await self._http.ask(Move(why="back to what there was before", new_model=True))
        return True

    def _row(self) -> dict[str, Any]:
        row = {"number": self._serving.starts + 1, "at": time.time(),
               "ranks": self._serving.ranks, "words": self._serving.words, "exit": None}
        self._history = [*self._history, row][-_HISTORY:]
        return row

    def _take_note(self) -> None:
        """Record the source's present settings as those of the serving job."""
        serving, roster = self._serving, self._serving.roster
        self._served = {"ranks": serving.ranks, "words": serving.words,
                        "used": list(roster.used) if roster else []}

    # --- moving -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _only(self) -> AsyncIterator[None]:
        """Allow one move at a time, and only of a job that is ready. Raises UsageError."""
        if self._busy.locked():
            raise UsageError("the job is being moved already: wait until that is over")
        if not self._ready.is_set() or self.asked:
            raise UsageError("the job is not ready: try again when `pipeinfer status` says so")
        async with self._busy:
            self._failed_move = ""
            try:
                yield
            except UsageError as error:
                self._failed_move = str(error)
                raise

    async def _move(self, report: Report, change: JobChange) -> str:
        """Replace the serving job by the next one; return the outcome in words.

        Raises UsageError if that was not done.
        """
        if change.waits:
            await self._until_none_is_open(report, change)
        running = self.current
        if running is None or self.asked:
            await self._http.ask(Hold(on=False))
            raise UsageError("the job has ended meanwhile")
        self._meant, self._refused = True, ""
        order = Move(why=change.why, new_model=change.new_model)
        count = (await self._http.ask(order)).open
        self.say(f"{change.why}; {count} open requests wait")
        self._ready.clear()
        self._phase, began = "moving", time.monotonic()
        self._undo = change.undo
        if change.words is not None:
            self._serving.use(change.words)
        self._end(running)
        return await self._until_ready(f"{change.why}: ready again", began, count)

    async def _until_ready(self, what: str, began: float, count: int) -> str:
        try:
            await asyncio.wait_for(self._ready.wait(), _BEGIN)
        except TimeoutError:
            raise UsageError(f"the job is not ready after {_BEGIN:g} s: see `pipeinfer status` and "
                             f"{self._folder.path / 'logs'}") from None
        if self._refused:
            raise UsageError(self._refused)
        return self._done(what, began, count)

    def _done(self, what: str, began: float, count: int) -> str:
        said = f"{what} after {time.monotonic() - began:.1f} s"
        self.say(said)
        self._quiet_since = time.monotonic()
        return f"{said}; {count} open requests went on" if count else said

    def _end(self, running: Running) -> None:
        """End a job whose requests belong to another one."""
        def kill() -> None:
            if not running.ends.done():
                running.job.kill()

        running.job.end()
        asyncio.get_running_loop().call_later(_END, kill)

    async def _until_none_is_open(self, report: Report, change: JobChange) -> None:
        """Hold new requests and wait until the open ones have ended, at most for a time.

        Raises UsageError if requests are still open, unless the change forces the move.
        """
        wait, waited = change.wait, False
        deadline = time.monotonic() + wait
        found = await self._http.ask(Hold(on=True))
        while found.open and not self.asked:
            if not waited:
                waited = True
                report(f"{change.waits}: waiting for {found.open} open requests, {wait:g} s at "
                     "most; new ones wait")
            if time.monotonic() > deadline:
                if change.force:
                    report(f"{found.open} requests have not ended")
                    return
                await self._http.ask(Hold(on=False))
                raise UsageError(f"{found.open} requests still run after {wait:g} s, so nothing "
                                 "was changed: --wait S waits for longer, --force does not wait "
                                 "for them")
            await asyncio.sleep(0.25)
            found = await self._http.ask(Hold(on=True))  # a job that came meanwhile let all in


def identity(path: str) -> tuple[object, ...]:
    """Return a value that changes if the file is replaced or modified."""
    try:
        info = Path(path).stat()
    except OSError:
        return ()
    return path, info.st_ino, info.st_size, info.st_mtime_ns
