"""Nodes as threads of one process, joined by mailboxes.

The frames are the same bytes that travel over MPI, so `-np 1` runs the same code path. This
module knows no MPI; `transport.mpi` reuses its local half for a stage hosted by rank 0.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer import protocol
from pipeinfer.protocol import Message, Tag
from pipeinfer.transport.base import Envelope, Mailbox, Traffic


class LocalPort:
    """A port whose peers live in this process; others are reached through `forward`."""

    def __init__(
        self, node: int, mailboxes: dict[int, Mailbox],
        forward: Callable[[int, int, Tag, bytes], None] | None = None,
    ) -> None:
        self.node = node
        self.traffic = Traffic()
        self._mailboxes, self._forward = mailboxes, forward
        self._own = mailboxes[node]

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """See `Port.send`."""
        frame = protocol.encode(message)
        self.traffic.count(tag, len(frame))
        box = self._mailboxes.get(dest)
        if box is not None:
            box.put(self.node, tag, frame)
        elif self._forward is not None:
            self._forward(self.node, dest, tag, frame)
        else:
            raise ValueError(f"node {self.node} has no way to node {dest}")

    def take(self, tag: Tag) -> Envelope | None:
        """See `Port.take`."""
        return self._own.take(tag)

    def wait(self, timeout: float, *, live: bool = True) -> None:
        """See `Port.wait`."""
        del live
        if self._own.empty:
            self._own.arrived.wait(timeout)
        self._own.arrived.clear()

    def wake(self) -> None:
        """See `Port.wake`."""
        self._own.arrived.set()

    def close(self, timeout: float) -> None:
        """Nothing is ever queued here."""
        del timeout


def local_ports(n_nodes: int) -> list[LocalPort]:
    """Ports of `n_nodes` nodes that share this process."""
    mailboxes = {node: Mailbox() for node in range(n_nodes)}
    return [LocalPort(node, mailboxes) for node in range(n_nodes)]
