"""One start of a job: the launcher in a session of its own, monitored until its end.

Handles processes and signals, not the purpose of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pipeinfer.cluster.cleanup import VARIABLE, ranks_of
from pipeinfer.host import SECRET_NAMES, SECRETS
from pipeinfer.supervise.launcher import own_choices
from pipeinfer.supervise.logs import ERROR, Splitter
from pipeinfer.supervise.rules import outcome

_LOOK = 0.5  #: seconds between two checks of rank 0
_SILENT = 16  #: checks that find no rank 0 and no exit status, before the rest is ended
_SHORT = 6  #: checks that find fewer ranks than have begun, before their start is ended
_GOODBYE = 3.0  #: seconds for the launcher to end by itself after rank 0
_DRAINED = 2.0  #: seconds to read the last output
Line: TypeAlias = Callable[[int | None, str], None]


class SupervisedJob:
    """A launcher that runs `command`.

    environ: of the launcher.
    line: called with each line of the output; None: the output is not redirected.
    alone: there is no launcher; `command` is the only rank.

    Ctrl-C does not end it at once: the first `interrupt` sends rank 0 SIGUSR1, so that it finishes
    its token, or accepts no more requests and completes the running ones; the second ends the job.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], line: Line | None = None,
                 *, alone: bool = False) -> None:
        self.command, self.asked, self.alone = command, False, alone
        self._environ, self._line = dict(environ), line
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0
        self._pending: list[signal.Signals] = []

    def interrupt(self, *, at_once: bool = False) -> None:
        """Handle a request to end the job. at_once: end it without waiting for running requests."""
        self.asked = True
        self._told += 1
        self._signal(signal.SIGUSR1 if self._told == 1 and not at_once else signal.SIGTERM)

    def end(self) -> None:
        """End the job, because another one has its requests."""
        self._signal(signal.SIGKILL if self.alone else signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all of its session: the launcher, and ssh to hosts that do not answer."""
        for number in [] if self._process is None else _session(self._process.pid):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)

    async def run(self) -> int:
        """Start the job and wait for its end; return its exit status.

        Raises ChildProcessError if the launcher cannot be started.
        """
        number, path = tempfile.mkstemp(prefix="pipeinfer-status-")
        os.close(number)
        said = Path(path)
        self._environ["PIPEINFER_STATUS"] = f"{socket.gethostname()}:{path}"
        secrets = None if self.alone else self._hide_secrets()
        try:
            launcher = await self._run(said)
            choices = own_choices(self.command[0])
            if launcher > 0 and not (said.stat().st_size or self.asked or self.alone) and choices:
                self._say("MPI has not started with the transports that Open MPI's own settings "
                          f"choose: remove {choices}")
            return outcome(launcher, said.read_text(encoding="ascii", errors="replace"),
                           asked=self.asked)
        finally:
            said.unlink(missing_ok=True)
            if secrets is not None:
                secrets.unlink(missing_ok=True)

    def _hide_secrets(self) -> Path | None:
        """Withhold keys from the launcher, which may pass its environment to every host. Rank 0
        reads them from a file that only this user can read. Returns the file, None if there are
        no keys."""
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
        # over poor links a daemon may not end, and its ssh holds the output open
        for _ in range(0 if status else round(_GOODBYE / _LOOK)):
            if not _session(process.pid):
                break
            await asyncio.sleep(_LOOK)
        self.kill()
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
            # to its end: a full pipe would stop the launcher
            while data := await reader.read(1 << 16):
                splitter.feed(data)
        finally:
            splitter.close()
            transport.close()

    async def _watch(self, process: subprocess.Popen[bytes], said: Path) -> None:
        """End the launcher if rank 0 has ended without it: it waits for lost hosts; or if a rank
        of this host has died before all had met, for which the others would wait."""
        missed = short = most = 0
        # rank 0 writes its exit status as it ends: a look may come before that
        while missed < _SILENT:
            words = said.read_text(encoding="ascii", errors="replace").split()
            if "lost" in words:
                break
            if words[:1] == ["up"] and not _alive(words[1:]):
                missed += 1
            if not words and not self.alone:
                there, of = await asyncio.to_thread(ranks_of, self._environ.get(VARIABLE, ""))
                most = max(most, of)
                short = short + 1 if there < most else 0
                if short >= _SHORT:
                    self._say(f"of {most} ranks of this host, {most - there} ended before all had "
                              "met: were they killed, maybe by the kernel for want of memory?")
                    break
            await asyncio.sleep(_LOOK)
        # a launcher that ends by itself passes on the ranks' last lines
        await asyncio.sleep(_GOODBYE)
        if process.poll() is None:
            self.kill()

    def _say(self, text: str) -> None:
        (self._line or (lambda _, line: print(line, file=sys.stderr)))(None, ERROR + text)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            self._pending.append(number)
            return
        with contextlib.suppress(OSError):
            self._process.send_signal(number)


def _session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(state[3]) == leader and state[0] != "Z":
                    found.append(int(entry.name))
    return found


def _alive(words: Sequence[str]) -> bool:
    try:
        os.kill(int(words[0]), 0)
    except (IndexError, ValueError):
        return True  # the line is not complete yet
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
