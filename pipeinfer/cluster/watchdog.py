"""The watchdog: a process next to each rank that kills it when it hangs.

MPI detects the death of a rank at once and a hanging rank never. So a rank that is stopped, or
whose main thread does not return, is killed on its own host. A thread of the rank writes a byte
into a pipe several times in the allowed time. The watchdog, a small process in a session of its
own, kills the rank when no byte comes, and exits with it. The thread itself kills a rank whose
main thread exceeds its deadline.

It runs as a script without the package (`python watchdog.py`), so it imports only the standard
library.
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
_PATIENT, _PATIENCE = 5.0, b"p"  #: multiple of the allowed time, and the byte that requests it
START_SECONDS = 60.0  #: for MPI_Init on every rank
_LATE = 2.0  #: longest sleeps that passed in one: then the watchdog itself was not running
_BUSY_SECONDS = 30.0  #: for which a late pause of the watchdog makes it wait longer
_STARVED = 0.25  #: share of a time for which a thread waited for a core: it could not write


def _host() -> str:
    return os.environ.get("PIPEINFER_HOST_NAME") or socket.gethostname()


class Watchdog:
    """Starts and feeds the watchdog process.

    Make it before MPI starts: a process that uses MPI should not fork. Hangs are not detected
    before `arm`, because MPI_Init blocks every thread until all ranks are there.

    name: of the rank, for messages. seconds: allowed time without a byte.
    pulse: sign of life of the main thread. start: seconds that MPI_Init may take.
    """

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
        """Start the thread that writes to the watchdog from now on."""
        self._pulse.on_settled = self._write
        self._write()
        threading.Thread(target=self._beat, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """End the watchdog process; the rank is not watched any more."""
        pipe, self._pipe = self._pipe, -1
        with contextlib.suppress(OSError):
            os.write(pipe, b"q")
        with contextlib.suppress(OSError):
            os.close(pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def _beat(self) -> None:
        # its own thread: it goes on while the main one computes, and tells whether that hangs
        while self._pipe >= 0:
            if doing := self._pulse.hangs:
                _kill(os.getpid(), f"{self._name} on {_host()} {doing} for more than "
                                   f"{self._pulse.deadline:.0f} s")
            self._write()
            asleep = time.monotonic()
            time.sleep(self._pause)
            self._pulse.slept(self._pause, time.monotonic() - asleep)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, _PATIENCE if self._pulse.patient else b".")


def watch(pipe: int, pid: int, seconds: float, name: str, start: float = START_SECONDS) -> None:
    """The watchdog's loop: return when the rank ends, or kill it.

    pipe: file descriptor from which the rank's bytes are read. pid: of the rank.
    seconds, name, start: see `Watchdog`.
    """
    if not select.select([pipe], (), (), start)[0]:
        _kill(pid, f"{name} on {_host()} has been waiting in MPI_Init for more than "
                   f"{start:.0f} s (did another rank die?)")
        return
    if not (data := os.read(pipe, 1)) or data == b"q":
        return
    heard, allowed = time.monotonic(), _PATIENT * seconds if data == _PATIENCE else seconds
    pause, late, late_until, waited = seconds / _BEATS, 0.0, 0.0, _Waiting(pid)
    # apart from the rank, as a process that hangs in C code cannot watch over itself
    while True:
        asleep = time.monotonic()
        ready, _, _ = select.select([pipe], (), (), pause)
        now = time.monotonic()
        if now > late_until or now - asleep - pause > late:
            late, late_until = max(now - asleep - pause, 0.0), now + _BUSY_SECONDS
        if ready:
            data = os.read(pipe, 4096)
            if not data or b"q" in data:
                return
            heard, allowed = now, _PATIENT * seconds if data[-1:] == _PATIENCE else seconds
        elif now - asleep > _LATE * pause:
            heard = now  # this process did not run either: the machine was suspended
        elif now - heard <= (allowed + _BEATS * late) / 2:
            waited.begin()
        elif now - heard > allowed + _BEATS * late and (
                now - heard > _PATIENT * seconds + _BEATS * late or not waited.long()):
            _kill(pid, f"{name} on {_host()} has not responded for "
                       f"{now - heard:.1f} s")
            return


class _Waiting:
    """Whether threads of a process wait for a core or for the disk (swap), by what Linux counts.

    Then its signs of life are late though it does not hang. Elsewhere they never do.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = f"/proc/{pid}/task"
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._since, self._before = time.monotonic(), self._counts()

    def long(self) -> bool:
        """Whether a thread has waited for much of the time since `begin`, or waits for the disk."""
        passed = 1e9 * (time.monotonic() - self._since)
        for task, (state, ran, waited) in self._counts().items():
            _, before, earlier = self._before.get(task, (state, ran, waited))
            # what it waits for now is counted when it is over
            stuck = state == "R" and ran - before < (1 - _STARVED) * passed
            if state == "D" or stuck or waited - earlier > _STARVED * passed:
                return True
        return False

    def _counts(self) -> dict[str, tuple[str, int, int]]:
        """Of each thread: its state, and for how many nanoseconds it ran and waited for a core."""
        found = {}
        with contextlib.suppress(OSError, IndexError, ValueError):
            for task in os.listdir(self._tasks):
                with open(f"{self._tasks}/{task}/schedstat") as times:
                    ran, waited = map(int, times.read().split()[:2])
                with open(f"{self._tasks}/{task}/stat") as stat:
                    found[task] = stat.read().rpartition(")")[2].split()[0], ran, waited
        return found


def _kill(pid: int, why: str) -> None:
    sys.stderr.write(f"pipeinfer: {why}: killed\n")
    sys.stderr.flush()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
