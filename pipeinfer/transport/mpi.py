"""Nodes as MPI ranks. The only file that imports mpi4py.MPI.

Facts behind the shape (docs/mpi.md): sends are non-blocking and their buffers are kept; one
matched probe for any tag drains everything that has arrived, so a cancellation is never stuck
behind activations and a large message is moved along by its receiver; waiting sleeps in
proportion to the time already waited, which bounds both the latency added and the processor
time burnt; before that it offers the processor to others for a moment. Ranks of one host wake each
other (`doorbell`) and need no polling. This module knows no runs and no models.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from pipeinfer import protocol
from pipeinfer.errors import ProtocolError, TransportTimeout
from pipeinfer.protocol import Message, Tag
from pipeinfer.transport.base import Envelope, Mailbox, Traffic
from pipeinfer.transport.doorbell import Doorbell
from pipeinfer.transport.inproc import LocalPort

_TAGS_PER_NODE = 8
_GATHER_TAG = 2
_PR_SET_TIMERSLACK = 29
_SPIN_SECONDS = 150e-6
_MIN_SLEEP = 30e-6
_SHARE = 0.125
_LIVE_CAP = 1e-3
_IDLE_CAP = 10e-3
_RING_SECONDS = 50e-3  #: how long a ring announces a message
_BELL_CAP = 20e-3  #: between two looks of a rank that is rung for every message


@dataclass(slots=True)
class Layout:
    """Which rank holds which node: `rank_of[node]`."""

    rank_of: tuple[int, ...]

    def local_nodes(self, rank: int) -> list[int]:
        """Nodes of a rank, ascending."""
        return [node for node, owner in enumerate(self.rank_of) if owner == rank]


@dataclass(slots=True, eq=False)
class _Pending:
    """A send that MPI still reads from."""

    request: MPI.Request
    frame: bytes = field(repr=False)


@dataclass(slots=True)
class _House:
    """The ranks of this host and this rank's bell; names[rank] is the bell of a neighbour."""

    bell: Doorbell
    names: dict[int, str]


_house: list[_House] = []  #: at most one per process, made by `world`


class MpiPort:
    """The port of a rank's first node; relays for further nodes of the same rank.

    Every method but `wake` belongs to the thread that initialised MPI.
    """

    def __init__(self, comm: MPI.Comm, layout: Layout) -> None:
        self.comm = comm
        self.traffic = Traffic()
        self._layout = layout
        local = layout.local_nodes(comm.Get_rank())
        self.node = local[0]
        self._mailboxes = {node: Mailbox() for node in local}
        self._own = self._mailboxes[self.node]
        self._pending: deque[_Pending] = deque()
        self._outbox: deque[tuple[int, Tag, bytes]] = deque()
        self._status = MPI.Status()
        self._house = _house[0] if _house else None
        self._all_near = self._house is not None and all(
            rank in self._house.names for rank in layout.rank_of)
        self._received = 0
        crowded = self._house is not None and len(self._house.names) > (os.cpu_count() or 1)
        self._spin = 0.0 if crowded else _SPIN_SECONDS
        self._rung_at = 0.0
        _sharpen_timers()

    @property
    def mailbox(self) -> Mailbox:
        """Where `pump` puts what arrives for this node."""
        return self._own

    def local_port(self, node: int) -> LocalPort:
        """A port for another node of this rank, to be used by a thread of its own."""

        def forward(source: int, dest: int, tag: Tag, frame: bytes) -> None:
            del source
            self._outbox.append((dest, tag, frame))
            self.wake()

        return LocalPort(node, self._mailboxes, forward)

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """See `Port.send`."""
        frame = protocol.encode(message)
        self.traffic.count(tag, len(frame))
        box = self._mailboxes.get(dest)
        if box is not None:
            box.put(self.node, tag, frame)
        else:
            self._isend(dest, tag, frame)

    def take(self, tag: Tag) -> Envelope | None:
        """See `Port.take`."""
        self.pump()
        return self._own.take(tag)

    def wait(self, timeout: float, *, live: bool = True) -> None:
        """See `Port.wait`."""
        start = time.monotonic()
        cap = _LIVE_CAP if live else _IDLE_CAP
        while True:
            self.pump()
            if not self._own.empty or self._own.arrived.is_set():
                self._own.arrived.clear()
                return
            waited = time.monotonic() - start
            if waited >= timeout:
                return
            if waited < self._spin:
                os.sched_yield()
            elif self._house is not None:
                if not self._heard():
                    self._house.bell.sleep(min(self._pause(waited, cap), timeout - waited))
            else:
                pause = min(max(waited * _SHARE, _MIN_SLEEP), cap, timeout - waited)
                self._own.arrived.wait(pause)

    def _heard(self) -> bool:
        """Whether someone rang since the last look at the bell."""
        assert self._house is not None
        bell = self._house.bell
        some = bell.drain()
        bell.rung = max(bell.rung, self._received)  # a ring can be lost, a message can not
        if some:
            self._rung_at = time.monotonic()
        return some

    def _pause(self, waited: float, cap: float) -> float:
        """How long to sleep if nobody rings."""
        assert self._house is not None
        bell = self._house.bell
        if bell.rung > self._received:  # rung for something that MPI still moves
            waited = time.monotonic() - self._rung_at
            if waited > _RING_SECONDS:  # no: its message had been received before the ring
                bell.rung = self._received
        if bell.rung == self._received and self._all_near and not self._pending:
            return _BELL_CAP
        return min(max(waited * _SHARE, _MIN_SLEEP), cap)

    def wake(self) -> None:
        """See `Port.wake`."""
        self._own.arrived.set()
        if self._house is not None:
            self._house.bell.wake()

    def close(self, timeout: float) -> None:
        """See `Port.close`."""
        deadline = time.monotonic() + timeout
        while (self._pending or self._outbox) and time.monotonic() < deadline:
            self.pump()
            time.sleep(_LIVE_CAP)

    def pump(self) -> None:
        """Receive all that has arrived, relay, and forget completed sends."""
        while self._outbox:
            self._isend(*self._outbox.popleft())
        while self._pending and self._pending[0].request.Test():
            self._pending.popleft()
        status = self._status
        while (probe := self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            frame = bytearray(status.Get_count(MPI.BYTE))
            node, tag = divmod(status.Get_tag(), _TAGS_PER_NODE)
            probe.Recv([frame, MPI.BYTE])
            box = self._mailboxes.get(node)
            if box is None:
                raise ProtocolError(
                    f"rank {self.comm.Get_rank()} got a message for node {node} from rank "
                    f"{status.Get_source()}"
                )
            box.put(-1, Tag(tag), frame)
            self._received += 1

    def _isend(self, dest: int, tag: Tag, frame: bytes) -> None:
        request = self.comm.Isend([frame, MPI.BYTE], dest=self._layout.rank_of[dest],
                                  tag=dest * _TAGS_PER_NODE + int(tag))
        self._pending.append(_Pending(request, frame))
        if self._house is not None and (name := self._house.names.get(self._layout.rank_of[dest])):
            self._house.bell.ring(name)


def _sharpen_timers() -> None:
    """Let this thread's sleeps end within a microsecond of their time (Linux adds up to 50)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)


def world() -> MPI.Comm:
    """A duplicate of the world, so that no one else's messages are met. Checks thread support."""
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise ProtocolError(
            "this MPI was started without thread support; pipeinfer needs MPI_THREAD_FUNNELED"
        )
    comm = MPI.COMM_WORLD.Dup()
    if not _house:
        _move_in(comm)
    return comm


def _move_in(comm: MPI.Comm) -> None:
    """Find the ranks of this host and see that each can ring every other.

    Collective, so ranks that were told to go without bells take part and say no.
    """
    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    numbers = np.zeros(near.Get_size() + 1, np.int64)
    mine = np.array([comm.Get_rank()], np.int64)
    near.Allgather(mine, numbers[:-1])
    numbers[-1] = secrets.randbits(62)
    near.Bcast(numbers[-1:], root=0)
    names = {int(rank): f"pipeinfer-{numbers[-1]:x}-{rank}" for rank in numbers[:-1]}
    bell = None
    if os.environ.get("PIPEINFER_DOORBELL", "1") != "0":
        with contextlib.suppress(OSError, AttributeError):
            bell = Doorbell(names[comm.Get_rank()])
    near.Barrier()
    reached = np.array([bell is not None and all(bell.ring(name) for name in names.values())])
    near.Allreduce(MPI.IN_PLACE, reached, MPI.LAND)
    near.Free()
    if bell is not None and reached[0]:
        bell.drain()
        bell.rung = 0
        _house.append(_House(bell, names))
    elif bell is not None:
        bell.close()


def abort(code: int) -> None:
    """End every rank of the job at once, with exit status `code`."""
    MPI.COMM_WORLD.Abort(code)


def library_version() -> str:
    """The MPI library's own name and version, first line."""
    return MPI.Get_library_version().split("\n")[0].strip(" \x00")


def gather_json(comm: MPI.Comm, text: str, timeout: float = 60.0) -> list[str] | None:
    """Every rank's `text` at rank 0 (None elsewhere), without pickle.

    Raises TransportTimeout naming the first rank that has not sent.
    """
    deadline = time.monotonic() + timeout
    if comm.Get_rank() > 0:
        request = comm.Isend([text.encode(), MPI.BYTE], dest=0, tag=_GATHER_TAG)
        _until(request.Test, comm, 0, deadline, timeout, "gather")
        return None
    texts = {0: text}
    for source in range(1, comm.Get_size()):
        status = MPI.Status()
        probes: list[MPI.Message] = []

        def arrived(source: int = source, status: MPI.Status = status,
                    probes: list[MPI.Message] = probes) -> bool:
            probe = comm.Improbe(source, _GATHER_TAG, status)
            probes.extend([] if probe is None else [probe])
            return probe is not None

        _until(arrived, comm, source, deadline, timeout, "gather")
        frame = bytearray(status.Get_count(MPI.BYTE))
        probes[0].Recv([frame, MPI.BYTE])
        texts[source] = frame.decode()
    return [texts[rank] for rank in range(comm.Get_size())]


def send_json(comm: MPI.Comm, dest: int, text: str, timeout: float = 60.0) -> None:
    """A text for `receive_json` at `dest`, outside of any port. Raises TransportTimeout."""
    request = comm.Isend([text.encode(), MPI.BYTE], dest=dest, tag=_GATHER_TAG)
    _until(request.Test, comm, dest, time.monotonic() + timeout, timeout, "start-up")


def receive_json(comm: MPI.Comm, source: int, timeout: float | None) -> str:
    """The next text that `source` sent to this rank; None waits for ever, mostly asleep.

    Raises TransportTimeout.
    """
    status, start = MPI.Status(), time.monotonic()
    while (probe := comm.Improbe(source, _GATHER_TAG, status)) is None:
        waited = time.monotonic() - start
        if timeout is not None and waited > timeout:
            raise TransportTimeout(rank=comm.Get_rank(), peer=source, tag="start-up", run_id=None,
                                   seconds=timeout)
        time.sleep(min(max(waited * _SHARE, _MIN_SLEEP), 2 * _IDLE_CAP))
    frame = bytearray(status.Get_count(MPI.BYTE))
    probe.Recv([frame, MPI.BYTE])
    return frame.decode()


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link: one-way latency of 4 KiB in seconds, bandwidth of 1 MiB in bytes/s."""

    source: int
    dest: int
    latency: float
    bandwidth: float


def measure_links(comm: MPI.Comm, timeout: float = 20.0) -> list[Link]:
    """Collective: every rank bounces messages with its successor; a rank returns its own link.

    Raises TransportTimeout naming the neighbour that does not answer.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    links = []
    for first in range(size - 1):
        if rank == first:
            small = _bounce(comm, first + 1, 4096, 50, timeout, leads=True)
            large = _bounce(comm, first + 1, 1 << 20, 6, timeout, leads=True)
            links.append(Link(first, first + 1, small / 2, (1 << 20) / (large / 2)))
        elif rank == first + 1:
            _bounce(comm, first, 4096, 50, timeout, leads=False)
            _bounce(comm, first, 1 << 20, 6, timeout, leads=False)
    return links


def _bounce(comm: MPI.Comm, peer: int, size: int, rounds: int, timeout: float, *, leads: bool
            ) -> float:
    """The median round trip in seconds."""
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


def _until(
    test: Callable[[], bool], comm: MPI.Comm, peer: int, deadline: float, timeout: float,
    what: str,
) -> None:
    spins = 0
    while not test():
        if time.monotonic() > deadline:
            raise TransportTimeout(rank=comm.Get_rank(), peer=peer, tag=what, run_id=None,
                                   seconds=timeout)
        spins += 1
        if spins > 50:
            time.sleep(_MIN_SLEEP)
