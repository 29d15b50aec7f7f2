"""A port that delivers messages later than they arrive, as a faulty link does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

from pipeinfer.core.control import Order
from pipeinfer.core.messages import Message, Tag
from pipeinfer.transport.base import Envelope, Layout, Port

Due = Callable[[Tag, Envelope, float], float | None]


class DelayingPort:
    """A port that hands messages on later.

    due: when a message of a tag that arrives now (both by `time.monotonic`) is to be handed on,
    None for never.
    """

    def __init__(self, inner: Port, due: Due) -> None:
        self.node, self.traffic = inner.node, inner.traffic
        self._inner, self._due = inner, due
        self._held: dict[Tag, deque[tuple[float, Envelope]]] = {tag: deque() for tag in Tag}

    @property
    def gone(self) -> set[int]:
        """The ranks that are dead or were given up."""
        return self._inner.gone

    def rank_of(self, node: int) -> int:
        """Return the rank that has a node in this epoch."""
        return self._inner.rank_of(node)

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""
        self._inner.send(dest, tag, message)

    def take(self, tag: Tag) -> Envelope | None:
        """Return the oldest message of `tag` that has arrived, or None."""
        self._collect(tag)
        held = self._held[tag]
        if held and held[0][0] <= time.monotonic():
            return held.popleft()[1]
        return None

    def wait(self, timeout: float, *, live: bool = True, tag: Tag | None = None) -> None:
        """Sleep until a message arrives, `wake` is called or `timeout` seconds have passed."""
        for kind in Tag:
            self._collect(kind)
        due = min((held[0][0] for kind, held in self._held.items()
                   if held and tag in (None, kind)), default=None)
        left = timeout if due is None else min(timeout, due - time.monotonic())
        if left > 0:
            self._inner.wait(left, live=live, tag=tag)

    def adopt(self) -> None:
        """Enter the newest epoch; what was held back belongs to an earlier one."""
        for held in self._held.values():
            held.clear()
        self._inner.adopt()
        self.node = self._inner.node

    def order(self, rank: int, order: Order) -> None:
        """Rank 0: send a rank an order, which belongs to no epoch; it arrives if the rank lives."""
        self._inner.order(rank, order)

    def regroup(self, layout: Layout, given_up: Collection[int]) -> None:
        """Rank 0: begin an epoch."""
        self._inner.regroup(layout, given_up)

    def take_order(self) -> Order | None:
        """Return the newest order to this rank that the transport does not handle itself, or
        None."""
        return self._inner.take_order()

    def post(self, rank: int, message: Message) -> None:
        """Send a rank a message that belongs to no epoch; it arrives, in order, if the rank
        lives."""
        self._inner.post(rank, message)

    def take_post(self) -> tuple[int, Message] | None:
        """Return the oldest message of no epoch that has arrived and the rank that sent it, or
        None."""
        return self._inner.take_post()

    def new_losses(self) -> set[int]:
        """Return the ranks that were found dead since the last call."""
        return self._inner.new_losses()

    def wake(self) -> None:
        """End a `wait`; the only method that other threads may call."""
        self._inner.wake()

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for queued sends to leave."""
        self._inner.close(timeout)

    def _collect(self, tag: Tag) -> None:
        while (envelope := self._inner.take(tag)) is not None:
            due = self._due(tag, envelope, time.monotonic())
            if due is not None:
                self._held[tag].append((due, envelope))
