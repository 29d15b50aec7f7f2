"""One try of a job: the launcher in a session of its own, watched until nothing of it lives.

Knows processes and signals, not what the job does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.host import SECRET_NAMES, SECRETS
from pipeinfer.supervise.logs import Splitter
from pipeinfer.supervise.rules import outcome

_LOOK = 0.5  #: seconds between two looks at rank 0
_SILENT = 16  #: looks at which rank 0 was gone without a word, before the rest is ended
_GOODBYE = 3.0  #: seconds for the launcher to end by itself when rank 0 has
_DRAINED = 2.0  #: seconds for what was written last
Line: TypeAlias = Callable[[int | None, str], None]


class Job:
    """A launcher that runs `command`. line: gets the lines of its output; None leaves the output
    alone. alone: without a launcher, `command` is the one rank.

    It survives Ctrl-C long enough for a goodbye: the first `interrupt` asks rank 0 to finish its
    token, or to take no more requests and let the running ones end (SIGUSR1); the second ends it.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], line: Line | None = None,
                 *, alone: bool = False) -> None:
        self.command, self.asked, self.alone = command, False, alone
        self.number = environ.get(VARIABLE, "")  #: that all of its processes bear
        self._environ, self._line = dict(environ), line
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0
        self._pending: list[signal.Signals] = []

    def interrupt(self, *, at_once: bool = False) -> None:
        """Somebody wants the job to end. at_once: with the goodbye left out."""
        self.asked = True
        self._told += 1
        self._signal(signal.SIGUSR1 if self._told == 1 and not at_once else signal.SIGTERM)

    def end(self) -> None:
        """End it; the requests that run are another job's."""
        self._signal(signal.SIGKILL if self.alone else signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of its session: the launcher, and ssh to hosts that are gone."""
        if self._process is None:
            return
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if os.getsid(int(entry.name)) == self._process.pid:
                        os.kill(int(entry.name), signal.SIGKILL)

    async def run(self) -> int:
        """Start it and wait for its end; its exit status."""
        number, path = tempfile.mkstemp(prefix="pipeinfer-status-")
        os.close(number)
        said = Path(path)
        self._environ["PIPEINFER_STATUS"] = f"{socket.gethostname()}:{path}"
        secrets = None if self.alone else self._hide_secrets()
        try:
            launcher = await self._run(said)
            return outcome(launcher, said.read_text(encoding="ascii", errors="replace"),
                           asked=self.asked)
        finally:
            said.unlink(missing_ok=True)
            if secrets is not None:
                secrets.unlink(missing_ok=True)

    def _hide_secrets(self) -> Path | None:
        """Keep keys from the launcher, which may give its environment to every host; rank 0 finds
        them in a file that only this user reads. The file, None for no keys."""
        found = {name: self._environ.pop(name) for name in SECRET_NAMES if name in self._environ}
        if not found:
            return None
        number, path = tempfile.mkstemp(prefix="pipeinfer-secrets-")
        with open(number, "w", encoding="utf-8") as file:
            json.dump(found, file)
        self._environ[SECRETS] = f"{socket.gethostname()}:{path}"
        return Path(path)

    async def _run(self, said: Path) -> int:
        pipe = subprocess.PIPE if self._line else None
        try:
            process = subprocess.Popen(self.command, env=self._environ, stdin=subprocess.DEVNULL,
                                       stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise ChildProcessError(f"cannot start {self.command[0]}: {error.strerror}") from error
        self._process = process
        for number in self._pending:
            self._signal(number)
        readers = [asyncio.create_task(self._read(stream))
                   for stream in (process.stdout, process.stderr) if stream is not None]
        watcher = asyncio.create_task(self._watch(process, said))
        status = await asyncio.to_thread(process.wait)
        watcher.cancel()
        if readers:  # an orphan may hold the other end
            await asyncio.wait(readers, timeout=_DRAINED)
            for reader in readers:
                reader.cancel()
        await asyncio.gather(watcher, *readers, return_exceptions=True)
        return status

    async def _read(self, stream: object) -> None:
        assert self._line is not None
        splitter, reader = Splitter(self._line), asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream)
        try:
            while data := await reader.read(1 << 16):
                splitter.feed(data)
        finally:
            splitter.close()
            transport.close()

    async def _watch(self, process: subprocess.Popen[bytes], said: Path) -> None:
        """End the launcher when rank 0 has gone without it: it waits for hosts that are gone."""
        missed = 0
        while missed < _SILENT:
            words = said.read_text(encoding="ascii", errors="replace").split()
            if "lost" in words:
                break
            if words[:1] == ["up"] and not _alive(words[1:]):
                missed += 1
            await asyncio.sleep(_LOOK)
        await asyncio.sleep(_GOODBYE)
        if process.poll() is None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            self._pending.append(number)
            return
        with contextlib.suppress(OSError):
            self._process.send_signal(number)


def _alive(words: Sequence[str]) -> bool:
    try:
        os.kill(int(words[0]), 0)
    except (IndexError, ValueError):
        return True  # half a line
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
