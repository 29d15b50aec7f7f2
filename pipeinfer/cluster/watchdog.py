"""A process beside each rank that kills it when it hangs.

MPI learns of a rank's death at once and of a hanging one never, so a rank that is stopped, or whose
main thread does not come back, is turned into a dead one on its own host. A thread of the rank
writes a byte into a pipe several times in the time allowed; the watchdog, a small process of its
own session, kills the rank when no byte comes, and ends with it. The thread itself ends a rank
whose main thread has not come around within its deadline.

Runs as a script without the package (`python watchdog.py`), so it imports nothing but the standard
library and knows no MPI, no model and no option.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeinfer.runtime.pulse import Pulse

_BEATS = 8  #: in the time after which silence counts as a hang
_PATIENT, _PATIENCE = 5.0, b"p"  #: times the time allowed, and the byte that asks for it
START_SECONDS = 60.0  #: for MPI_Init on every rank
_LATE = 2.0  #: times the longest sleep after which the watchdog itself was not running


class Watchdog:
    """Starts the process. Start it before MPI: a process that talks MPI should not fork. Nothing is
    watched before `arm`, for MPI_Init holds up every thread until all ranks are there; start: the
    seconds that this may take."""

    def __init__(self, name: str, seconds: float, pulse: Pulse, start: float = START_SECONDS
                 ) -> None:
        self._name, self._pulse, self._pause = name, pulse, seconds / _BEATS
        reads, self._pipe = os.pipe()
        os.set_inheritable(reads, True)
        os.set_blocking(self._pipe, False)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__,
             str(reads), str(os.getpid()), str(seconds), name, str(start)],
            pass_fds=(reads,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True)
        os.close(reads)

    def arm(self) -> None:
        """Begin: a thread keeps the process calm from now on."""
        self._pulse.told = self._write
        self._write()
        threading.Thread(target=self._beat, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Nobody is watched any more."""
        pipe, self._pipe = self._pipe, -1
        with contextlib.suppress(OSError):
            os.write(pipe, b"q")
        with contextlib.suppress(OSError):
            os.close(pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def _beat(self) -> None:
        while self._pipe >= 0:
            if doing := self._pulse.hangs:
                _kill(os.getpid(), f"{self._name} on {socket.gethostname()} {doing} for more than "
                                   f"{self._pulse.deadline:.0f} s")
            self._write()
            time.sleep(self._pause)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, _PATIENCE if self._pulse.patient else b".")


def watch(pipe: int, pid: int, seconds: float, name: str, start: float = START_SECONDS) -> None:
    """The watchdog's loop: until the rank ends, or is ended."""
    if not select.select([pipe], (), (), start)[0]:
        _kill(pid, f"{name} on {socket.gethostname()} has been waiting in MPI_Init for more than "
                   f"{start:.0f} s (did another rank die?)")
        return
    if not (data := os.read(pipe, 1)) or data == b"q":
        return
    heard, allowed = time.monotonic(), _PATIENT * seconds if data == _PATIENCE else seconds
    pause = seconds / _BEATS
    while True:
        asleep = time.monotonic()
        ready, _, _ = select.select([pipe], (), (), pause)
        now = time.monotonic()
        if ready:
            data = os.read(pipe, 4096)
            if not data or b"q" in data:
                return
            heard, allowed = now, _PATIENT * seconds if data[-1:] == _PATIENCE else seconds
        elif now - asleep > _LATE * pause:
            heard = now  # this process was not running either: the machine slept
        elif now - heard > allowed:
            _kill(pid, f"{name} on {socket.gethostname()} has not responded for "
                       f"{now - heard:.1f} s")
            return


def _kill(pid: int, why: str) -> None:
    sys.stderr.write(f"pipeinfer: {why}: killed\n")
    sys.stderr.flush()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
