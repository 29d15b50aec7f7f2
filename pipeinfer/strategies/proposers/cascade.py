"""Several proposers at once: the quick ones first, the better ones where those are unsure.

The PipeInfer paper proposes more than one draft model, the smallest first. Here each proposer is
asked in turn until one names something likely enough; what the earlier ones named then stays as
alternatives. This module knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeinfer.core.drafting import ENOUGH, Proposal, StartDraft
from pipeinfer.strategies.proposers.base import Proposer


class Cascade:
    """A `Proposer` made of others, the quickest first; the last one's word always stands."""

    def __init__(self, proposers: Sequence[Proposer], enough: float = ENOUGH) -> None:
        if not proposers:
            raise ValueError("a cascade needs at least one proposer")
        self._proposers, self._enough = tuple(proposers), enough
        self.free = all(proposer.free for proposer in proposers)

    @property
    def rows_evaluated(self) -> int:
        """How many rows all proposers together have evaluated."""
        return sum(proposer.rows_evaluated for proposer in self._proposers)

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """See `Proposer.propose`."""
        found: tuple[Proposal, ...] = ()
        for proposer in self._proposers:
            newer = proposer.propose(job, stopped)
            if newer is None:
                return None
            found = _merge(newer, found, job.alternatives) if newer else found
            if found and found[0].confidence >= self._enough:
                break
        return found

    def close(self) -> None:
        """See `Proposer.close`."""
        for proposer in self._proposers:
            proposer.close()


def _merge(better: tuple[Proposal, ...], older: tuple[Proposal, ...], most: int
           ) -> tuple[Proposal, ...]:
    """The better proposals, with the older ones' first tokens as alternatives to their first."""
    named = {p.token for p in better if p.parent < 0}
    alternatives = [p for p in better if p.alternative]
    room = most - sum(p.parent < 0 for p in alternatives)
    for proposal in older:
        if room > 0 and proposal.parent < 0 and proposal.token not in named:
            named.add(proposal.token)
            left = max(0.0, 1.0 - better[0].confidence)
            alternatives.append(
                Proposal(-1, proposal.token, min(proposal.confidence, left), alternative=True)
            )
            room -= 1
    return (*(p for p in better if not p.alternative), *alternatives)
