"""The supervisor of `pipeinfer up`: monitors the server, detects hosts that are back, executes
commands, reports its state, and moves the job to other hosts or options.

The HTTP process keeps every client and passes open requests on; if answers could differ, open
requests complete first. If the next job does not start, the one before starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, assert_never

from pipeinfer.cluster import cleanup
from pipeinfer.errors import UsageError
from pipeinfer.server import orders
from pipeinfer.server.frames import STOPPED
from pipeinfer.server.orders import Hold, Look, Offer, OrderServer, Report, ServerState
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.join.messages import Note
from pipeinfer.supervise.join.server import Joiner, JoinServer
from pipeinfer.supervise.rules import MissingHosts, is_wide
from pipeinfer.supervise.serving import JobSettings, Serving, command_of
from pipeinfer.supervise.state import (
    Command,
    Down,
    Folder,
    JoinedHosts,
    LaunchDaemon,
    Reload,
    Rescale,
    SocketStatus,
)
from pipeinfer.supervise.supervisor import Move, Phase, Supervisor

#: seconds for the launcher's daemons to be up on all machines that have joined: after one that does
#: not answer any more is gone, and before clients wait for longer than half a minute
_DAEMONS = 25.0
_LOOK = 1.0  #: seconds between two checks of the server
_QUIET = 5.0  #: seconds without an open request after which the job may move by itself
_LATEST = 600.0  #: seconds after which it moves though requests are open
_STAYS = 10.0  #: seconds for which a model serves before another one may take its place
_SERVES = (Phase.READY, Phase.ORDERED)


class Keeper:
    """The supervisor of `pipeinfer up`.

    left: the id and hosts of a job that an earlier supervisor in this folder has left, ("", []) if
        none.
    every: seconds between two checks of missing hosts, 0 for never.
    auto: whether the job moves by itself when no request is open.
    sleeps: minutes without a request after which the job ends until the next one, None for never.
    joins: accepts machines that join, None without --join.
    models: `serve` and its options for each model that clients may name, one at a time.
    """

    def __init__(self, serving: Serving, folder: Folder, say: Report, *, restarts: int,
                 left: tuple[str, list[str]], every: float, auto: bool,
                 sleeps: float | None = None, joins: JoinServer | None = None,
                 models: Mapping[str, list[str]] = MappingProxyType({})) -> None:
        self._serving, self._folder, self._say, self._auto = serving, folder, say, auto
        self._http = HttpDoor(serving.environ, say)
        self._supervisor = Supervisor(serving, restarts, self._http, say, changed=self._write)
        self._left, self._joins, self._sleeps = left, joins, sleeps
        self._models = models
        self._refused: dict[str, str] = {}  #: models that could not be served, and why
        self._ready_since = 0.0
        self._missing = MissingHosts(every, new_hosts=joins is not None)
        self._seen = ServerState()
        self._model: tuple[object, ...] = ()  #: `identity` of the served model
        self._quiet_since = 0.0
        self._work: dict[str, str] = {}  #: what each host of the job does, in words
        self._with_ranks = 0  #: the number of the last job whose ranks have begun
        self._since = time.time()
        self._moving: asyncio.Task[None] | None = None
        self._written: dict[str, Any] = {}

    async def run(self) -> int:
        """Run jobs until the end; return the exit status of the last one."""
        commands = OrderServer(Command, self._execute)
        # before the first job: `status` and `down` work while it starts
        await commands.start(self._folder.listen())
        if self._joins is not None:
            self._joins.came = lambda _: self._supervisor.host_came()
            self._joins.went = self._lose_member
        if self._left[0]:
            # before the first job, which needs the ports and locks of one that was left
            await self._supervisor.clean(*self._left)
        self._write()
        tending = asyncio.create_task(self._tend())
        try:
            return await self._supervisor.run()
        finally:
            tasks = [tending, *filter(None, [self._moving])]
            for task in tasks:
                task.cancel()
            # a task that goes on could start another move, or write the state anew
            await asyncio.gather(*tasks, return_exceptions=True)
            await commands.close()
            self._folder.unlisten()
            self._write()

    # --- monitoring ---------------------------------------------------------------------------

    async def _tend(self) -> None:
        # for as long as the supervisor runs, which cancels it
        while True:
            await asyncio.sleep(_LOOK)
            with reported(self._say):
                await self._look()
                await self._check_start()
                await self._ask_missing()
                self._move_if_quiet()
                await self._sleep_if_quiet()
                self._change_model()
            self._write()

    async def _look(self) -> None:
        job, phase = self._supervisor.running, self._supervisor.phase
        newest, refused = self._seen.newest, self._refused
        self._refused = {}
        self._seen = seen = await self._http.ask(
            Offer(names=tuple(self._models), refused=refused) if self._models else Look())
        if seen.state == "ready" and phase not in _SERVES:
            self._supervisor.ready(job)
            if self._is(Phase.READY):
                self._model = identity(seen.model)
                self._quiet_since = self._ready_since = time.monotonic()
        if seen.open or seen.newest != newest:  # a short one may be over already
            self._quiet_since = time.monotonic()
        if self._is(Phase.READY):
            roster, missing = self._serving.roster, self._serving.hosts_of(seen.lost)
            why: dict[str, str] = {}
            if roster is not None:
                missing |= {entry.host: entry for entry in roster.missing}
                why = {host: one.detail for host, one in roster.place.gone.items()}
            for one in self._joins.members.values() if self._joins else ():
                why[one.address] = one.gone
            self._missing.update(missing, why, time.monotonic())
            work, before = self._serving.work_of(seen.work), self._work
            for member in self._joins.present if self._joins else ():
                if (text := work.get(member.address, "")) != before.get(member.address, ""):
                    member.send(Note(text=f"this machine {text}"))
            self._work = work

    def _lose_member(self, member: Joiner) -> None:
        """Handle that a machine that has joined is gone."""
        if any(entry.host == member.address for entry in self._serving.served[2]):
            self._supervisor.lose_host(f"{member.name} is gone: {member.gone}", excused=True)

    async def _check_start(self) -> None:
        """End a start for which a machine that has joined starts nothing, though it is here: no
        rank begins before the launcher's daemons are all up, and loading comes after that."""
        job, name = self._supervisor.running, self._serving.name
        if self._joins is None or self._with_ranks == job \
                or self._supervisor.start_seconds < _DAEMONS:
            return
        if (await asyncio.to_thread(cleanup.ranks_of, name))[0]:
            self._with_ranks = job
        else:
            names = ", ".join(one.name for one in self._joins.present)
            self._supervisor.lose_host(
                f"not all of {names} have started their part within {_DAEMONS:g} s: end "
                "`pipeinfer join` there and call it again", excused=False)

    def _is(self, *phases: Phase) -> bool:
        return self._supervisor.phase in phases

    async def _ask_missing(self) -> None:
        """Check the missing hosts that are due, and those whose ranks were lost."""
        if not self._is(Phase.READY):
            return
        now, roster = time.monotonic(), self._serving.roster
        due = self._missing.due(now)
        asked = [one.entry for one in due.values() if one.entry is not None]
        found = await asyncio.to_thread(roster.troubles, asked) if roster and asked else {}
        for host, one in due.items():
            one.why = found.get(host, "")
            if one.why:
                one.back = None
            elif one.back is None:
                one.back = now
                when = "at the next quiet moment" if self._auto else "when you say so"
                called = f"host {roster.called(host)}" if roster else host
                self._say(f"{called} can take ranks: the job moves {when}; `pipeinfer rescale` "
                          "moves it now")

    def _move_if_quiet(self) -> None:
        now, back = time.monotonic(), self._missing.back
        if back and self._auto and self._may_move() and \
                (now - self._quiet_since > _QUIET or now - min(back) > _LATEST):
            self._moving = asyncio.create_task(self._move())

    async def _sleep_if_quiet(self) -> None:
        wanted = self._seen.wanted
        if self._is(Phase.ASLEEP):
            # a request has come; or no HTTP process is there for one, and a job starts another
            if wanted or self._seen.state not in ("", "asleep") or not self._http.pid:
                if wanted in self._models:
                    self._serving.use(self._models[wanted])
                self._supervisor.wake()
        elif self._sleeps is not None and self._is(Phase.READY) and not wanted and \
                time.monotonic() - self._quiet_since > 60 * self._sleeps:
            await self._supervisor.sleep()

    def _may_move(self) -> bool:
        return self._is(Phase.READY) and (self._moving is None or self._moving.done())

    def _change_model(self) -> None:
        """Begin to serve the model that requests wait for. Each stays for a time, since
        loading two of them alternately would take longer than computing."""
        name = self._seen.wanted
        if name in self._models and self._may_move() and \
                time.monotonic() - self._ready_since > _STAYS:
            self._moving = asyncio.create_task(self._serve(name))

    async def _serve(self, name: str) -> None:
        with reported(self._say):
            try:
                await self._reload(Reload(words=self._models[name], wait=_LATEST), self._say)
            except UsageError as error:
                self._refused[name] = str(error)

    async def _move(self) -> None:
        """Move by itself, beside the monitoring, which finds out when the next job is ready."""
        # `status` shows what kept it from moving, and the supervisor prints that of a start
        with reported(self._say), contextlib.suppress(UsageError):
            await self._rescale(self._say, 0, 1.0)

    # --- commands -----------------------------------------------------------------------------

    async def _execute(self, command: Command, report: Report) -> dict[str, Any]:
        match command:
            case SocketStatus():
                await self._look()
                return self._state()
            case Down(now):
                report(f"{self._seen.open} requests are open")
                if now:  # rank 0 cannot know that it is no launcher that ends it
                    await self._http.ask(orders.Move(why=STOPPED, new_model=False))
                if now or not self._is(Phase.ENDING):  # a second stop would end them at once
                    self._supervisor.stop(at_once=now)
                return {"message": "ending"}
            case Rescale(ranks, wait):
                return {"message": await self._rescale(report, ranks or 0, wait)}
            case LaunchDaemon(host, kind, arguments):
                if self._joins is None:
                    raise UsageError("no machines join here: `pipeinfer up --join`")
                if error := await self._joins.start_daemon(host, self._serving.name, kind,
                                                           arguments):
                    raise UsageError(error)
                return {}
            case JoinedHosts():
                return self._joined(command)
            case Reload():
                return {"message": await self._reload(command, report)}
            case _:
                assert_never(command)

    async def _rescale(self, report: Report, ranks: int, wait: float) -> str:
        """Move the job to the hosts that answer now; return the outcome in words.

        report: called with each line of progress. ranks: number of ranks, 0 for as many as before.
        wait: seconds for open requests to end, if they must.
        """
        serving = self._serving

        async def plan() -> Move | str:
            place, now = await asyncio.to_thread(serving.found, ranks), serving.settings.place
            for line in serving.roster.notes(place) if serving.roster else ():
                report(line)
            if (place.ranks, place.used) == (now.ranks, now.used) and not self._seen.lost:
                return f"nothing to move: the job has all {now.ranks} ranks that it can"
            waits = "with slices another number of ranks may compute otherwise" \
                if is_wide(serving.values) else ""
            return Move(f"the job is moved to {place.ranks} ranks",
                        JobSettings(serving.words, place), waits=waits, wait=wait)

        try:
            return await carry_out(self._supervisor, self._http, report, plan)
        finally:  # a further loss, or a job that does not start, lengthens the next wait
            self._missing.take_back()

    async def _reload(self, command: Reload, report: Report) -> str:
        serving = self._serving
        words = serving.complete(command_of(command.words)) if command.words else serving.words

        async def plan() -> Move:
            differ = serving.affects_tokens(words)
            why = f"answers depend on {', '.join(differ)}" if differ else ""
            if new_model := identity(self._seen.model) != self._model:
                why = "the model's file is another one"
            return Move("the server is reloaded",
                        JobSettings(words, serving.settings.place), new_model, why,
                        command.wait, command.force)

        return await carry_out(self._supervisor, self._http, report, plan)

    def _joined(self, command: JoinedHosts) -> dict[str, Any]:
        """Make or revoke a token; return the machines that have joined, and the tokens."""
        if (joins := self._joins) is None:
            raise UsageError("no machines join here: `pipeinfer up --join`")
        new = joins.tokens.token(joins.tokens.new(command.seconds)).text if command.new else ""
        if command.revoke and not joins.revoke(command.revoke):
            raise UsageError(f"there is no token {command.revoke}: `pipeinfer tokens` lists them")
        used = {entry.host for entry in self._serving.served[2]}
        return {"new": new, "line": joins.line,
                "hosts": [{**one.facts, "used": one.address in used and not one.gone,
                           "work": self._work.get(one.address, "")}
                          for one in joins.members.values()],
                "tokens": [{"id": one.id, "made": one.made, "until": one.until,
                            "machines": len(one.members)} for one in joins.tokens.issued()]}

    # --- reporting ----------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        seen, supervisor = self._seen, self._supervisor
        words, ranks, entries = self._serving.served
        more = f", {supervisor.budget.left} more after that" * self._is(Phase.PAUSING)
        missing = self._missing.hosts
        slots = {e.host: e.slots for e in entries} | {
            host: 0 for host in missing if host not in {"this host", *(e.host for e in entries)}}
        return {"name": self._folder.name, "pid": os.getpid(), "job": self._serving.name,
                "since": self._since, "phase": supervisor.phase.value + more,
                "ready": self._is(*_SERVES),
                "url": seen.url, "model": seen.name, "server": seen.state, "reason": seen.reason,
                "open": seen.open, "held": seen.waiting,
                "door_pid": self._http.pid, "words": words, "ranks": ranks,
                "wanted": self._serving.wanted, "not_moved": supervisor.failed_move,
                "lost": list(seen.lost), "starts": supervisor.history,
                "hosts": [self._host(host, count) for host, count in slots.items()],
                "logs": str(self._folder.path / "logs")}

    def _host(self, host: str, slots: int) -> dict[str, Any]:
        """Return what users see of a host. slots: of its ranks in the job, 0 for none."""
        one, roster = self._missing.hosts.get(host), self._serving.roster
        state = "used" if one is None else "back" if one.back is not None else (
            "lost" if slots else "missing")
        return {"host": roster.called(host) if roster is not None else host, "slots": slots,
                "state": state, "why": one.why if one is not None else self._work.get(host, "")}

    def _write(self) -> None:
        state = self._state()
        if state != self._written:
            self._written = {**state, "starts": [dict(one) for one in state["starts"]]}
            self._folder.write(state)


@contextlib.contextmanager
def reported(say: Report) -> Iterator[None]:
    """Print errors instead of raising them: a bug here must not end the job."""
    try:
        yield
    except UsageError as error:
        say(str(error))
    except Exception as error:
        say(f"{type(error).__name__}: {error} (this is a bug)")


def identity(path: str) -> tuple[object, ...]:
    """Return a value that changes if the file is replaced or modified."""
    try:
        info = Path(path).stat()
    except OSError:
        return ()
    return path, info.st_ino, info.st_size, info.st_mtime_ns


_POLL = 0.25  #: seconds between two checks of open requests
#: returns a plan, or why there is nothing to move; raises UsageError
Planning: TypeAlias = Callable[[], Awaitable[Move | str]]


async def carry_out(supervisor: Supervisor, http: HttpDoor, report: Report, planning: Planning
                    ) -> str:
    """Replace the job by the one that `planning` returns; return the outcome in words.

    report: called with each line of progress. Raises UsageError if that was not done.
    """
    order = supervisor.order()
    try:
        plan = await planning()
        if isinstance(plan, str):
            supervisor.withdraw(order)
            return plan
        if plan.waits:
            await _until_none_is_open(http, report, plan, order)
    except BaseException as error:
        supervisor.withdraw(order, str(error))
        raise
    await supervisor.due(plan, order)
    if failure := await order:
        raise UsageError(failure)
    said = f"{plan.why}: ready again after {time.monotonic() - plan.began:.1f} s"
    supervisor.say(said)
    return f"{said}; {plan.open} open requests went on" if plan.open else said


async def _until_none_is_open(http: HttpDoor, report: Report, plan: Move,
                              order: asyncio.Future[str]) -> None:
    """Hold new requests and wait until the open ones have ended, at most for a time; or until the
    order was answered because the job has ended.

    Raises UsageError if requests are still open, unless the plan forces the move.
    """
    waited, deadline = False, time.monotonic() + plan.wait
    # held while they are counted: else new ones come faster than old ones end
    while (found := await http.ask(Hold(on=True))).open and not order.done():
        if not waited:
            waited = True
            report(f"{plan.waits}: waiting for {found.open} open requests, {plan.wait:g} s at "
                   "most; new ones wait")
        if time.monotonic() > deadline:
            if plan.force:
                report(f"{found.open} requests have not ended")
                return
            raise UsageError(f"{found.open} requests still run after {plan.wait:g} s, so nothing "
                             "was changed: --wait S waits for longer, --force does not wait for "
                             "them")
        await asyncio.sleep(_POLL)
