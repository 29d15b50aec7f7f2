"""The interface between nodes: ports that carry messages, in order per (sender, receiver, tag).

A *node* is the head (0) or a stage (1..N); the transport maps nodes to processes. Ports have no
notion of runs, models or policies. A send never blocks and keeps its buffer until the bytes have
left; a receive never blocks either: `wait` sleeps until a message may have arrived.

The mapping of nodes to ranks may change while a job runs. Each mapping is an *epoch*. A frame
belongs to the epoch in which it was sent; frames of earlier epochs are dropped, frames of later
ones wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection
from typing import Protocol, TypeAlias

from msgspec import Struct, field

from pipeinfer.core import codec
from pipeinfer.core.control import Order
from pipeinfer.core.messages import Message, Tag


class Regrouped(Exception):
    """The head has begun an epoch: messages under way on this port are void."""


class Dismissed(Exception):
    """This process is to leave: the job continues, or ends, without it."""


class Layout(Struct, frozen=True):
    """The mapping of nodes to ranks in one epoch: `rank_of[node]`."""

    rank_of: tuple[int, ...]
    epoch: int = 0

    def local_nodes(self, rank: int) -> list[int]:
        """Return the nodes of a rank, ascending."""
        return [node for node, owner in enumerate(self.rank_of) if owner == rank]


class Envelope(Struct, frozen=True):
    """A received message and the node that sent it (-1 if the transport does not provide it)."""

    source: int
    message: Message
    n_bytes: int


class Traffic(Struct):
    """The messages and bytes that a port has sent, per tag."""

    messages: dict[Tag, int] = field(default_factory=dict)
    n_bytes: dict[Tag, int] = field(default_factory=dict)

    def count(self, tag: Tag, size: int) -> None:
        """Count one message of `size` bytes."""
        self.messages[tag] = self.messages.get(tag, 0) + 1
        self.n_bytes[tag] = self.n_bytes.get(tag, 0) + size

    @property
    def total_bytes(self) -> int:
        """The bytes sent over all tags."""
        return sum(self.n_bytes.values())


class Port(Protocol):
    """The interface by which one node exchanges messages with the others.

    `take` and `wait` raise Regrouped from the moment a new epoch arrives until `adopt` is called,
    and Dismissed when the process is to leave.
    """

    node: int
    traffic: Traffic

    def rank_of(self, node: int) -> int:
        """Return the rank that has a node in this epoch. Messages carry nodes, errors ranks."""

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""

    def take(self, tag: Tag) -> Envelope | None:
        """Return the oldest message of `tag` that has arrived, or None."""

    def adopt(self) -> None:
        """Enter the newest epoch; `node` becomes this port's node there."""

    @property
    def gone(self) -> set[int]:
        """The ranks that are dead or were given up."""

    def order(self, rank: int, order: Order) -> None:
        """Rank 0: send a rank an order, which belongs to no epoch; it arrives if the rank lives."""

    def regroup(self, layout: Layout, given_up: Collection[int]) -> None:
        """Rank 0: begin an epoch. Every rank receives the layout, and this port enters it.

        given_up: ranks that the job continues without.
        """

    def take_order(self) -> Order | None:
        """Return the newest order to this rank that the transport does not handle itself (as it
        does NewEpoch and Leave), or None."""

    def post(self, rank: int, message: Message) -> None:
        """Send a rank a message that belongs to no epoch; it arrives, in order, if the rank
        lives."""

    def take_post(self) -> tuple[int, Message] | None:
        """Return the oldest message of no epoch that has arrived and the rank that sent it, or
        None."""

    def new_losses(self) -> set[int]:
        """Return the ranks that were found dead since the last call."""

    def wait(self, timeout: float, *, live: bool = True, tag: Tag | None = None) -> None:
        """Sleep until a message arrives, `wake` is called or `timeout` seconds have passed.

        live: whether a message is expected soon, so that MPI is polled often; else the CPU is
            spared.
        tag: if given, neither messages of other tags nor `wake` end the wait.
        """

    def wake(self) -> None:
        """End a `wait`; the only method that other threads may call."""

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for queued sends to leave."""


class Wakeup:
    """A `threading.Event` that is safe to `set` in a signal handler. (An Event blocks forever if
    the handler interrupts the thread that uses it.) Only one thread may wait and clear."""

    def __init__(self) -> None:
        self._is_set = False
        # Locked unless set, because release is reentrant. SimpleQueue is reentrant too, but its
        # `get` may wait forever when the timeout is short.
        self._silence = threading.Lock()
        self._silence.acquire()

    def is_set(self) -> bool:
        """Whether it was set since it was last cleared."""
        return self._is_set

    def set(self) -> None:
        """End the present or the next wait; any thread may call this."""
        if not self._is_set:
            self._is_set = True
            with contextlib.suppress(RuntimeError):  # another thread has released it
                self._silence.release()  # behind the mark, by which `wait` decides to sleep

    def clear(self) -> None:
        """Discard all calls of `set` so far."""
        self._silence.acquire(blocking=False)
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Sleep until it is set, at most `timeout` seconds; return whether it is."""
        if not self._is_set:
            self._silence.acquire(timeout=max(timeout, 0.0))
        return self._is_set


Mail: TypeAlias = bytes | bytearray | Message


class Mailbox:
    """The messages that have arrived at one node, by tag; any thread may fill it.

    Nodes of one process pass each other messages as objects, which must not be changed any more;
    messages from other processes are encoded frames.

    epoch: of its reader. Messages of a later epoch are stored until `enter`.
    rings: whether an arrival ends a wait; False while another thread handles the messages
        (`lent`).
    """

    def __init__(self, epoch: int = 0) -> None:
        self.arrived = Wakeup()
        self.epoch = epoch
        self.rings = True
        self._lock = threading.Lock()
        self._frames: dict[Tag, deque[tuple[int, Mail]]] = {t: deque() for t in Tag}
        self._later: list[tuple[int, int, Tag, Mail]] = []

    def put(self, source: int, tag: Tag, frame: Mail, epoch: int = 0) -> None:
        """Add a frame or message and end a wait; one of an earlier epoch is dropped."""
        with self._lock:  # the reader may enter another epoch meanwhile
            self._put(source, tag, frame, epoch)
        if self.rings:
            self.arrived.set()

    def enter(self, epoch: int) -> None:
        """Drop all messages of epochs before `epoch`."""
        with self._lock:
            later, self._later = self._later, []
            self._frames = {tag: deque() for tag in Tag}
            self.epoch = epoch
            for at, source, tag, frame in later:  # before anything that comes meanwhile
                self._put(source, tag, frame, at)
        if later:
            self.arrived.set()

    def _put(self, source: int, tag: Tag, frame: Mail, epoch: int) -> None:
        if epoch == self.epoch:
            self._frames[tag].append((source, frame))
        elif epoch > self.epoch:
            self._later.append((epoch, source, tag, frame))

    def take(self, tag: Tag) -> Envelope | None:
        """Return the oldest message of `tag`, or None."""
        frames = self._frames[tag]  # without the lock: only the reader takes and enters
        if not frames:  # faster than to catch IndexError
            return None
        source, frame = frames.popleft()
        if isinstance(frame, bytes | bytearray):
            return Envelope(source, codec.decode(frame), len(frame))
        return Envelope(source, frame, 0)

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived."""
        return not any(self._frames.values())

    def has(self, tag: Tag | None) -> bool:
        """Whether a message of `tag` has arrived; None: any."""
        return bool(self._frames[tag]) if tag is not None else not self.empty
