"""The loop of every supervisor: start the job, wait for its end, decide, start it again.

A `JobSource` provides the jobs; `keeper` adds the further functions of `pipeinfer up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeinfer.cluster import cleanup
from pipeinfer.errors import UsageError
from pipeinfer.supervise.hosts import others
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.rules import INTERRUPTED, BackOff, End, Patience

_CLEAN = 15.0  #: seconds for a host to end what is left there


class JobSource(Protocol):
    """Provides the jobs of a supervisor. name: id of the job, which its processes have in their
    environment."""

    name: str

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


@dataclass(slots=True, eq=False)
class Running:
    """A job that was started.

    hosts: its other hosts. began: by `time.monotonic`. ends: returns its exit status.
    row: of the history.
    """

    job: SupervisedJob
    hosts: list[str]
    began: float
    ends: asyncio.Task[int]
    row: dict[str, Any]


class Supervisor:
    """Runs the jobs of `source` until one has ended for good.

    restarts: how often a failed job is started again. door: the HTTP process, None if there is
        none.
    say: prints a line for the user. last: signals that end the job at once. The others let what
        runs complete first; a conversation would wait for the next message.
    """

    def __init__(self, source: JobSource, restarts: int, door: HttpDoor | None,
                 say: Callable[[str], None], *,
                 last: Sequence[signal.Signals] = (signal.SIGHUP,)) -> None:
        self.source, self.door, self.say, self._last = source, door, say, last
        self.patience = Patience(restarts)
        self._restarts = restarts
        self.current: Running | None = None
        self.asked = 0  #: number of requests to end
        self._woken = asyncio.Event()

    async def run(self) -> int:
        """Run jobs until the end; return the exit status of the last one."""
        self._heed_signals()
        try:
            return await self._run()
        finally:
            if self.door is not None:
                await self.door.close()

    def stop(self, *, at_once: bool = False) -> None:
        """Handle a request to end: the first lets running requests complete, further ones end
        the job at once."""
        self.asked += 1
        self._woken.set()
        if self.current is not None:
            self.current.job.interrupt(at_once=at_once)

    def start(self, row: dict[str, Any]) -> Running:
        """Start the job that the source provides now."""
        job = self.source.job()
        return Running(job, others(self.source.hostfile), time.monotonic(),
                       asyncio.create_task(job.run()), row)

    # --- overridden by `keeper` ---------------------------------------------------------------

    def begun(self) -> dict[str, Any]:
        """Called before a job starts; return its row of the history."""
        return {}

    async def ended(self, running: Running, status: int, lived: float) -> bool:
        """Called when a job has ended; return whether that was intended, and the next one
        follows at once."""
        del running, status, lived
        return False

    async def paused(self, status: int, verdict: BackOff) -> None:
        """Called before the pause between two starts."""

    # --- the loop -----------------------------------------------------------------------------

    async def _run(self) -> int:
        while True:
            if self.door is not None:
                await self.door.open()
            if self.asked:
                return INTERRUPTED
            running = self.current = self.start(self.begun())
            status = await running.ends
            lived = time.monotonic() - running.began
            self.current = None
            follows = await self.ended(running, status, lived)
            if follows and not self.asked:
                await self.clean(self.source.name, running.hosts)
                continue
            verdict = self.patience.after(status, lived, asked=self.asked > 0)
            if isinstance(verdict, End):
                if verdict.used_up:
                    self.say(f"the job has ended with exit code {status}, and every restart is "
                             "used up")
                return status
            self.say(f"the job has ended with exit code {status}: starting again in "
                     f"{verdict.pause:.0f} s ({verdict.left} more after that)")
            await self.paused(status, verdict)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), verdict.pause)
            if self.asked:
                return INTERRUPTED
            await self.clean(self.source.name, running.hosts)
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
                loop.add_signal_handler(
                    number, lambda at_once: self.stop(at_once=at_once), number in self._last)

    async def clean(self, name: str, hosts: list[str]) -> None:
        """Kill the remaining processes of an earlier job, here and on its hosts, so that none
        holds a port, memory or a lock. Each host has a time limit of its own."""
        await asyncio.gather(asyncio.to_thread(self._clean_here, name), *(
            asyncio.to_thread(_clean_there, host, name) for host in hosts))

    def _clean_here(self, name: str) -> None:
        cleanup.clear_sessions()
        if killed := cleanup.end(name):
            self.say(f"killed {len(killed)} processes that the previous job left behind")


def _clean_there(host: str, name: str) -> None:
    ssh = ["ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5",
           *shlex.split(os.environ.get("PIPEINFER_SSH_ARGS", "")), host,
           shlex.join([sys.executable, "-m", "pipeinfer.cluster.cleanup", name])]
    environ = {k: v for k, v in os.environ.items() if k != cleanup.VARIABLE}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(ssh, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ,
                       timeout=_CLEAN, check=False)
