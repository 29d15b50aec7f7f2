"""The supervisor of `pipeinfer up`: monitors the server, detects hosts that are back and moves
the job there (`moves`), executes commands, reports its state."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, assert_never

from typing_extensions import override

from pipeinfer.cli import doctor_hosts
from pipeinfer.errors import UsageError
from pipeinfer.server.orders import Look, ServerState
from pipeinfer.supervise.changes import is_wide
from pipeinfer.supervise.commands_socket import (
    Command,
    Commands,
    Down,
    Reload,
    Report,
    Rescale,
    Status,
)
from pipeinfer.supervise.moves import JobChange, Mover, identity
from pipeinfer.supervise.rules import BackOff, Comeback
from pipeinfer.supervise.serving import Serving, command_of
from pipeinfer.supervise.state import Folder
from pipeinfer.supervise.supervisor import Running

_LOOK = 1.0  #: seconds between two checks of the server
_QUIET = 5.0  #: seconds without an open request after which the job may move by itself


class Keeper(Mover):
    """The supervisor of `pipeinfer up`.

    left: the id and hosts of a job that an earlier supervisor in this folder has left, ("", []) if
        none.
    every: seconds between two checks of missing hosts, 0 for never.
    auto: whether the job moves by itself when no request is open.
    """

    def __init__(self, serving: Serving, restarts: int, folder: Folder, say: Report, *,
                 left: tuple[str, list[str]], every: float, auto: bool) -> None:
        super().__init__(serving, restarts, folder, say)
        self._auto = auto
        self._left, self._comeback = left, Comeback(every)
        self._seen = ServerState()
        self._absent: dict[str, str] = {}
        self._back: set[str] = set()
        self._since = time.time()
        self._written: dict[str, Any] = {}

    async def run(self) -> int:
        """Run jobs until the end; return the exit status of the last one."""
        commands = Commands(self._folder, self._execute)
        await commands.start()
        if self._left[0]:
            await self.clean(*self._left)
        tending = asyncio.create_task(self._tend())
        try:
            return await super().run()
        finally:
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await commands.close()
            self._phase = "ended"
            self._write()

    # --- the loop's events --------------------------------------------------------------------

    @override
    def begun(self) -> dict[str, Any]:
        row = super().begun()
        self._seen = ServerState()
        self._back.clear()
        self._write()
        return row

    @override
    async def ended(self, running: Running, status: int, lived: float) -> bool:
        follows = await super().ended(running, status, lived)
        self._write()
        return follows

    @override
    async def paused(self, status: int, verdict: BackOff) -> None:
        del status
        self._phase = f"starting again in {verdict.pause:.0f} s, {verdict.left} more after that"
        self._write()

    # --- monitoring ---------------------------------------------------------------------------

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            try:
                await self._look()
                await self._ask_missing()
                await self._move_if_quiet()
            except UsageError as error:
                self.say(str(error))
            except Exception as error:  # a bug here must not end the job
                self.say(f"{type(error).__name__}: {error} (this is a bug)")
            self._write()

    async def _look(self) -> None:
        seen = await self._http.ask(Look())
        if self.current is None:
            return
        self._seen = seen
        if seen.state != "ready" or self._meant:
            return
        if not self._ready.is_set() and not self.asked:
            self._phase, self._undo = "ready", None
            self._model, self._quiet_since = identity(seen.model), time.monotonic()
            self._ready.set()
        if seen.open:
            self._quiet_since = time.monotonic()

    async def _ask_missing(self) -> None:
        """Check the missing hosts that are due, and those whose ranks were lost."""
        if not self._ready.is_set() or self._busy.locked():
            return
        now, roster = time.monotonic(), self._serving.roster
        entries = self._serving.hosts_of(self._seen.lost)
        if roster is not None:
            entries |= {entry.host: entry for entry in roster.missing}
        known = {entry.host for entry in roster.used} if roster is not None else {"this host"}
        for host in {*known, *self._absent} - set(entries):
            self._comeback.present(host)
        self._absent = {host: self._absent.get(host) or (roster.absent.get(host, "") if roster
                                                          else "") for host in entries}
        self._back &= set(entries)
        for host in entries:
            self._comeback.missing(host, now)
        due = [host for host in self._comeback.due(now) if host in entries]
        asked = [entry for host in due if (entry := entries[host]) is not None]
        found = await asyncio.to_thread(doctor_hosts.troubles, asked) if asked else {}
        for host in due:
            trouble = self._absent[host] = found.get(host, "")
            if trouble:
                self._back.discard(host)
            elif host not in self._back:
                self._back.add(host)
                when = "at the next quiet moment" if self._auto else "when you say so"
                self.say(f"{'host ' * (host != 'this host')}{host} can take ranks again: the job "
                         f"moves {when}; `pipeinfer rescale` moves it now")

    async def _move_if_quiet(self) -> None:
        quiet = time.monotonic() - self._quiet_since > _QUIET
        if self._back and self._auto and quiet and self._ready.is_set() and not self._busy.locked():
            await self._with_hosts(self.say, 0, 1.0)

    async def _with_hosts(self, report: Report, ranks: int, wait: float) -> str:
        """Move the job to the hosts that answer now; return the outcome in words.

        report: called with each line of progress. ranks: number of ranks, 0 for as many as before.
        wait: seconds for open requests to end, if they must.
        """
        async with self._only():
            serving, roster = self._serving, self._serving.roster
            before = (roster.asked if roster else serving.ranks, serving.place)

            def undo() -> None:
                serving.want(before[0])
                if roster is not None:
                    roster.take(before[1][1])

            if ranks:
                serving.want(ranks)
            try:
                for line in await asyncio.to_thread(serving.ask_hosts):
                    report(line)
                if serving.place == before[1] and not self._seen.lost:
                    self._back.clear()
                    return f"nothing to move: the job has all {serving.ranks} ranks that it can"
                waits = "with slices another number of ranks may compute otherwise" \
                    if is_wide(serving.values) else ""
                said = await self._move(report, JobChange(
                    f"the job is moved to {serving.ranks} ranks", undo, waits=waits, wait=wait))
                for host in self._back:  # so that a further loss lengthens the next wait
                    self._comeback.present(host)
                self._back.clear()
                return said
            except UsageError:
                if self._ready.is_set():
                    undo()
                raise

    # --- commands -----------------------------------------------------------------------------

    async def _execute(self, command: Command, report: Report) -> dict[str, Any]:
        match command:
            case Status():
                await self._look()
                return self._state()
            case Down(now):
                report(f"{self._seen.open} requests are open")
                self.stop(at_once=now)
                return {"message": "ending"}
            case Rescale(ranks, wait):
                return {"message": await self._with_hosts(report, ranks or 0, wait)}
            case Reload():
                return {"message": await self._reload(command, report)}
            case _:
                assert_never(command)

    async def _reload(self, command: Reload, report: Report) -> str:
        words = command_of(command.words) if command.words else self._serving.words
        async with self._only():
            differ = self._serving.risky(words)
            new_model = bool({"model", "hf_repo", "hf_file"} & set(differ))
            why = f"answers depend on {', '.join(differ)}" if differ else ""
            if not new_model and identity(self._seen.model) != self._model:
                new_model, why = True, "the model's file is another one"
            old = self._serving.words
            return await self._move(report, JobChange(
                "the server is reloaded", lambda: self._serving.use(old),
                words if command.words else None, why, command.wait, command.force, new_model))

    # --- reporting ----------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        seen, served = self._seen, self._served
        used = [{"host": e.host, "slots": e.slots, "state": "used", "why": ""}
                for e in served.get("used", [])]
        names = {one["host"] for one in used}
        for one in used:
            if one["host"] in self._absent:
                one["state"] = "lost"
        hosts = used + [{"host": host, "slots": 0, "state": "missing", "why": why}
                        for host, why in self._absent.items()
                        if host not in names and host != "this host"]
        for one in hosts:
            if one["host"] in self._back:
                one |= {"state": "back", "why": ""}
            elif one["state"] != "used":
                one["why"] = self._absent.get(str(one["host"]), "")
        return {"name": self._folder.name, "pid": os.getpid(), "job": self._serving.name,
                "since": self._since, "phase": self._phase, "ready": self._ready.is_set(),
                "url": seen.url, "model": seen.name, "server": seen.state, "reason": seen.reason,
                "open": seen.open, "held": seen.waiting,
                "door_pid": self._http.pid, "words": served.get("words", []),
                "ranks": served.get("ranks", 0), "wanted": self._serving.wanted,
                "not_moved": self._failed_move,
                "lost": list(seen.lost), "hosts": hosts,
                "starts": self._history, "logs": str(self._folder.path / "logs")}

    def _write(self) -> None:
        state = self._state()
        if state != self._written:
            self._written = {**state, "starts": [dict(one) for one in self._history]}
            self._folder.write(state)
