"""Where a better draft's answer leaves what a quick one has named (docs/algorithms.md 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipeinfer.core.drafting import Proposal
from pipeinfer.scheduler.guess_queue import GuessQueue
from pipeinfer.scheduler.token_tree import Node


def beyond(queue: GuessQueue, tip: Node, proposals: Sequence[Proposal]
           ) -> tuple[Node, tuple[Proposal, ...]]:
    """The last node below `tip`, issued or planned, on which the first chain of `proposals` agrees
    with what is there, and the chain's rest below it; empty where it adds nothing, or where that
    node is decided."""
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
    return at, tuple(dataclasses.replace(one, parent=k - 1) for k, one in enumerate(rest))
