"""The head of a job whose other nodes each hold the whole model (`--layout replicate`).

Each message goes to one replica instead of to the first stage. Everything else is inherited from
the head: requests, tokens, deadlines, reports.
"""

from __future__ import annotations

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import CacheOps, Message, Shutdown, Tag
from pipeinfer.core.types import ALL_SEQS, END, SeqRemove
from pipeinfer.runtime.head import Head
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import Instruction, ToNode
from pipeinfer.scheduler.replicas import ReplicaScheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.transport.base import Port


class ReplicaHead(Head):
    """A head that sends each instruction to the replica that its scheduler chooses."""

    def __init__(self, port: Port, scheduler: ReplicaScheduler, *, trace: bool, timeout: float
                 ) -> None:
        super().__init__(port, Grid.plain(scheduler.nodes), scheduler, None, trace=trace,
                         timeout=timeout)
        self._node = 1

    def restart(self, grid: Grid, limits: Limits, controller: Controller | None,
                reason: str = "") -> None:
        """Continue over other stages. `controller` is ignored: replicas are not tuned."""
        del controller
        assert isinstance(self.scheduler, ReplicaScheduler)
        self.scheduler.nodes = grid.n_nodes
        super().restart(Grid.plain(grid.n_nodes), limits, None, reason)

    def _execute(self, instruction: Instruction | ToNode) -> None:
        if isinstance(instruction, ToNode):
            self._node, instruction = instruction.node, instruction.instruction
        super()._execute(instruction)

    def _watch_links(self) -> None:
        """Return None: replicas send each other nothing."""

    def _first(self, message: Message) -> None:
        self._port.send(self._node, Tag.TRANSACTION, message)

    def _forget_caches(self) -> None:
        self._every(CacheOps((SeqRemove(ALL_SEQS, 0, END),)))

    def _end(self) -> None:
        self._every(Shutdown())

    def _every(self, message: Message) -> None:
        for node in self._grid.leaders:
            self._port.send(node, Tag.TRANSACTION, message)
