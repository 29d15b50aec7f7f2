"""The seam between nodes: ports that carry messages, in order per (sender, receiver, tag).

A *node* is the head (0) or a stage (1..N); how nodes map to processes is the transport's affair.
Ports know no runs, models or policies. A send never blocks and keeps its buffer until the bytes
are gone; a receive never blocks either: `wait` sleeps until something may be there.

Who holds which node may change while a job runs. Each such arrangement is an *epoch*: a frame
belongs to the epoch it was sent in, frames of earlier ones are dropped, frames of later ones wait.
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
    """The head has rearranged the nodes: messages under way on this port are void."""


class Dismissed(Exception):
    """The job goes on, or ends, without this process."""


class Layout(Struct, frozen=True):
    """Which rank holds which node, `rank_of[node]`, from an epoch on."""

    rank_of: tuple[int, ...]
    epoch: int = 0

    def local_nodes(self, rank: int) -> list[int]:
        """Nodes of a rank, ascending."""
        return [node for node, owner in enumerate(self.rank_of) if owner == rank]


class Envelope(Struct, frozen=True):
    """A received message and the node that sent it (-1 where the transport cannot tell)."""

    source: int
    message: Message
    n_bytes: int


class Traffic(Struct):
    """What a port has sent: messages and bytes, per tag."""

    messages: dict[Tag, int] = field(default_factory=dict)
    n_bytes: dict[Tag, int] = field(default_factory=dict)

    def count(self, tag: Tag, size: int) -> None:
        """Note one message of `size` bytes."""
        self.messages[tag] = self.messages.get(tag, 0) + 1
        self.n_bytes[tag] = self.n_bytes.get(tag, 0) + size

    @property
    def total_bytes(self) -> int:
        """How many bytes were sent in all, over all tags."""
        return sum(self.n_bytes.values())


class Port(Protocol):
    """One node's access to the others.

    `take` and `wait` raise Regrouped from the moment a new epoch is known until `adopt` is called,
    and Dismissed when the process is to leave.
    """

    node: int
    traffic: Traffic

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""

    def take(self, tag: Tag) -> Envelope | None:
        """The oldest message of `tag` that has arrived, or None."""

    def adopt(self) -> None:
        """Enter the newest epoch; `node` is this port's node there."""

    @property
    def gone(self) -> set[int]:
        """Ranks that are dead or were given up."""

    def order(self, rank: int, order: Order) -> None:
        """Rank 0: tell a rank something that is of no epoch; it gets there if the rank lives."""

    def regroup(self, layout: Layout, given_up: Collection[int]) -> None:
        """Rank 0: begin an epoch. Every rank is told, and this port enters it."""

    def take_order(self) -> Order | None:
        """The newest order to this rank that is not the transport's own (Place, Leave)."""

    def post(self, rank: int, message: Message) -> None:
        """Send a message that is of no epoch to a rank; it gets there, in order, if the rank lives.
        """

    def take_post(self) -> tuple[int, Message] | None:
        """The oldest message of no epoch that has arrived, and the rank that sent it."""

    def new_losses(self) -> set[int]:
        """Ranks that were found dead since the last time this was asked."""

    def wait(self, timeout: float, *, live: bool = True, tag: Tag | None = None) -> None:
        """Sleep until a message arrives, `wake` is called or `timeout` seconds have passed.

        live: something is under way, so look often; otherwise save the processor. tag: messages of
        others do not end it, and neither does `wake`.
        """

    def wake(self) -> None:
        """End a `wait`; the only method that other threads may call."""

    def close(self, timeout: float) -> None:
        """Give queued sends up to `timeout` seconds to leave."""


class Wakeup:
    """Like `threading.Event`, and safe to `set` in a signal handler: an Event that its own thread
    was interrupted in blocks there for ever. One thread waits and clears."""

    def __init__(self) -> None:
        self._is_set = False
        # Taken but when it rings: releasing it is reentrant. SimpleQueue is, too, but its `get`
        # may wait for ever when the timeout is short.
        self._silence = threading.Lock()
        self._silence.acquire()

    def is_set(self) -> bool:
        """Whether it was set since it was cleared."""
        return self._is_set

    def set(self) -> None:
        """End a wait, now or when it begins; from any thread."""
        if not self._is_set:
            self._is_set = True
            with contextlib.suppress(RuntimeError):  # it rings already
                self._silence.release()

    def clear(self) -> None:
        """Forget all rings that have not been waited for."""
        self._silence.acquire(blocking=False)
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Sleep until it is set, at most `timeout` seconds; whether it is."""
        if not self._is_set:
            self._silence.acquire(timeout=max(timeout, 0.0))
        return self._is_set


Mail: TypeAlias = bytes | bytearray | Message


class Mailbox:
    """What has arrived at one node, by tag; safe to fill from any thread.

    Nodes of one process hand each other messages as they are, which nobody may change then; others'
    come as frames. epoch: of its reader. What is of a later epoch is kept until `enter`. rings:
    whether what arrives ends a wait; not while the sender sees to it itself (`lent`).
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
        """Drop what has arrived, but for what belongs to `epoch` or later."""
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
        """The oldest message of `tag`."""
        frames = self._frames[tag]
        if not frames:  # an exception would take longer
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
