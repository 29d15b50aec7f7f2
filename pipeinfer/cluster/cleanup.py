"""Ends the processes that a job has left on this host, found by their environment.

    python -m pipeinfer.cluster.cleanup [--after] JOB    JOB is $PIPEINFER_JOB of the launch scripts

The launch scripts run it on every host before they start a failed job again. A rank that is
stopped, or whose daemon died first, would otherwise keep its memory and its file locks. With
--after it first waits until its standard input is closed, which the death of the process at the
other end does, too.

It also deletes the directories that killed launchers left in the temporary directory
(`clear_sessions`). Every job does that at its start.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path

import psutil

VARIABLE = "PIPEINFER_JOB"
#: variables with a rank's number, and with how many there are on its host (Open MPI; MPICH)
_RANKS, _LOCAL = ("PMIX_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_SECONDS = 5.0
_SESSION = re.compile(r"(?:ompi|prte|prted|prterun)\.(\d+)")


def processes_of(job: str) -> list[psutil.Process]:
    """Return the living processes that were started with PIPEINFER_JOB=`job`, without this process
    and its ancestors."""
    mark, found = f"{VARIABLE}={job}".encode(), []
    own = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) not in own:
            with contextlib.suppress(OSError, psutil.Error):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(int(entry.name)))
    return found


def ranks_of(job: str) -> tuple[int, int]:
    """Return how many ranks of the job this host runs, and how many its launcher has started here;
    daemons are none."""
    found = dict[str, int]()
    for process in processes_of(job):
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            found |= {environ[name]: max(int(environ.get(size, 1)) for size in _LOCAL)
                      for name in _RANKS if name in environ}
    return len(found), max(found.values(), default=0)


def end(job: str) -> list[int]:
    """Kill the processes of a job; return their process ids.

    Looks again, for up to 5 seconds, until there are none: one may have started another meanwhile.
    Zombies, which a slow init has not reaped yet, have no environment, and are not found.
    """
    killed, deadline = set[int](), time.monotonic() + _SECONDS
    # a killed process may have started another one just before
    while (found := processes_of(job)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        time.sleep(0.02)
    return sorted(killed)


def clear_sessions(folder: Path | None = None) -> list[Path]:
    """Delete the directories of this user's dead Open MPI launchers on this host; return them.

    folder: where they are; None: the directory for temporary files.

    A launcher that gets the process id of a killed one finds the other's directory and fails: exit
    code 213, "The PMIx server's listener thread failed to start".
    """
    gone = []
    for path in (folder or Path(tempfile.gettempdir())).glob("*.*"):
        found = _SESSION.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if found and _is_ours(path) and not psutil.pid_exists(int(found[1])):
                shutil.rmtree(path)
                gone.append(path)
    return gone


def _is_ours(session: Path) -> bool:
    """Whether a launcher of this user and host made the directory. Containers may share it, and
    process ids of one container mean nothing in another."""
    info = session.lstat()
    names = {path.name.split(".")[1] for path in session.glob("pmix.*.tool")}
    return (stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
            and socket.gethostname().split(".")[0] in names)


def main() -> None:
    """Clear sessions of dead launchers and end the processes of a job."""
    *after, job = sys.argv[1:] or [""]
    if not job or after not in ([], ["--after"]):
        sys.exit("usage: python -m pipeinfer.cluster.cleanup [--after] JOB")
    if after:
        sys.stdin.read()
    clear_sessions()
    killed = end(job)
    if killed and not after:
        sys.stderr.write(f"pipeinfer: killed {len(killed)} processes that the previous job left "
                         "behind\n")


if __name__ == "__main__":
    main()
