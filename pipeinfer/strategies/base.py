"""The seam for proposers: where the candidate next tokens of a lane come from.

A proposer looks at a path and names tokens that may follow it, with the probability that each
is the target's choice. It can not change the output, only how soon it comes. It knows no runs,
ranks, sequence ids of the target or cutoffs beyond those in its job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeinfer.events import StartDraft
from pipeinfer.tree import Proposal


class Proposer(Protocol):
    """Proposes continuations; used by one thread. free: it evaluates no model."""

    free: bool

    @property
    def rows_evaluated(self) -> int:
        """Rows that its model has evaluated so far."""

    def propose(
        self, job: StartDraft, stopped: Callable[[], bool]
    ) -> tuple[Proposal, ...] | None:
        """Proposals below the job's path, parents before children, the best chain first.

        At most `job.max_tokens`, at most `job.max_depth` levels and `job.branches` paths, none
        of `job.stop_ids`, none under the cutoffs. None when `stopped()` answered True midway:
        the job is no longer wanted.
        """

    def close(self) -> None:
        """Release what it holds."""
