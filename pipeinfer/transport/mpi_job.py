"""This process's MPI job, but for its ports: communicator, doorbells and losses; messages between
ranks before there is a port, and the measurement of links; abort, sign-off and exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn, Protocol

from mpi4py import MPI
from msgspec import Struct, field

from pipeinfer.core.control import Bell, Leave, Refused, StartMessage, pack, unpack
from pipeinfer.errors import ClusterError, ProtocolError, RankLost, RankRefused, TransportTimeout
from pipeinfer.transport.base import Dismissed
from pipeinfer.transport.doorbell import Doorbell
from pipeinfer.waiting import unless_within

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


_GRACE = 5.0  #: seconds beyond the deadline of a send, in which MPI returns
_LEAVE = pack(Leave())
_REFUSAL = b'{"type":"Refused",'


def gather_json(comm: MPI.Comm, text: str, timeout: float = 60.0, *,
                instead: str | None = None) -> list[str] | None:
    """Collect every rank's `text` at rank 0; return None elsewhere. No pickle is used.

    timeout: seconds for all of them.
    instead: the text that stands for a dead rank; None: raise RankLost.
    Raises TransportTimeout or RankLost with the first rank that has not sent, RankRefused for a
    rank that takes no part.
    """
    deadline = time.monotonic() + timeout  # one for all: the ranks start at the same time
    if comm.Get_rank() > 0:
        with _bounded(timeout + _GRACE, comm.Get_rank(), 0):
            request = comm.Isend([text.encode(), MPI.BYTE], dest=0, tag=ORDER_TAG)
        _until(request.Test, comm, 0, deadline, timeout, "gather")
        return None
    texts = [text]
    for source in range(1, comm.Get_size()):
        try:
            texts.append(receive_json(comm, source, max(deadline - time.monotonic(), 0.0)))
        except RankLost:
            if instead is None:
                raise
            texts.append(instead)
    return texts


def send_json(comm: MPI.Comm, dest: int, text: str, timeout: float = 60.0) -> None:
    """Send a text to `receive_json` at `dest`, before there is a port.

    Raises TransportTimeout, RankLost. Ends this process if MPI itself does not return.
    """
    with _bounded(timeout + _GRACE, comm.Get_rank(), dest):
        request = comm.Isend([text.encode(), MPI.BYTE], dest=dest, tag=ORDER_TAG)
    _until(request.Test, comm, dest, time.monotonic() + timeout, timeout, "start-up")


def receive_json(comm: MPI.Comm, source: int, timeout: float) -> str:
    """Return the next text that `source` has sent to this rank.

    Raises TransportTimeout, RankLost, RankRefused, and Dismissed for the order to leave.
    """
    status, start = MPI.Status(), time.monotonic()
    found: list[MPI.Message] = []

    def arrived() -> bool:
        probe = comm.Improbe(source, ORDER_TAG, status)
        found.extend([] if probe is None else [probe])
        return probe is not None

    _until(arrived, comm, source, start + timeout, timeout, "start-up")
    frame = bytearray(status.Get_count(MPI.BYTE))
    found[0].Recv([frame, MPI.BYTE])  # what was matched has arrived: this does not block
    if source == 0 and frame == _LEAVE:
        raise Dismissed
    if frame.startswith(_REFUSAL):
        no = unpack(frame)
        assert isinstance(no, Refused)
        raise RankRefused(no.rank, no.host, no.reason, no.exit_code)
    return frame.decode()


def refuse(comm: MPI.Comm, message: Refused, timeout: float) -> None:
    """Send rank 0 the reason why this rank takes no part, and wait until rank 0 ends the job.

    For ranks without a port yet. Raises Dismissed when rank 0 has ended the job. Returns if rank 0
    is dead or does nothing for `timeout` seconds, so that this rank has to print the reason.
    """
    deadline = time.monotonic() + timeout
    with contextlib.suppress(ClusterError):
        say(comm, 0, message, timeout)
        while (left := deadline - time.monotonic()) > 0:
            receive_json(comm, 0, left)  # an order to measure may be on its way


def say(comm: MPI.Comm, dest: int, message: StartMessage, timeout: float = 60.0) -> None:
    """Send a message to `hear` at `dest`, before there is a port. Raises TransportTimeout,
    RankLost."""
    send_json(comm, dest, pack(message).decode(), timeout)


def hear(comm: MPI.Comm, source: int, timeout: float) -> StartMessage:
    """Return the next message that `source` has sent to this rank.

    Raises TransportTimeout, RankLost, ProtocolError, and Dismissed for the order to leave.
    """
    message = unpack(receive_json(comm, source, timeout).encode())
    if not isinstance(message, StartMessage):
        raise ProtocolError(f"rank {source} sent {type(message).__name__} before the job had "
                            "started")
    return message


class MeasuredLink(Struct, frozen=True):
    """A measured link: one-way latency of 4 KiB in seconds, bandwidth of 1 MiB in bytes/s."""

    source: int
    dest: int
    latency: float
    bandwidth: float


def dismiss(comm: MPI.Comm, timeout: float = 60.0, *, heard: bool = False) -> bool:
    """Rank 0: send every other rank the order to leave; return whether all could be reached.

    timeout: seconds for all together.
    heard: wait until each has received the order. It is for a rank 0 that exits at once: its
        messages may be lost with it, and a rank that has just left MPI_Init does not detect a
        death before that, so it would wait for the dead rank until its deadline.
    """
    told, deadline = True, time.monotonic() + timeout
    send = comm.Issend if heard else comm.Isend
    requests = {}
    for rank in range(1, comm.Get_size()):  # all before any wait: a dead rank delays no other
        try:
            with _bounded(timeout + _GRACE, 0, rank):
                requests[rank] = send([_LEAVE, MPI.BYTE], dest=rank, tag=ORDER_TAG)
        except MPI.Exception as error:
            if error.Get_error_class() not in DEATH:
                raise
            told = False
    for rank, request in requests.items():
        try:
            _until(request.Test, comm, rank, deadline, timeout, "start-up")
        except (TransportTimeout, RankLost):
            told = False
    return told


def await_dismissal(comm: MPI.Comm, timeout: float = 20.0) -> None:
    """Ranks above 0: wait for `dismiss`, at most `timeout` seconds."""
    with contextlib.suppress(Dismissed, TransportTimeout, RankLost):
        receive_json(comm, 0, timeout)


def measure_links(comm: MPI.Comm, timeout: float = 20.0) -> list[MeasuredLink]:
    """Measure the links between neighbouring ranks; all ranks call this together.

    Returns this rank's own link. Raises TransportTimeout with the neighbour that does not answer.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    links = []
    for first in range(size - 1):
        if rank == first:
            small = _bounce(comm, first + 1, 4096, 50, timeout, leads=True)
            large = _bounce(comm, first + 1, 1 << 20, 6, timeout, leads=True)
            links.append(MeasuredLink(first, first + 1, small / 2, (1 << 20) / (large / 2)))
        elif rank == first + 1:
            _bounce(comm, first, 4096, 50, timeout, leads=False)
            _bounce(comm, first, 1 << 20, 6, timeout, leads=False)
    return links


def _bounce(comm: MPI.Comm, peer: int, size: int, rounds: int, timeout: float, *, leads: bool
            ) -> float:
    """Return the median round trip in seconds."""
    frame, times = bytearray(size), []
    deadline = time.monotonic() + timeout
    for turn in range(2 * rounds):
        start = time.perf_counter()
        if (turn % 2 == 0) == leads:
            request = comm.Isend([frame, MPI.BYTE], dest=peer, tag=1)
            _until(request.Test, comm, peer, deadline, timeout, "link test")
        else:
            request = comm.Irecv([frame, MPI.BYTE], source=peer, tag=1)
            _until(request.Test, comm, peer, deadline, timeout, "link test")
        times.append(time.perf_counter() - start)
    pairs = sorted(a + b for a, b in zip(times[::2], times[1::2], strict=True))
    return pairs[len(pairs) // 2]


def _bounded(seconds: float, rank: int, peer: int) -> AbstractContextManager[None]:
    """Return a context that ends this process where it takes longer.

    Open MPI may block for ever in the first message to a rank that has just died, over a slow link.
    """
    def end() -> None:
        sys.stderr.write(f"pipeinfer: error: rank {rank} could not send to rank {peer} in "
                         f"{seconds:.0f} s while the job was starting: that rank has probably "
                         "died; start the job again\n")
        sys.stderr.flush()
        os._exit(ClusterError.exit_code)

    return unless_within(seconds, end)


def _until(
    test: Callable[[], bool], comm: MPI.Comm, peer: int, deadline: float, timeout: float,
    what: str,
) -> None:
    start, spins = time.monotonic(), 0
    while True:  # MPI has no wait with a deadline
        try:
            if test():
                return
        except MPI.Exception as error:
            if error.Get_error_class() not in DEATH:
                raise
            raise RankLost(peer, "died while the job was starting") from None
        if (now := time.monotonic()) > deadline:
            raise TransportTimeout(rank=comm.Get_rank(), peer=peer, tag=what, run_id=None,
                                   seconds=timeout)
        spins += 1
        if spins > 50:  # an answer of the same host comes within some polls
            time.sleep(min(max((now - start) * SHARE, MIN_SLEEP), IDLE_CAP))


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
