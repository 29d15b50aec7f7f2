"""Nodes as MPI ranks.

The design follows from these facts (docs/mpi.md). Sends and receives do not block, and their
buffers are kept until they are done. One matched probe for any tag receives everything that has
arrived, so a cancellation never waits behind activations, and a large message progresses because
its receiver polls. A wait first yields the processor for a moment, then sleeps in proportion to
the time already waited, which bounds both the added latency and the CPU time. Ranks of one host
wake each other (`doorbell`) and need not poll.

Where the MPI library survives the death of a rank (ULFM), dead ranks are recorded and nothing is
sent to them any more. The communicator is neither revoked nor shrunk: both wait for every rank,
also for one that hangs. A new epoch (`transport.base`) serves instead, and is in the tag:

    tag = (epoch * 1024 + node) * 8 + kind      from rank to rank, of no epoch: 7 an order, 6 a post

This module has no runs and no models.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from mpi4py import MPI

from pipeinfer.core import codec
from pipeinfer.core.control import Leave, NewEpoch, Order, Rehearse, pack, unpack
from pipeinfer.core.messages import Message, Tag
from pipeinfer.errors import ClusterError, ProtocolError
from pipeinfer.transport.base import Dismissed, Envelope, Layout, Mailbox, Regrouped, Traffic
from pipeinfer.transport.inproc import LocalPort
from pipeinfer.transport.mpi_job import (
    DEATH,
    IDLE_CAP,
    JOB,
    MIN_SLEEP,
    ORDER_TAG,
    POST_TAG,
    SHARE,
    Neighbours,
    failed_ranks,
)

_TAGS_PER_NODE = 8
_MAX_NODES = 1024
_PR_SET_TIMERSLACK = 29
_SPIN_SECONDS = 150e-6
_LIVE_CAP = 1e-3
_RING_SECONDS = 50e-3  #: how long a ring announces a message
_BELL_CAP = 20e-3  #: between two polls of a rank that is rung for every message


@dataclass(slots=True, eq=False)
class _Pending:
    """A send that MPI still reads from, or a receive that it still writes to."""

    request: MPI.Request
    rank: int
    tag: int
    frame: bytes | bytearray = field(repr=False)


class MpiPort:
    """The port of a rank's first node; relays for further nodes of the same rank.

    A rank without a node has node -1 and receives only orders and posts. Every method but `wake`
    belongs to the thread that initialised MPI.

    gone: ranks that are dead by MPI, or given up by rank 0 or for lack of heartbeats.
    silent: returns the ranks whose heartbeats have stopped.
    """

    def __init__(self, comm: MPI.Comm, layout: Layout) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.traffic = Traffic()
        self.gone: set[int] = set()
        self._order: Order | None = None
        self._posts: deque[tuple[int, bytes | bytearray]] = deque()
        self.silent: Callable[[], set[int]] = set  # ranks whose heartbeats have stopped
        self.node = -1
        self._layout = layout
        self._own = Mailbox(layout.epoch)
        self._mailboxes: dict[int, Mailbox] = {}
        self._local: list[LocalPort] = []
        self._pending: deque[_Pending] = deque()
        self._arriving: dict[int, deque[_Pending]] = {}
        self._buried: list[_Pending] = []  # of ranks that may still touch their buffers
        self._later: list[tuple[int, int, bytes | bytearray]] = []
        self._outbox: deque[tuple[int, Tag, bytes, int]] = deque()
        self._called: Layout | None = None
        self._encoded: tuple[Message | None, bytes] = None, b""
        self._dismissed = False
        self._noticed: set[int] = set()
        self._status = MPI.Status()
        self._neighbours: Neighbours | None = JOB.neighbours
        self._all_near = False
        self._received = 0
        near = 0 if self._neighbours is None else len(self._neighbours.names)
        crowded = near > (os.cpu_count() or 1)
        self._spin = 0.0 if crowded else _SPIN_SECONDS
        self._rung_at = 0.0
        _sharpen_timers()
        self._move_to(layout)
        JOB.ports.append(self)

    @property
    def mailbox(self) -> Mailbox:
        """Where `pump` puts what arrives for this node."""
        return self._own

    def local_port(self, node: int) -> LocalPort:
        """Return a port for another node of this rank, to be used by a thread of its own."""

        def forward(dest: int, tag: Tag, frame: bytes, epoch: int) -> None:
            self._outbox.append((dest, tag, frame, epoch))
            self.wake()

        port = LocalPort(node, self._mailboxes, forward, self.wake, rank_of=self.rank_of)
        self._local.append(port)
        return port

    @property
    def layout(self) -> Layout:
        """The layout of the epoch that this port has entered."""
        return self._layout

    def rank_of(self, node: int) -> int:
        """Return the rank that has a node in this epoch."""
        return self._layout.rank_of[node] if 0 <= node < len(self._layout.rank_of) else 0

    def order(self, rank: int, order: Order) -> None:
        """Rank 0: send a rank an order, which belongs to no epoch; it arrives if the rank lives."""
        if rank not in self.gone:
            self._post(rank, ORDER_TAG, pack(order))

    def post(self, rank: int, message: Message) -> None:
        """Send a rank a message that belongs to no epoch; it arrives, in order, if the rank
        lives."""
        self._post(rank, POST_TAG, codec.encode(message))

    def take_post(self) -> tuple[int, Message] | None:
        """Return the oldest message of no epoch that has arrived and the rank that sent it, or
        None."""
        self.pump()
        if not self._posts:
            return None
        rank, frame = self._posts.popleft()
        return rank, codec.decode(frame)

    def regroup(self, layout: Layout, given_up: Collection[int]) -> None:
        """Rank 0: begin an epoch. A given-up rank that resumes receives the order to leave."""
        for rank in set(given_up) - self.gone:
            self.order(rank, Leave())
        self.give_up(given_up)
        self._noticed |= set(given_up)  # the caller named them: not to be reported as new losses
        for rank in range(1, self.comm.Get_size()):
            self.order(rank, NewEpoch(layout.rank_of, layout.epoch, tuple(sorted(self.gone))))
        self._move_to(layout)
        # last: a node of this rank that adopts the epoch needs the mailboxes of `_move_to`
        for port in self._local:
            port.call(layout.epoch)

    def adopt(self) -> None:
        """Enter the newest epoch; `node` becomes this port's node there."""
        if self._called is not None:
            layout, self._called = self._called, None
            self._move_to(layout)

    def new_losses(self) -> set[int]:
        """Return the ranks that were found dead since the last call."""
        silent = self.silent() - self.gone
        for rank in silent:  # a suspended rank receives the order when it resumes
            self.order(rank, Leave())
        self.give_up(silent)
        fresh = self.gone - self._noticed
        self._noticed |= fresh
        return fresh

    def take_order(self) -> Order | None:
        """Return the newest order to this rank that the transport does not handle itself, or
        None."""
        order, self._order = self._order, None
        return order

    def dismiss(self) -> None:
        """Send every other rank the order to leave."""
        for rank in range(self.comm.Get_size()):
            if rank != self.rank:
                self.order(rank, Leave())

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""
        box = self._mailboxes.get(dest)
        if box is not None:
            self.traffic.count(tag, 0)
            box.put(self.node, tag, message, self._layout.epoch)
            return
        if message is not self._encoded[0]:  # members get the same one
            self._encoded = message, codec.encode(message)
        self.traffic.count(tag, len(self._encoded[1]))
        self._isend(dest, tag, self._encoded[1])

    def take(self, tag: Tag) -> Envelope | None:
        """Return the oldest message of `tag`, or None. Raises ClusterError when rank 0 is dead."""
        self.pump()
        # before the mailbox: messages of an epoch that has ended must not be acted on
        if self._dismissed:
            raise Dismissed
        if self._called is not None:
            raise Regrouped
        return self._own.take(tag)

    def wait(self, timeout: float, *, live: bool = True, tag: Tag | None = None) -> None:
        """Sleep until a message arrives, `wake` is called or `timeout` seconds have passed."""
        start = time.monotonic()
        cap = _LIVE_CAP if live else IDLE_CAP
        while True:  # MPI cannot wake a thread, so it is polled, ever less often
            self.pump()
            rung = self._own.arrived.is_set()
            if rung:  # cleared before the look below: what comes behind it ends the sleep
                self._own.arrived.clear()
            if self._own.has(tag) or (rung and tag is None) or self._has_orders:
                return
            waited = time.monotonic() - start
            if waited >= timeout:
                return
            if waited < self._spin:  # a neighbour's reply comes sooner than a sleep ends
                os.sched_yield()
            elif self._neighbours is not None:
                if not self._heard():
                    self._neighbours.bell.sleep(min(self._pause(waited, cap), timeout - waited))
            else:
                pause = min(max(waited * SHARE, MIN_SLEEP), cap, timeout - waited)
                self._own.arrived.wait(pause)

    def _heard(self) -> bool:
        """Whether a ring has arrived since the last call."""
        assert self._neighbours is not None
        bell = self._neighbours.bell
        some = bell.drain()
        bell.rung = max(bell.rung, self._received)  # a ring can be lost, a message cannot
        if some:
            self._rung_at = time.monotonic()
        return some

    def _pause(self, waited: float, cap: float) -> float:
        """Return how long to sleep unless a ring arrives."""
        assert self._neighbours is not None
        bell = self._neighbours.bell
        if bell.rung > self._received:  # rung for something that MPI still moves
            waited = time.monotonic() - self._rung_at
            if waited > _RING_SECONDS:  # no: its message had been received before the ring
                bell.rung = self._received
        if bell.rung == self._received and self._all_near and not self._pending:
            return _BELL_CAP  # whoever sends rings; polled all the same, as a ring may be lost
        return min(max(waited * SHARE, MIN_SLEEP), cap)

    def wake(self) -> None:
        """End a `wait`; the only method that other threads may call."""
        self._own.arrived.set()
        if self._neighbours is not None:
            self._neighbours.bell.wake()

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for queued sends to leave."""
        deadline = time.monotonic() + timeout  # a rank that hangs never takes what it is sent
        while (self._pending or self._outbox) and time.monotonic() < deadline:
            self.pump()
            time.sleep(_LIVE_CAP)

    def pump(self) -> None:
        """Receive all that has arrived, relay, and release the buffers of completed sends.

        Raises ClusterError when rank 0 is dead.
        """
        while self._outbox:  # filled by other threads, which must not call MPI
            dest, tag, relayed, epoch = self._outbox.popleft()
            if epoch == self._layout.epoch:
                self._isend(dest, tag, relayed)
        # the oldest alone is tested: sends end roughly in order, and each test costs a call of MPI
        while self._pending and self._done(first := self._pending[0]):
            if self._pending and self._pending[0] is first:  # else its rank has just been given up
                self._pending.popleft()
        for rank in list(self._arriving):
            self._collect(rank)
        status = self._status
        # until nothing is left: a cancellation may lie behind activations
        while (probe := self._probe(status)) is not None:
            frame = bytearray(status.Get_count(MPI.BYTE))
            rank = status.Get_source()
            arriving = self._arriving.setdefault(rank, deque())
            arriving.append(_Pending(probe.Irecv([frame, MPI.BYTE]), rank, status.Get_tag(), frame))
            self._received += 1
            self._collect(rank)

    # --- messages -----------------------------------------------------------------------------

    def _probe(self, status: MPI.Status) -> MPI.Message | None:
        while True:  # an error reports deaths; the probe is repeated once they are acknowledged
            try:
                return self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            except MPI.Exception as error:
                self._note_deaths(error)

    def _done(self, pending: _Pending) -> bool:
        """Whether MPI has finished with it, successfully or not."""
        try:
            return bool(pending.request.Test())
        except MPI.Exception as error:
            self._note_deaths(error)
            pending.tag = -1
            return True

    def _collect(self, rank: int) -> None:
        """Deliver the messages of a rank that have arrived completely, in order."""
        arriving = self._arriving.get(rank)
        # in the order of sending: a short message may be complete before a long one ahead of it
        while arriving and self._done(arriving[0]):
            pending = arriving.popleft()
            if pending.tag >= 0 and rank not in self.gone:
                self._deliver(rank, pending.tag, pending.frame)
        if not arriving:
            self._arriving.pop(rank, None)

    def _deliver(self, rank: int, tag: int, frame: bytes | bytearray) -> None:
        if tag == ORDER_TAG:
            self._hear(rank, frame)
            return
        if tag == POST_TAG:
            self._posts.append((rank, frame))
            self._own.arrived.set()
            return
        place, kind = divmod(tag, _TAGS_PER_NODE)
        epoch, node = divmod(place, _MAX_NODES)
        if epoch > self._layout.epoch:  # its sender has heard of the epoch first
            self._later.append((rank, tag, frame))
            return
        if epoch < self._layout.epoch:
            return
        box = self._mailboxes.get(node)
        if box is None:
            raise ProtocolError(
                f"rank {self.rank} got a message for node {node} from rank {rank}")
        box.put(-1, Tag(kind), frame, epoch)

    def _hear(self, rank: int, frame: bytes | bytearray) -> None:
        """Handle an order; only rank 0 sends any."""
        order = unpack(frame)
        if rank != 0 or not isinstance(order, Order):
            raise ProtocolError(f"rank {self.rank} got the unexpected order {type(order).__name__} "
                                f"from rank {rank}")
        match order:
            case Leave():
                self._dismissed = True
            case Rehearse():
                self._order = order
            case NewEpoch(rank_of, epoch, lost):
                self._call(Layout(rank_of, epoch), lost)

    def _call(self, layout: Layout, lost: Collection[int]) -> None:
        """Record the new epoch that rank 0 has begun."""
        self.give_up(lost)
        if layout.epoch > (self._called or self._layout).epoch:
            self._called = layout

    def _isend(self, dest: int, tag: Tag, frame: bytes) -> None:
        place = self._layout.epoch * _MAX_NODES + dest
        self._post(self._layout.rank_of[dest], place * _TAGS_PER_NODE + int(tag), frame)

    def _post(self, rank: int, tag: int, frame: bytes) -> None:
        if rank in self.gone:
            return
        try:
            request = self.comm.Isend([frame, MPI.BYTE], dest=rank, tag=tag)
        except MPI.Exception as error:
            self._note_deaths(error)
            return
        self._pending.append(_Pending(request, rank, tag, frame))
        if self._neighbours is not None and (name := self._neighbours.names.get(rank)):
            self._neighbours.bell.ring(name)

    # --- epochs and the dead ------------------------------------------------------------------

    @property
    def _has_orders(self) -> bool:
        news = self.rank == 0 and not self.gone <= self._noticed
        return news or self._dismissed or self._called is not None

    def _move_to(self, layout: Layout) -> None:
        """Enter an epoch: replace the mailboxes, and deliver messages that came early for it."""
        self._layout = layout
        nodes = layout.local_nodes(self.rank)
        boxes = {node: self._mailboxes.get(node) or Mailbox(layout.epoch) for node in nodes[1:]}
        self._mailboxes.clear()  # changed in place: the local ports have this very dict
        self._mailboxes.update({node: self._own for node in nodes[:1]} | boxes)
        self.node = nodes[0] if nodes else -1
        self._own.enter(layout.epoch)
        self._all_near = self._neighbours is not None and all(
            rank in self._neighbours.names for rank in layout.rank_of)
        later, self._later = self._later, []
        for rank, tag, frame in later:
            self._deliver(rank, tag, frame)

    def _note_deaths(self, error: MPI.Exception) -> None:
        """Record the ranks that have died. Raises ClusterError for an error of another kind."""
        if error.Get_error_class() not in DEATH:
            raise ClusterError(f"rank {self.rank}: {error.Get_error_string()}") from error
        self.comm.Ack_failed()  # first: until then every probe of any source fails again
        self.give_up(failed_ranks(self.comm))

    def give_up(self, ranks: Iterable[int]) -> None:
        """Stop all communication with these ranks.

        Their buffers are kept: MPI may still use those of a rank that hangs. Raises ClusterError
        if rank 0 is among them.
        """
        self.gone |= set(ranks)
        if 0 in self.gone and self.rank != 0:
            raise ClusterError("rank 0 is dead, so the job cannot go on: start it again")
        if not self.gone:
            return
        for pending in [one for one in self._pending if one.rank in self.gone]:
            self._pending.remove(pending)
            self._buried.append(pending)
        for rank in self.gone & set(self._arriving):
            self._buried += self._arriving.pop(rank)


def _sharpen_timers() -> None:
    """Let this thread's sleeps end within a microsecond of their time (Linux adds up to 50)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)
