"""The loop of every supervisor: runs a job, starts it again when it fails, and replaces it by one
with other settings.

A `JobSource` provides the jobs; `keeper` adds the further functions of `pipeinfer up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pipeinfer.cluster import cleanup
from pipeinfer.errors import ClusterError, PlanError, UsageError, ending
from pipeinfer.server import orders
from pipeinfer.supervise.hosts import clean_by_ssh, others
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.rules import INTERRUPTED, RestartBudget

_END = 2.0  #: seconds for a moved job to end before it is killed
_SOON = 1.0  #: seconds until a job starts again that has lost a machine
_RECENT = 60.0  #: seconds within which a job ends that cannot go on without a machine
_HISTORY = 20
_VANISHED = -1  #: a server has ended with exit status 0, which nobody has asked for
LIMIT = 600.0  #: seconds for the next job of a move to be ready
_BACK = "back to what there was before"


class Phase(Enum):
    """What the supervisor is doing; the value is shown to users."""

    STARTING = "starting"
    READY = "ready"
    ORDERED = "ready, and about to move"
    MOVING = "moving: the job ends"
    TRYING = "moving: the next job starts"
    FAILING = "moving: the next job ends, as it was not ready in time"
    RETURNING = "the next job did not start: the job before starts again"
    PAUSING = "starting again soon"
    RETIRING = "falling asleep: the job ends"
    ASLEEP = "asleep"
    WAITING = "waiting for more machines to join"
    ENDING = "ending"
    STOPPED = "ended"


_MOVES = (Phase.ORDERED, Phase.MOVING, Phase.TRYING, Phase.FAILING, Phase.RETURNING)


class JobSource:
    """Provides the jobs of a supervisor.

    name: id of the job, which its processes have in their environment.
    logs_at: where the output of its jobs is. waits: whether a job that its hosts cannot hold waits
    for more hosts. serves: whether a job ends only if it is asked to.
    """

    name: str
    logs_at = "its output"
    waits = False
    serves = False

    @property
    def hostfile(self) -> str:
        """The launcher's hostfile with the hosts of the last job, "" if none: they may have
        leftovers."""
        return ""

    @property
    def settings(self) -> Any:
        """The settings of the next job."""
        return None

    def job(self) -> SupervisedJob:
        """Return the next start of the job."""
        raise NotImplementedError

    def take(self, settings: Any) -> None:
        """Use these settings for the next job. Raises UsageError."""
        raise NotImplementedError

    def ask_hosts(self) -> list[str]:
        """Use the hosts that answer now; return notes for the user.

        Raises UsageError when the job cannot run on any.
        """
        return []

    def facts(self) -> dict[str, Any]:
        """Return what the history has about the next job."""
        return {}

    def error(self) -> str:
        """Return the error that the last job has printed, "" if none."""
        return ""

    def rest(self) -> None:
        """Let the hosts of the last job sleep, if their owners have it so. `ask_hosts` wakes
        them."""

    def clean(self, host: str, job: str) -> None:
        """End the processes that a job has left on another host."""
        clean_by_ssh(host, job)


@dataclass(slots=True, eq=False)
class Move:
    """A planned replacement of the job.

    why: reason, for the user. settings: of the next job.
    new_model: whether the model may be another one under the same path.
    waits: why open requests must complete first, "" if they continue.
    wait: most seconds for that. force: continue after that with requests still open.
    began, open: when the job was ended (`time.monotonic`), and how many requests were open then.
    """

    why: str
    settings: Any
    new_model: bool = False
    waits: str = ""
    wait: float = 0.0
    force: bool = False
    began: float = 0.0
    open: int = 0


class Supervisor:
    """Runs the jobs of `source` until one has ended for good.

    restarts: how often a failed job is started again. door: the HTTP process, None if there is
        none.
    say: prints a line for the user.
    changed: called when `phase` or `history` has changed.
    """

    def __init__(self, source: JobSource, restarts: int, door: HttpDoor | None,
                 say: Callable[[str], None], *,
                 changed: Callable[[], None] = lambda: None) -> None:
        self.source, self.door, self.say = source, door, say
        self.phase, self.budget = Phase.STARTING, RestartBudget.of(restarts)
        self.number = 0  #: of the last start
        self.running = 0  #: number of the job that runs, 0 if none does
        self.history: list[dict[str, Any]] = []
        self.failed_move = ""  #: why the last move failed
        self._changed = changed
        self._move: Move | None = None
        self._order: asyncio.Future[str] | None = None  #: answer to the order in progress
        self._failure = ""  #: why the move in progress has failed
        self._job: SupervisedJob | None = None
        self._hosts: list[str] | None = None  #: other hosts of the last job, None before the first
        self._began, self._hung_up = 0.0, False
        self._loss = ("", False, 0.0)  #: as `lose_host` has it, and when
        self._task: asyncio.Task[int] | None = None
        self._wake = asyncio.Event()

    async def run(self) -> int:
        """Run jobs until the end; return the exit status of the last one.

        Raises ChildProcessError if the launcher cannot be started.
        """
        self._heed_signals()
        try:
            again = False
            # one job after the other; only a user, or an end that is not tried again, ends this
            while True:
                status, lived = await self._one(Phase.STARTING, again)
                # the job of a move may be moved again
                while self.phase is Phase.MOVING:
                    status, lived = await self._replace()
                if self._ends:
                    return status
                again = True
                if self._retires:
                    if not await self._rest():
                        return INTERRUPTED
                    continue
                # a launcher returns 0 for ranks that were killed before they had met
                if status == 0 and self.source.serves:
                    status = _VANISHED
                # before the pause: who ordered a move waits for its answer
                self._answer(self._failure or "the job has ended meanwhile")
                if not await self._may_start_again(status, lived):
                    return INTERRUPTED if self._ends else \
                        ClusterError.exit_code if status == _VANISHED else status
        finally:
            asked, self.phase = self._ends, Phase.STOPPED
            if self.door is not None:
                await self.door.close()
            if self.source.serves and asked:
                self.say("stopped")

    @property
    def start_seconds(self) -> float:
        """For how long the present job has been starting; 0 if none is."""
        starts = self._job is not None and self.phase in (
            Phase.STARTING, Phase.TRYING, Phase.RETURNING)
        return time.monotonic() - self._began if starts else 0.0

    @property
    def _lost(self) -> str:
        """Why the present or last job cannot go on without a machine, "" if it can."""
        return self._loss[0] if time.monotonic() - self._loss[2] < _RECENT else ""

    @property
    def _ends(self) -> bool:
        return self.phase is Phase.ENDING

    @property
    def _retires(self) -> bool:
        return self.phase is Phase.RETIRING

    def _enter(self, phase: Phase) -> None:
        if self.phase not in (Phase.ENDING, Phase.STOPPED):  # which are final
            self.phase = phase
        self._changed()

    # --- a job --------------------------------------------------------------------------------

    async def _one(self, phase: Phase, again: bool = False) -> tuple[int, float]:
        """Run a job from its start, in `phase`, to its end; return its exit status and seconds of
        life. again: after a failure, on the hosts that answer."""
        self._enter(phase)
        if self.phase is Phase.ENDING:
            return INTERRUPTED, 0.0
        self.number += 1
        self._task = asyncio.create_task(self._run(again))
        # the next job of a move may hang at its start, and open requests wait for it
        limit = asyncio.get_running_loop().call_later(LIMIT, self._late)
        await asyncio.wait((self._task,))
        limit.cancel()
        status = INTERRUPTED if self._task.cancelled() else self._task.result()
        lived = 0.0
        if self._job is not None:
            lived = time.monotonic() - self._began
            self.history[-1] |= {"exit": status, "lived": round(lived, 1), "lost": self._lost,
                                 "why": self.source.error(), "moved": self.phase is Phase.MOVING,
                                 "slept": self._retires}
        self._job, self.running = None, 0
        return status, lived

    async def _run(self, again: bool) -> int:
        # what the job before has left may hold its port, memory or locks
        if self._hosts is not None:
            await self.clean(self.source.name, self._hosts)
        if again:
            await self._ask_hosts()
        if self.door is not None:
            await self.door.open()
        self._hosts, self._began = others(self.source.hostfile), time.monotonic()
        row = {"number": self.number, "at": time.time(), **self.source.facts(), "exit": None}
        self.history = [*self.history, row][-_HISTORY:]
        self._job, self.running, self._loss = self.source.job(), self.number, ("", False, 0.0)
        self._changed()
        return await self._job.run()

    async def _may_start_again(self, status: int, lived: float) -> bool:
        """Wait for the next start; return False if there is none."""
        how = self._lost or ("killed" if status == _VANISHED else ending(status))
        said = f"the job has ended{':' if self._lost else ' with'} {how}"
        if status == _VANISHED and not self._lost:
            said = ("all ranks of the job have ended without an error: were they killed, maybe by "
                    f"the kernel for want of memory? ({self.source.logs_at})")
        if self.source.waits and status == PlanError.exit_code:
            self.say("the model does not fit yet: waiting for more machines to join")
            return await self._wait(Phase.WAITING, None)
        if self._lost and self._loss[1]:
            self.say(f"{said}: starting again in {_SOON:.0f} s, which costs no restart")
            return await self._wait(Phase.PAUSING, _SOON)
        self.budget, pause = self.budget.after(status, lived)
        if pause is None:
            used_up = self.budget.used_up(status)
            if used_up or "killed" in how:
                self.say(said + ", and every restart is used up" * used_up)
            return False
        self.say(f"{said}: starting again in {pause:.0f} s ({self.budget.left} more after that)")
        return await self._wait(Phase.PAUSING, pause)

    async def _wait(self, phase: Phase, seconds: float | None) -> bool:
        """Wait for some seconds, or for a host; return False if the user ends it meanwhile."""
        self._enter(phase)
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            # None waits for `host_came` or a stop alone
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        return self.phase is phase

    async def _rest(self) -> bool:
        """Free the hosts until `wake`; return False if the user ends it meanwhile."""
        # a rank that hangs would keep its host's memory
        await self.clean(self.source.name, self._hosts or [])
        self._hosts = None  # a host that sleeps has nothing to clean, and does not answer
        await asyncio.to_thread(self.source.rest)
        return not self._ends and await self._wait(Phase.ASLEEP, None)

    # --- what happens meanwhile ---------------------------------------------------------------

    def ready(self, job: int) -> None:
        """Handle that the job of this number serves."""
        if job == self.number and self.phase in (Phase.STARTING, Phase.TRYING, Phase.RETURNING):
            self._answer(self._failure)
            self._enter(Phase.READY)

    def host_came(self) -> None:
        """Start a job that waits for more hosts."""
        if self.phase is Phase.WAITING:
            self._wake.set()

    async def sleep(self) -> None:
        """End the job until `wake`, unless the HTTP process has an open request."""
        if self.door is None or self.phase is not Phase.READY:
            return
        job = self._job
        # before the order, which counts even if its answer is lost
        self._enter(Phase.RETIRING)
        seen = await self.door.ask(orders.Sleep())
        if not self._retires:
            return
        if seen.state == "ready":  # for a request that has come meanwhile
            self._enter(Phase.READY)
            return
        self.say("no request comes: the job ends until the next one")
        self._end(job)

    def wake(self) -> None:
        """Start the job that sleeps."""
        if self.phase is Phase.ASLEEP:
            self._wake.set()

    def stop(self, *, at_once: bool = False) -> None:
        """Handle a request to end: the first lets running requests complete, further ones end
        the job at once."""
        self._answer(self._failure or "the server is ending")
        self._enter(Phase.ENDING)
        self._wake.set()
        if self._job is not None:
            self._job.interrupt(at_once=at_once)
        elif self._task is not None:
            self._task.cancel()

    def _late(self) -> None:
        """Handle that the next job of a move, or the one before it, is not ready in time."""
        if self.phase is Phase.TRYING:
            self._give_up(f"the changed job is not ready after {LIMIT:g} s")
        elif self.phase is Phase.RETURNING:
            self._answer(self._failure)
            self._enter(Phase.STARTING)

    def lose_host(self, why: str, *, excused: bool) -> None:
        """Handle that a machine of the job is gone or starts nothing: a start that needs it ends
        at once, instead of when its ranks have waited for it. A job that serves may go on.

        excused: whether the start again costs none of the restarts.
        """
        self._loss = why, excused, time.monotonic()
        if self.phase is Phase.TRYING:
            self._give_up(f"the changed job cannot start ({why})")
        elif self.phase in (Phase.STARTING, Phase.RETURNING):
            self.say(f"the job cannot start: {why}")
            self._end(self._job)

    def _give_up(self, why: str) -> None:
        """End the next job of a move."""
        self._failure = f"{why}: {_BACK}"
        self._enter(Phase.FAILING)
        self._end(self._job)

    # --- moves --------------------------------------------------------------------------------

    def order(self) -> asyncio.Future[str]:
        """Order a move, which `due` or `withdraw` follows; return its answer: an error, "" when it
        is done. Raises UsageError."""
        if self.phase is not Phase.READY:
            raise UsageError(
                "the job is being moved already: wait until that is over" if self.phase in _MOVES
                else "the job sleeps: the next request wakes it" if self.phase is Phase.ASLEEP
                else "the job is not ready: try again when `pipeinfer status` says so")
        self._enter(Phase.ORDERED)
        self._order = asyncio.get_running_loop().create_future()
        return self._order

    async def due(self, move: Move, order: asyncio.Future[str]) -> None:
        """Carry out a move that is prepared."""
        if order is self._order:
            self._move, job = move, self._job
            self._enter(Phase.MOVING)
            # before the job ends: its last frames must not count as the server's end
            await self._announce(move, move.why)
            self.say(f"{move.why}; {move.open} open requests wait")
            move.began = time.monotonic()
            self._end(job)

    def withdraw(self, order: asyncio.Future[str], why: str = "") -> None:
        """Take an order back. why: what prevents the move, "" if there is nothing to move."""
        if order is self._order:
            self._answer(why)
            self._enter(Phase.READY)

    async def _replace(self) -> tuple[int, float]:
        """Run the next job of a move; where it does not start, the one before."""
        move, former = self._move, self.source.settings
        assert move is not None
        self._take(move.settings)
        status, lived = await self._one(Phase.TRYING)
        if self.phase not in (Phase.TRYING, Phase.FAILING):
            return status, lived
        why = self.source.error() or f"see {self.source.logs_at}"
        self._failure = self._failure or (
            f"the changed job does not start ({ending(status)}; {why}): {_BACK}")
        self.say(self._failure)
        # before the announcement: the engine that comes next is that of the former job
        self._take(former)
        await self._announce(move, _BACK)
        return await self._one(Phase.RETURNING)

    def _answer(self, error: str) -> None:
        """Answer the order in progress, if there is one, and admit requests that were held."""
        if self._order is not None:
            if not self._order.done():
                self._order.set_result(error)
            self._order, self._failure, self.failed_move = None, "", error
            if self.door is not None:
                self._admitting = asyncio.ensure_future(self.door.ask(orders.Hold(on=False)))

    async def _announce(self, move: Move, why: str) -> None:
        """Let the HTTP process expect another engine."""
        if self.door is not None:
            move.open = (await self.door.ask(orders.Move(why=why, new_model=move.new_model))).open

    def _end(self, job: SupervisedJob | None) -> None:
        """End a job, because the next one takes its requests."""
        def kill() -> None:
            if self._job is job and job is not None:
                job.kill()

        if job is not None and job is self._job:
            job.end()
            # a launcher waits for hosts that are lost; the next job must not wait for it
            asyncio.get_running_loop().call_later(_END, kill)
        elif self._job is None and self._task is not None:
            self._task.cancel()

    def _take(self, settings: Any) -> None:
        try:
            self.source.take(settings)
        except UsageError as error:  # such as a full disk; the job starts as it was
            self.say(f"error: {error}")

    # --- signals and hosts --------------------------------------------------------------------

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
            self.stop()

    async def clean(self, name: str, hosts: list[str]) -> None:
        """Kill the remaining processes of an earlier job, here and on its hosts, so that none
        holds a port, memory or a lock. Each host has a time limit of its own."""
        await asyncio.gather(asyncio.to_thread(self._clean_here, name), *(
            asyncio.to_thread(self.source.clean, host, name) for host in hosts))

    def _clean_here(self, name: str) -> None:
        cleanup.clear_sessions()
        if killed := cleanup.end(name):
            self.say(f"killed {len(killed)} processes that the previous job left behind")
