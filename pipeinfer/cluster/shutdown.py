"""How a rank of a job ends: exit codes, and messages to the launcher and to other ranks.

In a job that survives the death of a rank, the exit of a rank does not end the others,
MPI_Finalize can block on dead ranks, and mpirun does not report that rank 0 was killed. So rank 0
sends the others the order to leave, no rank calls MPI_Finalize, and launch/run gets the exit
status from rank 0 itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from pipeinfer import host
from pipeinfer.host import Place

_exit_status = [0]
_in_order = [False]
_PUT_OFF_SECONDS = 0.3  #: mpirun kills a process that ignores its SIGTERM after 0.25 s


def survivable(place: Place) -> bool:
    """Whether the job goes on when a rank dies."""
    if place.comm is None:
        return False
    from pipeinfer.transport import mpi_job

    return mpi_job.survivable()


def fatal(place: Place) -> str:
    """Return, for the user, why the death of a rank ends the job; "" if it does not."""
    if place.comm is None:
        return ""
    from pipeinfer.transport import mpi_job

    return mpi_job.fatal()


def note_exit(code: int) -> None:
    """Record the code with which rank 0 is about to exit."""
    _exit_status[0] = code


def note_order() -> None:
    """Record that every other rank has received the end of the job, so that none needs to detect
    this one's exit."""
    _in_order[0] = True


def end_job(code: int) -> None:
    """Exit with `code` and end every other rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk; the error has been printed
            stream.flush()
    if host.launched_size() > 1:
        host.choose_transports()  # as on every other rank, else messages do not arrive
        with contextlib.suppress(ImportError, RuntimeError):
            # Others may wait in MPI_Init, and nothing ends them where a job survives a death.
            from pipeinfer.transport import mpi_job

            time.sleep(0.2)  # the launcher drops output that it has not read when it kills
            if host.launched_rank() == 0:
                _leave_status(code)
            mpi_job.abort(code)
    os._exit(code)


def answer_for_job() -> None:
    """Rank 0 of a job that survives a death: from now on `run` looks at this rank alone, which
    leaves without MPI_Finalize."""
    write_status(f"up {os.getpid()}")
    atexit.register(skip_finalize)


def skip_finalize() -> None:
    """At exit: leave without MPI_Finalize, which may wait forever for dead ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    _leave_status(_exit_status[0])
    if _in_order[0]:
        from pipeinfer.transport import mpi_job

        mpi_job.sign_off()
    os._exit(_exit_status[0])


def part(place: Place) -> None:
    """End the ranks above 0 of a command in which rank 0 goes on alone.

    Does nothing in a job that does not survive a death. In one that does, MPI_Finalize first
    agrees on the living ranks, and sometimes crashes in that (Open MPI 5.0.11,
    `ompi_comm_nextcid`).
    """
    if not survivable(place):
        return
    from pipeinfer.transport import mpi_job

    if place.rank > 0:
        mpi_job.await_dismissal(place.comm)
        sys.stdout.flush()
        sys.stderr.flush()
        mpi_job.leave()
    answer_for_job()  # before a rank leaves, which `run` would take for a dead one
    if mpi_job.dismiss(place.comm):
        note_order()


def _leave_status(code: int) -> None:
    """Report to launch/run, on the same host, how the job has ended: mpirun waits for lost
    hosts."""
    from pipeinfer.transport import mpi_job

    write_status(f"{code} lost" if mpi_job.has_losses() else str(code))


def put_off(number: signal.Signals, seconds: float = _PUT_OFF_SECONDS) -> None:
    """Delay the end of this process after a signal by some seconds, so that rank 0 has time to
    print its message. The delay holds whatever the process does. Call it in the main thread.

    mpirun that ends a job kills the rest within 2 ms of the first rank's death, not after 0.25 s.
    """
    heard, bell = os.pipe()
    os.set_blocking(bell, False)

    def end() -> None:
        os.read(heard, 1)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    # a thread, because Python runs a handler only between two instructions of the main one
    threading.Thread(target=end, name="signals", daemon=True).start()
    signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)  # at once, even in the midst of a C call


def write_status(text: str) -> None:
    """Write the status file for launch/run, which waits for mpirun on this host."""
    where, _, path = os.environ.get("PIPEINFER_STATUS", "").partition(":")
    if where == socket.gethostname():
        with contextlib.suppress(OSError):
            time.sleep(0.1)  # what was written passes through mpirun
            Path(path).write_text(f"{text}\n", encoding="ascii")
