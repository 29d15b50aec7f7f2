"""Messages between ranks before there is a port, and the measurement of the links."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from mpi4py import MPI
from msgspec import Struct

from pipeinfer.core.control import Leave, Placed, Refused, StartMessage, pack, unpack
from pipeinfer.errors import (
    ClusterError,
    ProtocolError,
    RankLost,
    RankRefused,
    TransportTimeout,
)
from pipeinfer.transport.base import Dismissed
from pipeinfer.transport.mpi_job import (
    DEATH,
    IDLE_CAP,
    MIN_SLEEP,
    ORDER_TAG,
    SHARE,
    meet,
    own_bell,
)
from pipeinfer.waiting import unless_within

_GRACE = 5.0  #: seconds beyond the deadline of a send, in which MPI returns
_LEAVE = pack(Leave())
_REFUSAL = b'{"type":"Refused",'


def introduce(comm: MPI.Comm) -> None:
    """Exchange doorbells, for programs whose start-up does not do so in another message."""
    mine = Placed((), None, (own_bell(),))
    texts = gather_json(comm, pack(mine).decode())
    if texts is None:
        placed = hear(comm, 0, 60.0)
    else:
        bells = [one.bells[0] for text in texts if isinstance(one := unpack(text.encode()), Placed)]
        placed = Placed((), None, tuple(bells))
        for rank in range(1, comm.Get_size()):
            say(comm, rank, placed)
    assert isinstance(placed, Placed)
    meet(placed.bells)


def gather_json(comm: MPI.Comm, text: str, timeout: float = 60.0, *,
                instead: str | None = None) -> list[str] | None:
    """Collect every rank's `text` at rank 0; return None elsewhere. No pickle is used.

    timeout: seconds for all of them.
    instead: the text that stands for a dead rank; None: raise RankLost.
    Raises TransportTimeout or RankLost with the first rank that has not sent, RankRefused for a
    rank that takes no part.
    """
    deadline = time.monotonic() + timeout
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
    found[0].Recv([frame, MPI.BYTE])
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
    for rank in range(1, comm.Get_size()):
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
    while True:
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
        if spins > 50:
            time.sleep(min(max((now - start) * SHARE, MIN_SLEEP), IDLE_CAP))
