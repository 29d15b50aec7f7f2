"""Comparison of a later draft's proposals with those already in the tree (docs/algorithms.md 5,
11.6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from pipeinfer.core.drafting import Proposal
from pipeinfer.scheduler.guess_queue import GuessQueue
from pipeinfer.scheduler.token_tree import Node


def beyond(queue: GuessQueue, tip: Node, proposals: Sequence[Proposal]
           ) -> tuple[Node, tuple[Proposal, ...]]:
    """Find where the first chain of `proposals` leaves the tree below `tip`.

    queue: the planned nodes of the lane
    tip: the node that the proposals follow
    proposals: parents before children
    Returns the last node, issued or planned, that the chain agrees with, and the rest of the chain
    below it. The rest is empty where it adds nothing, or where that node is decided.
    """
    chain: list[Proposal] = []
    for guess in proposals:
        if guess.alternative or guess.parent != len(chain) - 1:
            break
        chain.append(guess)
    at, agreed = tip, 0
    while agreed < len(chain) and (known := at.child(chain[agreed].token)
                                   or queue.child(at, chain[agreed].token)):
        at, agreed = known, agreed + 1
    rest = chain[agreed:] if at.open else []
    return at, tuple(structs.replace(one, parent=k - 1) for k, one in enumerate(rest))


def merged(queue: GuessQueue, tip: Node, proposals: Sequence[Proposal], planned: Sequence[Node]
           ) -> Iterator[tuple[Proposal, Node]]:
    """Yield those of a tree of `proposals` below `tip` that are new, with the node that each
    follows.

    queue: the planned nodes of the lane
    planned: nodes made of the yielded proposals; the caller has to append one for each before it
        advances the iterator
    Each proposal is yielded with parent -1. Those below a decided node are left out.
    """
    where: list[Node | None] = []
    for one in proposals:
        parent = tip if one.parent < 0 else where[one.parent]
        known = None
        if parent is not None and parent.open:
            known = parent.child(one.token) or queue.child(parent, one.token) or next(
                (node for node in planned if node.parent is parent and node.token == one.token),
                None)
            if known is None:
                yield structs.replace(one, parent=-1), parent
                known = planned[-1]
        where.append(known)
