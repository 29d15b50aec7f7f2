"""The token tree of a model whose layers keep a state of the text.

No part of a state can be taken back, but copying a sequence copies its state. So every speculative
run has a sequence id of its own, which begins as a copy of its parent's (PipeInfer's
multibuffering, paper, section IV-C). The frontier's id is the one of the last accepted run.
Accepted tokens that are not in flight continue it in place; a wrong token's id is emptied as a
whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from pipeinfer.scheduler.token_tree import Node, Tree


class StateTree(Tree):
    """A tree in which each speculative token is a run with an id of its own."""

    @override
    def rows_left(self, base: Node, width: int) -> int:
        return 1

    @override
    def issue(self, nodes: Sequence[Node], run_id: int) -> list[Node]:
        """Issue the first of `nodes`; nothing without a free id, or if its sibling has the same
        token."""
        node = nodes[0] if nodes else None
        if node is None or node.parent is None or not self.pool.available \
                or node.parent.child(node.token) is not None:
            return []
        node.seq_ids, node.run_id = (self._branch(node.parent),), run_id
        node.parent.children.append(node)
        return [node]

    @override
    def step(self, token: int) -> tuple[Node | None, list[Node]]:
        here = self.frontier
        survivor, dead = self._settle(token)
        for node in dead if survivor is None else [*dead, here]:
            self.pool.release(node.seq_ids[0], 0)
        return survivor, dead
