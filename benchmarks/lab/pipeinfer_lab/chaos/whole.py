"""Faults that hit more than a stage, under `pipeinfer up`: rank 0, the launcher, every rank, the
HTTP process, `pipeinfer up` itself, all of a host, the disk with the journal.

Knows which processes those are, and how a server is started that comes back. The disk's faults need
root and `unshare`: its folder is a file system of its own, in a mount namespace.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from pipeinfer.errors import UsageError
from pipeinfer_lab.chaos.job import ServerJob

#: who is hit, and the signal
WHOLE = {
    "kill-head": ("head", signal.SIGKILL), "stop-head": ("head", signal.SIGSTOP),
    "kill-mpirun": ("mpirun", signal.SIGKILL), "kill-job": ("job", signal.SIGKILL),
    "kill-door": ("door", signal.SIGKILL), "stop-door": ("door", signal.SIGSTOP),
    "kill-up": ("up", signal.SIGKILL),
    "kill-host": ("host", signal.SIGKILL),
}
DISKS = ("full-disk", "read-only-disk")
#: after these nothing is left that would start the job again: the harness does, as systemd would
NOBODY_LEFT = ("kill-up", "kill-host")
#: after these clients have to come again
CONNECTIONS_LOST = ("kill-door", "stop-door", *NOBODY_LEFT)
_UNSHARE = ("unshare", "--mount", "--propagation", "private")
KILL = signal.SIGKILL
_RESTARTS, _MIB = "1000", 4
_MOUNT = 'mount -t tmpfs -o size={mib}m,mode=700 tmpfs "$PIPEINFER_STATE" && exec "$@"'


def free_port() -> int:
    """A TCP port of this host that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check(faults: Sequence[str]) -> None:
    """Raises UsageError for what cannot be brought about here."""
    wanted = [fault for fault in DISKS if fault in faults]
    if wanted and not can_mount():
        raise UsageError(f"--fault {wanted[0]} needs root and the program unshare, to mount a "
                         "small file system")


def can_mount() -> bool:
    """Whether a file system can be mounted in a namespace of its own."""
    try:
        return subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False,
                              capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def start(ranks: int, arguments: Sequence[str], cache: Path, seconds: float, *, disk: bool,
          **environ: str) -> ServerJob:
    """A server of `pipeinfer up` with a journal, at a port that stays. disk: journal, state and
    logs are on a small one of their own."""
    state = state_of(cache)
    state.mkdir(mode=0o700)
    more = ["--port", str(free_port()), "--journal", str(state / "journal"),
            "--set", "journal_sync=0.1"]
    return ServerJob(
        ranks, [*arguments, *more], seconds=seconds, asked_to_end=signal.SIGTERM,
        command=[*(_own_disk() if disk else ()), sys.executable, "-P", "-m", "pipeinfer", "up",
                 "-np", str(ranks), "--restarts", _RESTARTS, "--"],
        environ={"PIPEINFER_CACHE": str(cache), "PIPEINFER_STATE": str(state), **environ})


def _own_disk() -> list[str]:
    return [*_UNSHARE, "sh", "-c", _MOUNT.format(mib=_MIB), "sh"]


def strike_disk(job: ServerJob, cache: Path, fault: str) -> bool:
    """Fill the disk, or let nothing more be opened for writing there; whether that worked."""
    folder = shlex.quote(str(state_of(cache)))
    what = (f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
            if fault == "read-only-disk" else
            f"cat /dev/zero >{folder}/zeros; test -s {folder}/zeros")
    return subprocess.run(["nsenter", f"--mount=/proc/{job.process.pid}/ns/mnt", "sh", "-c", what],
                          check=False, capture_output=True, timeout=30).returncode == 0


def state_of(cache: Path) -> Path:
    """Where a server with this cache has its state and journal."""
    return cache.with_name(f"{cache.name}-state")


def remove(cache: Path) -> None:
    """Delete what `start` has made."""
    shutil.rmtree(state_of(cache), ignore_errors=True)


def processes(job: ServerJob, who: str) -> list[psutil.Process]:
    """Those to hit now."""
    if who in ("up", "host"):
        return [psutil.Process(job.process.pid), *(job.processes() if who == "host" else ())]
    ranks = job.rank_processes()
    if who == "head":
        return [ranks[0]] if 0 in ranks else []
    if who == "door":
        return [p for p in job.processes() if "pipeinfer.server" in _line(p)]
    launchers = [p for p in job.processes() if (line := _line(p))
                 and os.path.basename(line[0]).startswith(("mpirun", "prterun", "mpiexec"))]
    return launchers if who == "mpirun" else [*launchers, *ranks.values()]


def _line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []
