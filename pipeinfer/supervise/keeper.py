"""What `pipeinfer up` does beside its loop: looks at the server, notices hosts that are back, moves
the job, obeys commands, reports.

A move ends the job and starts it again with what is there now. The HTTP process keeps every client
and hands open requests over; where answers could differ they end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pipeinfer.cli import doctor_hosts
from pipeinfer.errors import UsageError
from pipeinfer.supervise.changes import is_wide
from pipeinfer.supervise.commands_socket import Commands
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.job import Job
from pipeinfer.supervise.rules import Again, Comeback
from pipeinfer.supervise.serving import Serving, command_of
from pipeinfer.supervise.state import Folder
from pipeinfer.supervise.supervisor import Supervisor

_LOOK = 1.0  #: seconds between two looks at the server
_QUIET = 5.0  #: seconds without an open request that make a quiet moment
_END = 2.0  #: seconds for a job to end that is moved
_BEGIN = 600.0  #: seconds for the next one to be ready, before whoever waits is told
_HISTORY = 20
Tell: TypeAlias = Callable[[str], None]


class Keeper(Supervisor):
    """The supervisor of `pipeinfer up`. left: the number and hosts of a job that a supervisor here
    has left behind, "" for none; every: seconds after which missing hosts are asked again, 0
    for never; auto: whether the job moves by itself at a quiet moment."""

    def __init__(self, serving: Serving, restarts: int, folder: Folder, say: Tell, *,
                 left: tuple[str, list[str]], every: float, auto: bool) -> None:
        door = HttpDoor(serving.environ, say)
        super().__init__(serving, restarts, door, say)
        self._serving, self._folder, self._auto, self._http = serving, folder, auto, door
        self._left, self._comeback = left, Comeback(every)
        self._seen: dict[str, Any] = {}
        self._absent: dict[str, str] = {}
        self._back: set[str] = set()
        self._quiet_since = 0.0
        self._phase, self._since = "starting", time.time()
        self._history: list[dict[str, Any]] = []
        self._written: dict[str, Any] = {}
        self._ready = asyncio.Event()
        self._busy = asyncio.Lock()
        self._meant = False  #: the job that runs is ended to be moved
        self._undo: Callable[[], None] | None = None  #: back to what worked
        self._refused = ""  #: why the new ones were not taken
        self._model: tuple[object, ...] = ()

    async def run(self) -> int:
        """The exit status of the last job."""
        commands = Commands(self._folder, {
            "status": self._status, "down": self._down, "rescale": self._rescale,
            "reload": self._reload})
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

    def stop(self, *, at_once: bool = False) -> None:
        """Somebody wants the end."""
        super().stop(at_once=at_once)
        self._phase = "ending"

    # --- the loop's events --------------------------------------------------------------------

    async def begun(self, job: Job) -> None:
        """A job is about to start."""
        del job
        self._ready.clear()
        self._phase, self._seen = "starting", {}
        self._back.clear()
        self._history = [*self._history, {
            "at": time.time(), "ranks": self._serving.ranks, "words": self._serving.words,
            "exit": None}][-_HISTORY:]
        self._write()

    async def ended(self, status: int, lived: float) -> bool:
        """A job has ended; whether the next one follows at once."""
        self._ready.clear()
        self._history[-1] |= {"exit": status, "lived": round(lived, 1), "moved": self._meant}
        meant, self._meant = self._meant, False
        if meant or self._undo is None:
            return meant
        self._undo()
        self._undo = None
        self._refused = (f"the changed job does not start (exit code {status}; see "
                         f"{self._folder.path / 'logs'}): back to what there was before")
        self.say(self._refused)
        await self._http.ask(op="move", why="back to what there was before", anew=True)
        return True

    async def paused(self, status: int, verdict: Again) -> None:
        """There is a pause before the next job."""
        del status
        self._phase = f"starting again in {verdict.pause:.0f} s, {verdict.left} more after that"
        self._write()

    # --- looking ------------------------------------------------------------------------------

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
        seen = await self._http.ask(op="look")
        if self.current is None:
            return
        self._seen = seen
        if seen.get("state") != "ready" or self._meant:
            return
        if not self._ready.is_set() and not self.asked:
            self._phase, self._undo = "ready", None
            self._model, self._quiet_since = _identity(seen["model"]), time.monotonic()
            self._ready.set()
        if seen["open"]:
            self._quiet_since = time.monotonic()

    async def _ask_missing(self) -> None:
        """Hosts that the job could have, and those whose ranks it has lost."""
        if not self._ready.is_set():
            return
        now, roster = time.monotonic(), self._serving.roster
        entries = self._serving.hosts_of(self._seen.get("lost", []))
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
            await self._with_hosts(self.say, 0, wait=1.0)

    # --- moving -------------------------------------------------------------------------------

    async def _with_hosts(self, tell: Tell, ranks: int, wait: float) -> str:
        """Move to the hosts that answer now, with so many ranks (0: as many as were wanted)."""
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
                    tell(line)
                if serving.place == before[1] and not self._seen.get("lost"):
                    self._back.clear()
                    return f"nothing to move: the job has all {serving.ranks} ranks that it can"
                waits = "with slices another number of ranks may compute otherwise" \
                    if is_wide(serving.values) else ""
                return await self._move(tell, f"the job is moved to {serving.ranks} ranks", undo,
                                        waits=waits, wait=wait)
            except UsageError:
                if self._ready.is_set():
                    undo()
                raise

    @contextlib.asynccontextmanager
    async def _only(self) -> Any:
        """One move at a time, and only of a job that works."""
        if self._busy.locked():
            raise UsageError("the job is being moved already: wait until that is over")
        if not self._ready.is_set() or self.asked:
            raise UsageError("the job is not ready: try again when `pipeinfer status` says so")
        async with self._busy:
            yield

    async def _move(self, tell: Tell, why: str, undo: Callable[[], None], *,
                    words: list[str] | None = None, waits: str = "", wait: float = 0.0,
                    force: bool = False, anew: bool = False) -> str:
        """End the job and have the next one; what came of it. undo: makes it what it was; waits:
        why open requests end first, empty where they go on. Raises UsageError where it was not
        done."""
        if waits:
            await self._until_none_is_open(tell, waits, wait, force)
        job = self.current
        if job is None or self.asked:
            await self._http.ask(op="hold", on=False)
            raise UsageError("the job has ended meanwhile")
        self._meant, self._refused = True, ""
        count = (await self._http.ask(op="move", why=why, anew=anew)).get("open", 0)
        self.say(f"{why}; {count} open requests wait")
        self._ready.clear()
        self._phase, began = "moving", time.monotonic()
        self._undo = undo
        if words is not None:
            self._serving.use(words)
        job.end()
        asyncio.get_running_loop().call_later(_END, self._kill, job)
        try:
            await asyncio.wait_for(self._ready.wait(), _BEGIN)
        except TimeoutError:
            raise UsageError(f"the job is not ready after {_BEGIN:g} s: see `pipeinfer status` and "
                             f"{self._folder.path / 'logs'}") from None
        if self._refused:
            raise UsageError(self._refused)
        said = f"{why}: ready again after {time.monotonic() - began:.1f} s"
        self.say(said)
        self._quiet_since = time.monotonic()
        return f"{said}; {count} open requests went on" if count else said

    def _kill(self, job: Job) -> None:
        if self.current is job:
            job.kill()

    async def _until_none_is_open(self, tell: Tell, why: str, wait: float, force: bool) -> None:
        """Let no new request in and wait for those that run; at most `wait` seconds, after which
        force says whether to go on without them."""
        deadline, told = time.monotonic() + wait, False
        found = await self._http.ask(op="hold", on=True)
        while found.get("open", 0) and not self.asked:
            if not told:
                told = True
                tell(f"{why}: waiting for {found['open']} open requests, {wait:g} s at most; new "
                     "ones wait")
            if time.monotonic() > deadline:
                if force:
                    tell(f"{found['open']} requests have not ended")
                    return
                await self._http.ask(op="hold", on=False)
                raise UsageError(f"{found['open']} requests still run after {wait:g} s, so nothing "
                                 "was changed: --wait S waits for longer, --force does not wait "
                                 "for them")
            await asyncio.sleep(0.25)
            found = await self._http.ask(op="hold", on=True)  # a job that came meanwhile let all in

    # --- commands -----------------------------------------------------------------------------

    async def _status(self, asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
        del asked, tell
        await self._look()
        return self._state()

    async def _down(self, asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
        tell(f"{self._seen.get('open', 0)} requests are open")
        self.stop(at_once=bool(asked.get("now")))
        return {"message": "ending"}

    async def _rescale(self, asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
        return {"message": await self._with_hosts(tell, int(asked.get("ranks") or 0),
                                                  float(asked.get("wait") or 0))}

    async def _reload(self, asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
        given = asked.get("words") or []
        words = command_of(given) if given else self._serving.words
        async with self._only():
            differ = self._serving.risky(words)
            anew = bool({"model", "hf_repo", "hf_file"} & set(differ))
            why = f"answers depend on {', '.join(differ)}" if differ else ""
            if not anew and _identity(self._seen.get("model", "")) != self._model:
                anew, why = True, "the model's file is another one"
            old = self._serving.words
            message = await self._move(
                tell, "the server is reloaded", lambda: self._serving.use(old),
                words=words if given else None, waits=why,
                wait=float(asked.get("wait") or 0), force=bool(asked.get("force")), anew=anew)
        return {"message": message}

    # --- reporting ----------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        seen, serving, roster = self._seen, self._serving, self._serving.roster
        used = [{"host": e.host, "slots": e.slots, "state": "used", "why": ""}
                for e in (roster.used if roster else [])]
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
        return {"name": self._folder.name, "pid": os.getpid(), "job": serving.name,
                "since": self._since, "phase": self._phase, "ready": self._ready.is_set(),
                "url": seen.get("url", ""), "model": seen.get("name", ""),
                "server": seen.get("state", ""), "reason": seen.get("reason", ""),
                "open": seen.get("open", 0), "held": seen.get("waiting", 0),
                "door_pid": self._http.pid, "words": serving.words, "ranks": serving.ranks,
                "wanted": serving.wanted, "lost": seen.get("lost", []), "hosts": hosts,
                "starts": self._history, "logs": str(self._folder.path / "logs")}

    def _write(self) -> None:
        state = self._state()
        if state != self._written:
            self._written = {**state, "starts": [dict(one) for one in self._history]}
            self._folder.write(state)


def _identity(path: str) -> tuple[object, ...]:
    """What tells whether a file is another one."""
    try:
        info = Path(path).stat()
    except OSError:
        return ()
    return path, info.st_ino, info.st_size, info.st_mtime_ns
