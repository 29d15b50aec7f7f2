"""The token tree of a model whose layers keep a state of the text.

No part of a state can be taken back, but copying a sequence copies its state. So every speculative
run has a sequence id of its own, which begins as a copy of its parent's (PipeInfer's
multibuffering, paper, section IV-C), and its rows are one chain.

A state is that behind the last row of a run. So a run that follows a row inside another one begins
with a copy of what was there before that one, and repeats its rows down to the parent. Likewise the
lane's main id is that of the last run that was accepted as a whole: accepted tokens behind it are
repeated before the next token. A run that was not accepted as a whole leaves nothing but its id,
which is emptied.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import field
from typing_extensions import override

from pipeinfer.core.messages import NO_RUN
from pipeinfer.scheduler.token_tree import Node, Tree, chain_of


class StateTree(Tree):
    """A tree in which each speculative run is a chain with an id of its own."""

    _main: int = -1  # the id of the last run that was accepted as a whole
    _ends: dict[int, Node] = field(default_factory=dict)  # the last row of each id
    _behind: list[Node] = field(default_factory=list)  # accepted tokens that the main id lacks

    def __post_init__(self) -> None:
        self._main = self.frontier.seq_ids[0]
        self._ends[self._main] = self.frontier

    @property
    @override
    def main_id(self) -> int:
        return self._main

    @override
    def rows_left(self, base: Node, width: int) -> int:
        return width - len(self._above(base)[1])

    @override
    def issue(self, nodes: Sequence[Node], run_id: int) -> list[Node]:
        """Issue the chain that begins with the first of `nodes`; nothing without a free id, or if
        its sibling has the same token."""
        chain = chain_of(nodes)
        base = chain[0].parent if chain else None
        if base is None or not self.pool.available or base.child(chain[0].token) is not None:
            return []
        end = self._above(base)[0]
        own = self.pool.branch(self.lane, end.seq_ids[0], end.pos + 1)
        self._attach_chain(chain, own, run_id)
        self._ends[own] = chain[-1]
        return chain

    @override
    def repeated(self, nodes: Sequence[Node]) -> list[Node]:
        first = nodes[0]
        if first is self.frontier:
            rows = self._behind[:-1]
        else:
            assert first.parent is not None
            rows = self._above(first.parent)[1]
        return [Node(node.token, node.pos, None, first.seq_ids, NO_RUN, speculative=False,
                     wanted=False) for node in rows]

    @override
    def widen(self, tip: Node, nodes: Sequence[Node]) -> None:
        if nodes:
            tip.seq_ids = nodes[0].seq_ids

    @override
    def sent(self, tip: Node) -> None:
        self._ends[self._main] = tip
        self._behind.clear()

    @override
    def add(self, token: int, run_id: int) -> Node:
        node = super().add(token, run_id)
        node.seq_ids = (self._main,)
        self._behind.append(node)
        return node

    @override
    def step(self, token: int) -> tuple[Node | None, list[Node]]:
        survivor, dead = self._settle(token)
        for seq_id in dict.fromkeys(node.seq_ids[0] for node in dead):
            self._release(seq_id)
        if survivor is not None:
            own = survivor.seq_ids[0]
            if self._ends[own] is survivor:
                self._release(self._main)
                self._main = own
                self._behind.clear()
            else:
                self._behind.append(survivor)
        return survivor, dead

    def _release(self, seq_id: int) -> None:
        del self._ends[seq_id]
        self.pool.release(seq_id, 0)

    def _above(self, base: Node) -> tuple[Node, list[Node]]:
        """The last row, at `base` or above it, behind which an id has the state, and the rows from
        there down to `base`."""
        rows: list[Node] = []
        while base is not self.frontier:
            if self._ends.get(base.seq_ids[0]) is base:
                return base, rows[::-1]
            rows.append(base)
            assert base.parent is not None
            base = base.parent
        return self._ends[self._main], [*self._behind, *rows[::-1]]
