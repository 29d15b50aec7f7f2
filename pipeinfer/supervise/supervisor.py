"""The loop of every supervisor: it performs the actions that `lifecycle` returns, and sends it what
happens.

A `JobSource` provides the jobs; `keeper` adds the further functions of `pipeinfer up`.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from msgspec import structs

from pipeinfer.cluster import cleanup
from pipeinfer.errors import UsageError
from pipeinfer.server import orders
from pipeinfer.supervise import lifecycle
from pipeinfer.supervise.hosts import others
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.lifecycle import Action, Event, Exit, Phase
from pipeinfer.supervise.rules import INTERRUPTED

_END = 2.0  #: seconds for a moved job to end before it is killed
_HISTORY = 20


class JobSource(Protocol):
    """Provides the jobs of a supervisor.

    name: id of the job, which its processes have in their environment.
    logs_at: where the output of its jobs is.
    waits: whether a job that its hosts cannot hold waits for more hosts.
    """

    name: str
    logs_at: str
    waits: bool

    @property
    def hostfile(self) -> str:
        """The launcher's hostfile with the hosts of the last job, "" if none: they may have
        leftovers."""
        ...

    def job(self) -> SupervisedJob:
        """Return the next start of the job."""
        ...

    def ask_hosts(self) -> list[str]:
        """Use the hosts that answer now; return notes for the user.

        Raises UsageError when the job cannot run on any.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Return what the history has about the next job."""
        ...

    def error(self) -> str:
        """Return the error that the last job has printed, "" if none."""
        ...

    def clean(self, host: str, job: str) -> None:
        """End the processes that a job has left on another host."""
        ...


@dataclass(slots=True, eq=False)
class JobChange:
    """A move that is prepared.

    why: for the user. use, undo: set its settings, and those from before it, for the next job.
    new_model: whether the model may be another one under the same path.
    began, open: when the job was ended (`time.monotonic`), and how many requests were open then.
    """

    why: str
    use: Callable[[], None]
    undo: Callable[[], None]
    new_model: bool = False
    began: float = 0.0
    open: int = 0


class Supervisor:
    """Runs the jobs of `source` until one has ended for good.

    restarts: how often a failed job is started again. door: the HTTP process, None if there is
        none.
    say: prints a line for the user. last: signals that end the job at once. The others let what
        runs complete first; a conversation would wait for the next message.
    changed: called when `state` or `history` has changed.
    """

    def __init__(self, source: JobSource, restarts: int, door: HttpDoor | None,
                 say: Callable[[str], None], *,
                 last: Sequence[signal.Signals] = (),
                 changed: Callable[[], None] = lambda: None) -> None:
        self.source, self.door, self.say, self._last = source, door, say, last
        self.running = 0  #: number of the job that runs, 0 if none does
        self.history: list[dict[str, Any]] = []
        self.failed_move = ""  #: why the last move failed
        self._changed = changed
        self.state, actions = lifecycle.begin(restarts, waits=source.waits)
        self._todo: asyncio.Queue[Action | BaseException] = asyncio.Queue()
        self._add(actions)
        self._change: JobChange | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._job: SupervisedJob | None = None
        self._hosts: list[str] | None = None  #: other hosts of the last job, None before the first
        self._began, self._hung_up = 0.0, False
        self._running: asyncio.Task[int] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Run jobs until the end; return the exit status of the last one.

        Raises ChildProcessError if the launcher cannot be started.
        """
        self._heed_signals()
        try:
            while not isinstance(action := await self._todo.get(), Exit):
                if isinstance(action, BaseException):
                    raise action
                await self._perform(action)
            return action.status
        finally:
            self.state = structs.replace(self.state, phase=Phase.STOPPED)
            if self._timer is not None:
                self._timer.cancel()
            if self.door is not None:
                await self.door.close()

    def stop(self, *, at_once: bool = False) -> None:
        """Handle a request to end: the first lets running requests complete, further ones end
        the job at once."""
        self.feed(lifecycle.Stop(at_once))

    def feed(self, event: Event) -> None:
        """Handle an event."""
        self.state, actions = lifecycle.next_state(self.state, event)
        self._add(actions)
        self._changed()

    # --- moves --------------------------------------------------------------------------------

    def order(self) -> tuple[int, asyncio.Future[str]]:
        """Order a move, which `due` or `withdraw` follows.

        Returns its number and its answer: an error, "" when it is done.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.feed(lifecycle.Order(number))
        return number, answer

    def due(self, number: int, change: JobChange) -> None:
        """Carry out a move that is prepared."""
        if self.state.order == number:
            self._change = change
        self.feed(lifecycle.Due(number))

    def withdraw(self, number: int, why: str = "") -> None:
        """Take an order back. why: what prevents the move, "" if there is nothing to move."""
        self.feed(lifecycle.Withdraw(number, why))

    # --- actions ------------------------------------------------------------------------------

    def _add(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._todo.put_nowait(action)

    async def _perform(self, action: Action) -> None:
        match action:
            case lifecycle.Start(again):
                self._running = asyncio.create_task(self._run(again))
                self._running.add_done_callback(self._ended)
            case lifecycle.Interrupt(at_once):
                self._end(lambda job: job.interrupt(at_once=at_once))
            case lifecycle.EndJob():
                self._end(self._end_soon)
            case lifecycle.Wait(seconds, job):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(
                    seconds, self.feed, lifecycle.Elapsed(job))
            case lifecycle.Announce(back):
                await self._announce(back)
            case lifecycle.Apply() | lifecycle.Restore():
                self._set(isinstance(action, lifecycle.Apply))
            case lifecycle.Admit():
                if self.door is not None:
                    await self.door.ask(orders.Hold(on=False))
            case lifecycle.Answered(order, error, refused):
                if not refused:
                    self.failed_move = error
                    self._changed()
                if not (answer := self._answers.pop(order)).done():
                    answer.set_result(error)
            case lifecycle.Say(text):
                self.say(text)
            case Exit():
                pass
            case _:
                assert_never(action)

    async def _run(self, again: bool) -> int:
        """Run a job from its start to its end; return its exit status."""
        if self._hosts is not None:
            await self.clean(self.source.name, self._hosts)
        if again:
            await self._ask_hosts()
        if self.door is not None:
            await self.door.open()
        self._hosts, self._began = others(self.source.hostfile), time.monotonic()
        row = {"number": self.state.job, "at": time.time(), **self.source.facts(), "exit": None}
        self.history = [*self.history, row][-_HISTORY:]
        self._job, self.running = self.source.job(), self.state.job
        self._changed()
        return await self._job.run()

    def _ended(self, run: asyncio.Task[int]) -> None:
        """Handle the end of a job, or of its preparation."""
        if not run.cancelled() and (error := run.exception()) is not None:
            self._todo.put_nowait(error)
            return
        status = INTERRUPTED if run.cancelled() else run.result()
        lived, why = 0.0, ""
        if self._job is not None:
            lived, why = time.monotonic() - self._began, self.source.error()
            self.history[-1] |= {"exit": status, "lived": round(lived, 1), "why": why,
                                 "moved": self.state.phase is Phase.MOVING}
        self._job, self.running = None, 0
        self.feed(lifecycle.JobEnded(status, lived, why or f"see {self.source.logs_at}"))

    def _end(self, how: Callable[[SupervisedJob], None]) -> None:
        if self._job is not None:
            how(self._job)
        elif self._running is not None:
            self._running.cancel()

    def _end_soon(self, job: SupervisedJob) -> None:
        def kill() -> None:
            if self._job is job:
                job.kill()

        job.end()
        asyncio.get_running_loop().call_later(_END, kill)

    async def _announce(self, back: bool) -> None:
        """Tell the HTTP process that another engine follows the present one."""
        change = self._change
        assert change is not None
        why = "back to what there was before" if back else change.why
        if self.door is not None:
            seen = await self.door.ask(orders.Move(why=why, new_model=change.new_model))
            change.open = seen.open
        if not back:
            change.began = time.monotonic()
            self.say(f"{why}; {change.open} open requests wait")

    def _set(self, new: bool) -> None:
        assert self._change is not None
        try:
            (self._change.use if new else self._change.undo)()
        except UsageError as error:  # such as a full disk; the job starts as it was
            self.say(f"error: {error}")

    async def _ask_hosts(self) -> None:
        try:
            for line in await asyncio.to_thread(self.source.ask_hosts):
                self.say(line)
        except UsageError as error:
            self.say(f"error: {error}")  # they may be back soon

    def _heed_signals(self) -> None:
        """Handle signals, except those that were ignored when this process started (nohup)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number != signal.SIGHUP or not self._hung_up:  # the shell sends a second one
            self._hung_up |= number == signal.SIGHUP
            self.stop(at_once=number in self._last)

    async def clean(self, name: str, hosts: list[str]) -> None:
        """Kill the remaining processes of an earlier job, here and on its hosts, so that none
        holds a port, memory or a lock. Each host has a time limit of its own."""
        await asyncio.gather(asyncio.to_thread(self._clean_here, name), *(
            asyncio.to_thread(self.source.clean, host, name) for host in hosts))

    def _clean_here(self, name: str) -> None:
        cleanup.clear_sessions()
        if killed := cleanup.end(name):
            self.say(f"killed {len(killed)} processes that the previous job left behind")
