"""Which link between two stages is cut, and who is left out for it.

Every transaction goes through all stages in order, and each node gets it from one other, so nodes
have received equally many but for what is under way. What has been under way for long, while both
ends have nothing to do, will not come. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeinfer.core.control import Standing
from pipeinfer.core.grid import Grid


def cut_link(grid: Grid, standings: Mapping[int, Standing], patience: float
             ) -> tuple[int, int] | None:
    """The first link between nodes over which something has been under way for longer than
    `patience` seconds: the node that sent it and the one that waits. None where there is none.

    standings: by node, of those that have answered. One that computes, or does not answer, tells
    nothing of its links. The head's own links are not looked at: it hears who is there.
    """
    for node in range(1, grid.n_nodes + 1):
        source, here = grid.predecessor(node), standings.get(node)
        before = standings.get(source)
        if here is None or before is None or here.received >= before.received:
            continue
        if min(here.idle, before.idle) > patience:
            return source, node
    return None


def left_out(source: int, waits: int, earlier: Collection[int]) -> int:
    """The rank to go on without, of two whose link is cut: the one that waits, unless the other is
    at a cut link for the second time. Rank 0 stays. earlier: sources of links cut before."""
    return source if waits == 0 or (source in earlier and source != 0) else waits
