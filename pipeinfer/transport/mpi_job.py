"""What this process knows of its MPI job: the communicator, neighbours' bells, ports and losses."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI
from msgspec import Struct, field

from pipeinfer.core.control import Bell
from pipeinfer.errors import ProtocolError
from pipeinfer.transport.doorbell import Doorbell

if TYPE_CHECKING:
    from pipeinfer.transport.mpi import MpiPort


ORDER_TAG = 7  #: from rank to rank, of node 0 and epoch 0
POST_TAG = 6  #: likewise, what ranks that only draft hear and say
MIN_SLEEP, IDLE_CAP = 30e-6, 10e-3  #: seconds of one sleep while waiting for MPI
SHARE = 0.125  #: of the time already waited that the next sleep takes
DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class Neighbours(Struct):
    """The ranks of this host and this rank's bell; names[rank] is the bell of a neighbour."""

    bell: Doorbell
    names: dict[int, str]


class MpiJob(Struct):
    """What one process keeps of the job it belongs to; there is one, `JOB`.

    bell, bell_name: this rank's doorbell, made by `own_bell`. neighbours: made by `meet`, None
    where ranks of this host do not ring each other. ports: every port that this process has made.
    """

    bell: Doorbell | None = None
    bell_name: str = ""
    neighbours: Neighbours | None = None
    ports: list[MpiPort] = field(default_factory=list)


JOB = MpiJob()


def world() -> MPI.Comm:
    """The communicator of all ranks. Checks thread support.

    Not a duplicate: making one is collective, and a rank that dies meanwhile would hold up the rest
    for ever. Nobody else in this process uses MPI.
    """
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise ProtocolError(
            "this MPI was started without thread support; pipeinfer needs MPI_THREAD_FUNNELED"
        )
    return MPI.COMM_WORLD


def own_bell() -> Bell:
    """Make this rank's doorbell, for `meet` at all ranks of its host. name: empty without one."""
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
    """Learn every rank's bell. Ranks of one host ring each other only where all of them have one.
    """
    me = MPI.COMM_WORLD.Get_rank()
    near = {rank: bell.name for rank, bell in enumerate(bells)
            if bell.host == bells[me].host}
    if JOB.bell is not None and all(near.values()):
        JOB.bell.drain()
        JOB.bell.rung = 0
        JOB.neighbours = Neighbours(JOB.bell, near)


def _host_id() -> str:
    """The same for processes that see each other's abstract sockets."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    return secrets.token_hex(8)


def survivable() -> bool:
    """Whether the job goes on when a rank dies: asked for, and known to the library."""
    asked = os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")
    return asked and hasattr(MPI.Comm, "Ack_failed") and "Open MPI" in library_version()


def fatal() -> str:
    """Why the death of a rank ends the job, and what to do about it; empty where it does not."""
    if survivable():
        return ""
    library = library_version()
    if "Open MPI" not in library or not hasattr(MPI.Comm, "Ack_failed"):
        return (f"{library} ends the job when a rank dies: with Open MPI 5 it goes on "
                "(docs/mpi.md), or let PIPEINFER_RESTARTS start it again")
    return ("this mpirun ends the job when a rank dies: to go on without that rank, start it after "
            'eval "$(pipeinfer env)", or by launch/run or launch/ssh')


def failed_ranks(comm: MPI.Comm) -> set[int]:
    """Ranks that MPI knows to be dead."""
    dead = comm.Get_failed()
    return set(MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), comm.Get_group()))


def library_version() -> str:
    """The MPI library's own name and version, first line."""
    return MPI.Get_library_version().split("\n")[0].strip(" \x00")
