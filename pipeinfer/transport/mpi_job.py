"""The state of this process's MPI job: communicator, doorbells, ports and losses."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mpi4py import MPI
from msgspec import Struct, field

from pipeinfer.core.control import Bell
from pipeinfer.errors import ProtocolError
from pipeinfer.transport.doorbell import Doorbell

ORDER_TAG = 7  #: from rank to rank, of node 0 and epoch 0
POST_TAG = 6  #: likewise, messages from and to draft ranks
MIN_SLEEP, IDLE_CAP = 30e-6, 10e-3  #: seconds of one sleep while waiting for MPI
SHARE = 0.125  #: of the time already waited that the next sleep takes
DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class Neighbours(Struct):
    """The doorbell of this rank and the names of those of all ranks of this host, by rank."""

    bell: Doorbell
    names: dict[int, str]


class OpenPort(Protocol):
    """What ends with the process: a port over MPI.

    gone: ranks that it has given up.
    """

    gone: set[int]

    def dismiss(self) -> None:
        """Send every rank the order to leave."""

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for what is being sent."""


class MpiJob(Struct):
    """The state of the one job that this process belongs to, `JOB`.

    bell, bell_name: this rank's doorbell, made by `own_bell`.
    neighbours: made by `meet`; None if ranks of this host do not ring each other.
    ports: every port that this process has made.
    """

    bell: Doorbell | None = None
    bell_name: str = ""
    neighbours: Neighbours | None = None
    ports: list[OpenPort] = field(default_factory=list)


JOB = MpiJob()


def world() -> MPI.Comm:
    """Return the communicator of all ranks. Raises ProtocolError without thread support.

    It is not a duplicate: making one is collective, and a rank that dies meanwhile would block the
    others forever. Nothing else in this process uses MPI.
    """
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise ProtocolError(
            "this MPI was started without thread support; pipeinfer needs MPI_THREAD_FUNNELED"
        )
    return MPI.COMM_WORLD


def own_bell() -> Bell:
    """Make this rank's doorbell, for `meet` on all ranks of its host. The name is "" if there is
    none."""
    name = ""
    if JOB.bell is not None:
        return Bell(JOB.bell_name, _host_id())
    if os.environ.get("PIPEINFER_DOORBELL", "1") != "0":
        with contextlib.suppress(OSError, AttributeError):
            wanted = f"pipeinfer-{secrets.token_hex(8)}"
            JOB.bell = Doorbell(wanted)
            JOB.bell_name = name = wanted
    return Bell(name, _host_id())


def meet(bells: Sequence[Bell]) -> None:
    """Store the doorbells of this host's ranks, given those of all ranks.

    They are used only if every rank of this host has one.
    """
    me = MPI.COMM_WORLD.Get_rank()
    near = {rank: bell.name for rank, bell in enumerate(bells)
            if bell.host == bells[me].host}
    if JOB.bell is not None and all(near.values()):
        JOB.bell.drain()
        JOB.bell.rung = 0
        JOB.neighbours = Neighbours(JOB.bell, near)


def _host_id() -> str:
    """Return an id that is equal for processes that see each other's abstract sockets."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    return secrets.token_hex(8)


def survivable() -> bool:
    """Whether the job continues when a rank dies: it was requested, and the library supports it."""
    asked = os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")
    return asked and hasattr(MPI.Comm, "Ack_failed") and "Open MPI" in library_version()


def fatal() -> str:
    """Return why the death of a rank ends the job and how to change that; "" if it does not."""
    if survivable():
        return ""
    library = library_version()
    if "Open MPI" not in library or not hasattr(MPI.Comm, "Ack_failed"):
        return (f"{library} ends the job when a rank dies: with Open MPI 5 it goes on "
                "(docs/mpi.md), or let PIPEINFER_RESTARTS start it again")
    return ("this mpirun ends the job when a rank dies: to go on without that rank, start it after "
            'eval "$(pipeinfer env)", or by launch/run or launch/ssh')


def failed_ranks(comm: MPI.Comm) -> set[int]:
    """Return the ranks that MPI reports as dead."""
    dead = comm.Get_failed()
    return set(MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), comm.Get_group()))


def library_version() -> str:
    """Return the first line of the MPI library's name and version."""
    return MPI.Get_library_version().split("\n")[0].strip(" \x00")
