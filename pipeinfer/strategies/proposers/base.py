"""The seam for proposers: where the candidate next tokens of a lane come from.

A proposer looks at a path and names tokens that may follow it, with the probability that each
is the target's choice. It cannot change the output, only how soon it comes. It knows no runs,
ranks, sequence ids of the target or cutoffs beyond those in its job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.types import Choice


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
        of `job.stop_ids`, none under the cutoffs, none with `job.free_only` where it evaluates a
        model for them. None when `stopped()` answered True midway:
        the job is no longer wanted.
        """

    def close(self) -> None:
        """Release memory, models and threads; nothing may be called afterwards."""


class Anchor(Struct, frozen=True):
    """A row that is verified in this step. parent: index of an earlier one, -1 of the tip, which
    comes first."""

    parent: int
    token: int


class HintRow(Struct, frozen=True):
    """A row that is there for hints. parent: index among the anchors and, after these, the hints
    before it; its position follows its parent's. wanted: its choice is asked for. sees: sequence
    ids that it looks through besides its own (torch only)."""

    parent: int
    token: int
    wanted: bool = True
    sees: tuple[int, ...] = ()


class InlineProposer(Protocol):
    """Proposes from what the target chose after its hints. Lanes are named by `StartDraft.lane`.

    candidates: most tokens that it proposes below a tip. rows: most hints of a step. paths: most
    paths of both together. chained: guesses that travel may have hints of their own; several
    batches are then in flight.
    """

    candidates: int
    rows: int
    paths: int
    chained: bool

    def opened(self, lane: int, tokens: Sequence[int]) -> None:
        """A lane starts with these tokens (a prompt, or a path that had another name before)."""

    def accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """The lane's path has grown by these."""

    def propose(self, job: StartDraft) -> tuple[Proposal, ...]:
        """Proposals below the job's path, parents before children; at most `job.max_tokens` and
        `job.max_depth` levels, none of `job.stop_ids`. Empty: it knows nothing here."""

    def hints(self, lane: int, anchors: Sequence[Anchor], room: int, *, batch: int = 0,
              below: Sequence[int] | None = None) -> list[HintRow]:
        """Hints for a run that verifies `anchors`, at most `room`.

        batch: its number. below: the anchors are guesses, those without a parent among them follow
        the path that goes on with these tokens, and none of them is the tip; None: the first one
        is. Only asked of one that is `chained`.
        """

    def learn(self, lane: int, choices: Sequence[Choice | None], *, batch: int = 0) -> None:
        """What was chosen after the anchors and the hints of a batch, in their order; None: not
        asked for, skipped, or there was no room for the row. Follows each `hints` that went out,
        in the order in which they did."""

    def closed(self, lane: int) -> None:
        """The lane has ended. Harmless for one that was never opened."""


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
