"""Locates a cut link between two stages, and chooses the rank to continue without.

Every transaction passes all stages in order, and each node receives it from one other node. So the
numbers of received transactions differ only by those under way. A transaction that has been under
way for long, while both nodes are idle, is lost. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeinfer.core.control import Standing
from pipeinfer.core.grid import Grid


def cut_link(grid: Grid, standings: Mapping[int, Standing], patience: float
             ) -> tuple[int, int] | None:
    """Return the first cut link: the node that sent and the node that waits; None if there is
    none.

    standings: the answers to the roll call, by node. A node that computes or has not answered
        shows nothing about its links.
    patience: seconds for which both nodes must have been idle.
    The head's own links are not checked: it detects lost ranks itself.
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
    """Return the rank to continue without, of two whose link is cut.

    It is the one that waits, unless the source has a cut link for the second time. Rank 0 stays.
    earlier: sources of links that were cut before.
    """
    return source if waits == 0 or (source in earlier and source != 0) else waits
