"""How a rank of a job ends: exit codes, and what is said to whom.

In a job that survives the death of a rank, no rank's exit ends the others, MPI_Finalize can block
on dead ranks, and mpirun does not report that rank 0 was killed. So rank 0 tells the others to
leave, no rank calls MPI_Finalize, and launch/run gets the exit status from rank 0 itself. This
module knows no model, no plan and no request.
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
_PUT_OFF_SECONDS = 0.3  #: mpirun kills whoever ignores its SIGTERM after 0.25 s


def survivable(place: Place) -> bool:
    """Whether the job goes on when a rank dies."""
    if place.comm is None:
        return False
    from pipeinfer.transport import mpi_job

    return mpi_job.survivable()


def fatal(place: Place) -> str:
    """For the user, why the death of a rank ends the job; empty where it does not."""
    if place.comm is None:
        return ""
    from pipeinfer.transport import mpi_job

    return mpi_job.fatal()


def note_exit(code: int) -> None:
    """What rank 0 is about to exit with."""
    _exit_status[0] = code


def note_order() -> None:
    """Every other rank has been told that the job is over: none has to hear of this one's end."""
    _in_order[0] = True


def end_job(code: int) -> None:
    """Leave with `code` and take every other rank along."""
    sys.stdout.flush()
    sys.stderr.flush()
    if host.launched_size() > 1:
        host.choose_transports()  # as every other rank: else they cannot talk
        with contextlib.suppress(ImportError, RuntimeError):
            # Others may wait in MPI_Init, and nobody ends them where a job survives a death.
            from pipeinfer.transport import mpi_exit

            time.sleep(0.2)  # the launcher drops output that it has not read when it kills
            if host.launched_rank() == 0:
                _leave_status(code)
            mpi_exit.abort(code)
    os._exit(code)


def skip_finalize() -> None:
    """At exit: MPI_Finalize may wait for ever for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    _leave_status(_exit_status[0])
    if _in_order[0]:
        from pipeinfer.transport import mpi_exit

        mpi_exit.sign_off()
    os._exit(_exit_status[0])


def part(place: Place) -> None:
    """All ranks of a command for which rank 0 has heard all it wants: those above 0 end here, rank
    0 goes on alone.

    In a job that survives the death of a rank, MPI_Finalize first agrees on who is alive, and
    sometimes crashes in that (Open MPI 5.0.11, `ompi_comm_nextcid`).
    """
    if not survivable(place):
        return
    from pipeinfer.transport import mpi_exit, mpi_startup

    if place.rank > 0:
        mpi_startup.await_dismissal(place.comm)
        sys.stdout.flush()
        sys.stderr.flush()
        mpi_exit.leave()
    if mpi_startup.dismiss(place.comm):
        note_order()
    atexit.register(skip_finalize)


def _leave_status(code: int) -> None:
    """Tell launch/run, on the same host, how the job has ended: mpirun waits for lost hosts."""
    from pipeinfer.transport import mpi_exit

    write_status(f"{code} lost" if mpi_exit.has_losses() else str(code))


def put_off(number: signal.Signals, seconds: float = _PUT_OFF_SECONDS) -> None:
    """Let a signal end this process, whatever it is at, only after some seconds: rank 0 has as long
    to say what there is. Called in the main thread.

    mpirun that ends a job kills the rest within 2 ms of the first rank's death, not after 0.25 s.
    """
    heard, bell = os.pipe()
    os.set_blocking(bell, False)

    def end() -> None:
        os.read(heard, 1)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="signals", daemon=True).start()
    signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)  # at once, even in the midst of a C call


def write_status(text: str) -> None:
    """Tell launch/run, which waits for mpirun on this host."""
    where, _, path = os.environ.get("PIPEINFER_STATUS", "").partition(":")
    if where == socket.gethostname():
        with contextlib.suppress(OSError):
            time.sleep(0.1)  # what was written passes through mpirun
            Path(path).write_text(f"{text}\n", encoding="ascii")
