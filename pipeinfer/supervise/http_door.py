"""The supervisor's handle on the HTTP process that outlives the job: start, requests, end.

Orders go over a Unix socket: see `server.orders`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.errors import ending
from pipeinfer.server import http_process, orders
from pipeinfer.server.orders import Look, Order, ServerState

_ANSWER = 5.0  #: seconds for an answer
_EVERY = 5.0  #: seconds between two checks whether it answers
_MISSED = 4  #: successive missing answers after which it counts as hanging
_END = 15.0  #: seconds to end the streams of clients


class HttpDoor:
    """Starts the HTTP process with the first job, and again when it has died or hangs.

    environ: of the launcher; gets PIPEINFER_DOOR. say: prints a line for the user.
    """

    def __init__(self, environ: dict[str, str], say: Callable[[str], None]) -> None:
        self._environ, self._say = environ, say
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._answered = False  #: whether it has answered any request yet
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id, 0 if there is no process."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process is not None else 0

    async def open(self) -> None:
        """Start the process unless it runs."""
        if self.pid:
            return
        self._clear()
        self._folder = Path(tempfile.mkdtemp(prefix="pipeinfer-door-"))
        path = self._folder / "door"
        with http_process.unix_listener(str(path)) as entrance, \
                http_process.unix_listener(str(self._folder / "control")) as control:
            # its death signal depends on the starting thread, so start it in this one
            # the sockets listen before it starts, so that no order and no engine comes too early
            self._process = http_process.start(
                entrance, {k: v for k, v in self._environ.items() if k != VARIABLE}, control)
        self._environ["PIPEINFER_DOOR"] = f"{socket.gethostname()}:{path}"
        self._watching = asyncio.create_task(self._watch(self._process))

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process if it lives but does not answer any more: clients would wait forever.

        Before the first rank 0 has entered it answers nothing.
        """
        missed = 0
        # one missed answer may be a long event; clients of a process that hangs would wait for ever
        while missed < _MISSED:
            await asyncio.sleep(_EVERY)
            if process.poll() is not None:
                if "killed" in (how := ending(process.returncode)):
                    self._say(f"the HTTP process has ended with {how}")
                return
            seen = await self.ask(Look())
            if seen.state or seen.error:
                missed = 0
            elif self._answered:
                missed += 1
        self._say("the HTTP process does not answer any more: killed")
        process.kill()

    async def ask(self, order: Order) -> ServerState:
        """Send an order and return the answer, one without a state if there is none (in time)."""
        if self._folder is None or not self.pid:
            return ServerState()
        try:
            # a process that hangs must not stop the supervisor, which carries on without an answer
            async with asyncio.timeout(_ANSWER):
                found = await orders.ask(str(self._folder / "control"), order, _ANSWER)
        except (OSError, ValueError):  # TimeoutError is the former, errors of msgspec the latter
            return ServerState()
        self._answered = True
        return found

    async def close(self) -> None:
        """End the process: no further job comes."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._clear()

    def _clear(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._watching = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._process = None
        self._answered = False
        self._environ.pop("PIPEINFER_DOOR", None)

