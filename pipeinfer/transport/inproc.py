"""Nodes as threads of one process, connected by mailboxes.

They pass each other message objects: encoding and decoding took a third of the time between two
tokens of a small model. This module uses no MPI; `transport.mpi` uses `LocalPort` for a stage
in rank 0's process.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection

from pipeinfer.core import codec
from pipeinfer.core.control import Order
from pipeinfer.core.messages import Message, Tag
from pipeinfer.transport.base import Envelope, Layout, Mailbox, Regrouped, Traffic
from pipeinfer.transport.lent import LentLoop


class LocalPort:
    """A port whose peers live in this process.

    forward: sends a frame of an epoch to a node of another process: (node, tag, frame, epoch).
    wake: called after each message to a node of this process that may sleep outside its mailbox.
    posts: the queues of `post`, shared by the ports of a process.
    rank_of: see `Port.rank_of`.
    borrows: the loop of another node, in which this node's thread works instead of sleeping.
    """

    borrows: LentLoop | None = None

    def __init__(
        self, node: int, mailboxes: dict[int, Mailbox],
        forward: Callable[[int, Tag, bytes, int], None] | None = None,
        wake: Callable[[], None] = lambda: None,
        posts: defaultdict[int, deque[tuple[int, Message]]] | None = None,
        rank_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.node, self.rank_of = node, rank_of
        self.traffic = Traffic()
        self._mailboxes, self._forward, self._wake = mailboxes, forward, wake
        self._posts = defaultdict(deque) if posts is None else posts
        self._own = mailboxes[node]
        self._epoch = self._called = self._own.epoch

    def call(self, epoch: int) -> None:
        """Announce a new epoch; another thread calls this."""
        self._called = epoch
        self._own.arrived.set()

    def adopt(self) -> None:
        """Enter the newest epoch; `node` becomes this port's node there."""
        self._epoch = self._called  # read once: another thread may announce the next meanwhile
        self._own.enter(self._epoch)

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""
        box = self._mailboxes.get(dest)
        if box is not None:
            self.traffic.count(tag, 0)
            box.put(self.node, tag, message, self._epoch)
            self._wake()
        elif self._forward is not None:
            frame = codec.encode(message)
            self.traffic.count(tag, len(frame))
            self._forward(dest, tag, frame, self._epoch)
        else:
            raise ValueError(f"node {self.node} has no way to node {dest}")

    def take(self, tag: Tag) -> Envelope | None:
        """Return the oldest message of `tag` that has arrived, or None."""
        if self._called != self._epoch:
            raise Regrouped
        return self._own.take(tag)

    @property
    def gone(self) -> set[int]:
        """No rank is ever lost alone: nodes of one process live and die together."""
        return set()

    def order(self, rank: int, order: Order) -> None:
        """Do nothing, as there is no other rank."""

    def regroup(self, layout: Layout, given_up: Collection[int]) -> None:
        """Do nothing, as there is no other rank."""

    def take_order(self) -> Order | None:
        """Return None: every rank here has a node."""
        return None

    def post(self, rank: int, message: Message) -> None:
        """Send a message that belongs to no epoch; nodes of one process count as ranks here."""
        self._posts[rank].append((self.node, message))
        self._mailboxes[rank].arrived.set()

    def take_post(self) -> tuple[int, Message] | None:
        """Return the oldest message of no epoch that has arrived and the rank that sent it, or
        None."""
        posts = self._posts[self.node]
        return posts.popleft() if posts else None

    def new_losses(self) -> set[int]:
        """Return the ranks that were found dead since the last call."""
        return set()

    def wait(self, timeout: float, *, live: bool = True, tag: Tag | None = None) -> None:
        """Sleep until a message arrives, `wake` is called or `timeout` seconds have passed."""
        del live
        deadline = time.monotonic() + timeout  # so that the caller can look for losses
        while not self._own.has(tag):  # messages of other tags and `wake` end a sleep, too
            left = deadline - time.monotonic()
            if left <= 0 or self._called != self._epoch:
                break
            if tag is None and self.borrows is not None and self.borrows.work():
                return
            self._own.arrived.wait(left)
            self._own.arrived.clear()
            if tag is None:
                return
        self._own.arrived.clear()

    def wake(self) -> None:
        """End a `wait`; the only method that other threads may call."""
        self._own.arrived.set()

    def lent(self) -> LentLoop:
        """Return the means by which another node of this process works in this one's loop."""
        return LentLoop(self._own)

    def close(self, timeout: float) -> None:
        """Do nothing: sends are never queued here."""
        del timeout


def local_ports(n_nodes: int) -> list[LocalPort]:
    """Return the ports of `n_nodes` nodes that share this process."""
    mailboxes = {node: Mailbox() for node in range(n_nodes)}
    posts: defaultdict[int, deque[tuple[int, Message]]] = defaultdict(deque)
    return [LocalPort(node, mailboxes, posts=posts) for node in range(n_nodes)]
