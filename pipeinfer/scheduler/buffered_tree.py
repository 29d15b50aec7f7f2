"""The token tree of `--policy published`: each speculative run has sequence ids of its own.

This is PipeInfer's pipelined multibuffering of the cache (paper, section IV-C; docs/algorithms.md
4.10). Accepted tokens have the lane's first id, the canonical sequence (the front buffer), which
never changes. Each speculative run takes a further id for each of its paths, first in, first out (a
back buffer), with copies of the cells that it attends to. Accepted cells are copied to the
canonical sequence and from there to the lane's other ids; an id that no path needs is free again.
The tree makes no decisions about runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import field
from typing_extensions import override

from pipeinfer.core.messages import NO_RUN
from pipeinfer.scheduler.token_tree import Node, Tree, chain_of


class BufferedTree(Tree):
    """Speculative tokens with ids per run; the frontier's first id is the canonical one.

    branching: whether runs may be trees, and follow where others did; otherwise all are one chain.
    shares: whether runs attend to cells of earlier runs in flight. Without that (multibuffering
        switched off) a run repeats every row of its path that is not accepted.
    """

    branching: bool = False
    shares: bool = True
    _own: dict[int, int] = field(default_factory=dict)  # ids with repeated rows: their first pos

    @override
    def rows_left(self, base: Node, width: int) -> int:
        return width if self.shares else max(0, width - len(self._path(base)))

    @override
    def issue(self, nodes: Sequence[Node], run_id: int) -> list[Node]:
        """Issue a tree below one node, or its first chain; of that the paths with a free id."""
        if not self.branching:
            nodes = chain_of(nodes)
            if nodes and nodes[0].parent is not None and nodes[0].parent.children:
                return []
        return super().issue(nodes, run_id)

    @override
    def _continues(self, base: Node) -> bool:
        return False

    @override
    def _branch(self, tip: Node) -> int:
        here = self.frontier
        repeats = not self.shares and tip.run_id != NO_RUN
        seq_id = self.pool.branch(self.lane, here.seq_ids[0], here.pos) if repeats \
            else super()._branch(tip)
        self._own.pop(seq_id, None)
        if repeats:
            self._own[seq_id] = here.pos
        return seq_id

    @override
    def repeated(self, nodes: Sequence[Node]) -> list[Node]:
        base, ids = nodes[0].parent, tuple(dict.fromkeys(i for n in nodes for i in n.seq_ids))
        if base is None or ids[0] not in self._own:
            return []
        return [Node(node.token, node.pos, None, ids, NO_RUN, speculative=False, wanted=False)
                for node in self._path(base)]

    @override
    def sent(self, tip: Node) -> None:
        """Early sharing: after the tip's run every id of the lane has the tip's cell."""
        if self.shares:
            self.pool.propagate(self.lane, tip.seq_ids[0], tip.pos + 1)

    def again(self) -> Node | None:
        """Return the frontier as a row of a further run, under an id of its own; None without a
        free id.
        """
        here = self.frontier
        if not self.pool.available:
            return None
        seq_id = self.pool.branch(self.lane, here.seq_ids[0], here.pos)
        return Node(here.token, here.pos, None, (seq_id,), NO_RUN, speculative=False, hint=True)

    def drop(self, node: Node) -> None:
        """Release the id of a node that `again` returned, once its run is issued."""
        self.pool.release(node.seq_ids[0], node.pos)

    @override
    def step(self, token: int) -> tuple[Node | None, list[Node]]:
        """Accept `token` as `Tree.step` does; the survivor's cell is copied to the canonical
        sequence.
        """
        here = self.frontier
        survivor, dead = self._settle(token)
        left = dict.fromkeys((i for n in dead for i in n.seq_ids), here.pos + 1)
        end = here
        if survivor is not None:
            canonical, end = here.seq_ids[0], survivor
            left |= dict.fromkeys(survivor.seq_ids, survivor.pos + 1)
            self.pool.share(survivor.seq_ids[0], canonical, survivor.pos, survivor.pos + 1)
            survivor.seq_ids = (canonical,)
        used = {end.seq_ids[0], *(i for n in end.subtree() if n is not end for i in n.seq_ids)}
        for seq_id, length in left.items():
            if seq_id not in used:
                self.pool.release(seq_id, min(length, self._own.pop(seq_id, length)))
        self.pool.propagate(self.lane, self.frontier.seq_ids[0], end.pos + self.shares)
        return survivor, dead

    def _path(self, base: Node) -> list[Node]:
        """The nodes from the frontier down to `base`."""
        path = [base]
        while path[-1] is not self.frontier:
            parent = path[-1].parent
            assert parent is not None
            path.append(parent)
        return path[::-1]
