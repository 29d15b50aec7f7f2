"""The supervisor's handle on the HTTP process that outlives the job: start, requests, end.

Orders go over a socket pair, one a line: see `server.orders`.
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
from pipeinfer.errors import ProtocolError, ending
from pipeinfer.server import http_process
from pipeinfer.server.orders import MOST_LINE, Look, Order, ServerState, decode_answer, encode

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
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking = asyncio.Lock()
        self._number = 0
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
        ours, theirs = socket.socketpair()
        with theirs, http_process.entrance(str(path)) as entrance:
            # its death signal depends on the starting thread, so start it in this one
            self._process = http_process.start(
                entrance, {k: v for k, v in self._environ.items() if k != VARIABLE}, theirs)
        self._environ["PIPEINFER_DOOR"] = f"{socket.gethostname()}:{path}"
        self._link = await asyncio.open_connection(sock=ours, limit=MOST_LINE)
        self._watching = asyncio.create_task(self._watch(self._process))

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process if it lives but does not answer any more: clients would wait forever.

        Before the first rank 0 has entered it answers nothing.
        """
        missed = 0
        while missed < _MISSED:
            await asyncio.sleep(_EVERY)
            if process.poll() is not None:
                if "killed" in (how := ending(process.returncode)):
                    self._say(f"the HTTP process has ended with {how}")
                return
            if (await self.ask(Look())).state:
                missed = 0
            elif self._answered:
                missed += 1
        self._say("the HTTP process does not answer any more: killed")
        process.kill()

    async def ask(self, order: Order) -> ServerState:
        """Send an order and return the answer, one without a state if there is none (in time)."""
        async with self._asking:
            if self._link is None or not self.pid:
                return ServerState()
            reader, writer = self._link
            self._number += 1
            try:
                writer.write(encode(order, self._number))
                async with asyncio.timeout(_ANSWER):
                    while line := await reader.readline():
                        found = decode_answer(line)
                        self._answered = True
                        if found.number == self._number:  # not a late one
                            return found
            except (OSError, ValueError, ProtocolError):  # TimeoutError is the former
                pass
            return ServerState()

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
        if self._link is not None:
            self._link[1].close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._link = self._folder = self._process = None
        self._answered = False
        self._environ.pop("PIPEINFER_DOOR", None)

