"""The seam between nodes: ports that carry messages, in order per (sender, receiver, tag).

A *node* is the head (0) or a stage (1..N); how nodes map to processes is the transport's affair.
Ports know no runs, models or policies. A send never blocks and keeps its buffer until the bytes
are gone; a receive never blocks either: `wait` sleeps until something may be there.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from pipeinfer import protocol
from pipeinfer.protocol import Message, Tag


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message and the node that sent it (-1 where the transport can not tell)."""

    source: int
    message: Message
    n_bytes: int


@dataclass(slots=True)
class Traffic:
    """What a port has sent: messages and bytes, per tag."""

    messages: dict[Tag, int] = field(default_factory=dict)
    n_bytes: dict[Tag, int] = field(default_factory=dict)

    def count(self, tag: Tag, size: int) -> None:
        """Note one message of `size` bytes."""
        self.messages[tag] = self.messages.get(tag, 0) + 1
        self.n_bytes[tag] = self.n_bytes.get(tag, 0) + size

    @property
    def total_bytes(self) -> int:
        """Bytes sent over all tags."""
        return sum(self.n_bytes.values())


class Port(Protocol):
    """One node's access to the others."""

    node: int
    traffic: Traffic

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""

    def take(self, tag: Tag) -> Envelope | None:
        """The oldest message of `tag` that has arrived, or None."""

    def wait(self, timeout: float, *, live: bool = True) -> None:
        """Sleep until a message arrives, `wake` is called or `timeout` seconds have passed.

        live: something is under way, so look often; otherwise save the processor.
        """

    def wake(self) -> None:
        """End a `wait`; the only method that other threads may call."""

    def close(self, timeout: float) -> None:
        """Give queued sends up to `timeout` seconds to leave."""


class Mailbox:
    """Arrived frames of one node, by tag; safe to fill from any thread."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._frames: dict[Tag, deque[tuple[int, bytes | bytearray]]] = {t: deque() for t in Tag}

    def put(self, source: int, tag: Tag, frame: bytes | bytearray) -> None:
        """Add a frame and end a wait."""
        self._frames[tag].append((source, frame))
        self.arrived.set()

    def take(self, tag: Tag) -> Envelope | None:
        """The oldest message of `tag`."""
        try:
            source, frame = self._frames[tag].popleft()
        except IndexError:
            return None
        return Envelope(source, protocol.decode(frame), len(frame))

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived."""
        return not any(self._frames.values())
