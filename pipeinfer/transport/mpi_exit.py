"""How a process leaves an MPI job: abort, sign-off and exit."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import NoReturn

from mpi4py import MPI

from pipeinfer.errors import ClusterError
from pipeinfer.transport.mpi_job import JOB, failed_ranks, survivable
from pipeinfer.transport.mpi_startup import dismiss

_PMIX_USERS = 8  #: at most, in one process
_HEARD_SECONDS = 5.0  #: that rank 0 waits until every rank has received the order to leave


def has_losses() -> bool:
    """Whether this process has given up any rank."""
    return any(port.gone for port in JOB.ports)


def abort(code: int) -> None:
    """End every rank of the job at once, with exit status `code`.

    Where a job survives the death of a rank, MPI_Abort leaves the others alive and hangs. There
    rank 0 sends them the order to leave; another rank ends only itself, and rank 0 detects that.
    """
    if MPI.COMM_WORLD.Get_size() == 1:  # MPI_Abort writes a page about that
        os._exit(code)
    if not survivable():
        MPI.COMM_WORLD.Abort(code)
    if MPI.COMM_WORLD.Get_rank() == 0:
        with contextlib.suppress(MPI.Exception, ClusterError):
            if not JOB.ports:
                dismiss(MPI.COMM_WORLD, _HEARD_SECONDS, heard=True)
            else:
                port = JOB.ports[-1]
                port.dismiss()
                port.close(timeout=0.5)
    elif 0 not in failed_ranks(MPI.COMM_WORLD):
        code = 0  # MPI does not report the end of a rank with another code
    os._exit(code)


def sign_off() -> None:
    """Report an orderly end to the launcher. MPI_Finalize does this as well, but only after
    waiting for every rank, some of which may hang.

    Without it the launcher reports a death to all other ranks, and if one of them has left
    meanwhile it writes an error of its own into the job's output. Do not call this in a rank whose
    death must be detected.
    """
    with contextlib.suppress(OSError, AttributeError):  # another launcher
        pmix = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        for _ in range(_PMIX_USERS):
            if not pmix.PMIx_Initialized():
                break
            pmix.PMIx_Finalize(None, ctypes.c_size_t(0))


def leave() -> NoReturn:
    """End this process; the job continues without it, or has ended."""
    sign_off()
    os._exit(0)
