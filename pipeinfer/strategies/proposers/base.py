"""The interface of proposers, the sources of speculative tokens.

A proposer receives a path and returns tokens that may follow it, with the probability that each is
the target's choice. It cannot change the output, only the time until the output arrives. It is
independent of runs, ranks and sequence ids of the target, and of cutoffs beyond those in its job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.types import Choice


class Proposer(Protocol):
    """A proposer that one thread calls.

    free: whether it evaluates no model
    """

    free: bool

    @property
    def rows_evaluated(self) -> int:
        """The number of rows that its model has evaluated so far."""

    def propose(
        self, job: StartDraft, stopped: Callable[[], bool]
    ) -> tuple[Proposal, ...] | None:
        """Return proposals below the job's path, parents before children, the best chain first.

        job: bounds them: at most `max_tokens` tokens, `max_depth` levels and `branches` paths, none
            of `stop_ids`, none under the cutoffs; none that need a model with `free_only`
        stopped: is called between evaluations; True: the job is no longer wanted
        Returns None when `stopped()` returned True.
        """

    def close(self) -> None:
        """Release memory, models and threads. No method may be called afterwards."""


@runtime_checkable
class ReadsRows(Protocol):
    """A proposer that reads rows of the target."""

    def feed(self, rows: FeedDraft) -> None:
        """Take rows of accepted tokens; those of a lane may come more than once."""


class Anchor(Struct, frozen=True):
    """A row that is verified in this step.

    parent: index of an earlier anchor; -1: of the tip, which comes first
    token: vocabulary id
    """

    parent: int
    token: int


class HintRow(Struct, frozen=True):
    """A row whose result is input for a proposer.

    parent: index among the anchors and, after these, the earlier hints; its position follows its
        parent's
    token: vocabulary id, or that of a learned mask
    wanted: whether its choice is returned to the proposer
    sees: further sequence ids that it attends to (torch only)
    """

    parent: int
    token: int
    wanted: bool = True
    sees: tuple[int, ...] = ()


class InlineProposer(Protocol):
    """A proposer that the scheduler calls, and that learns from hint rows in the target's runs.

    Lanes have the numbers of `StartDraft.lane`.
    candidates: most proposals below a tip
    rows: most hints of a step
    paths: most paths of candidates and hints together
    chained: whether runs of speculative tokens may have hints of their own; several batches are
        then in flight
    """

    candidates: int
    rows: int
    paths: int
    chained: bool

    def opened(self, lane: int, tokens: Sequence[int]) -> None:
        """Add a lane with these tokens: a prompt, or the path of a lane that got a new number."""

    def accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the lane's path."""

    def propose(self, job: StartDraft) -> tuple[Proposal, ...]:
        """Return proposals below the job's path, parents before children.

        At most `job.max_tokens` and `job.max_depth` levels, none of `job.stop_ids`. May be empty.
        """

    def hints(self, lane: int, anchors: Sequence[Anchor], room: int, *, batch: int = 0,
              below: Sequence[int] | None = None) -> list[HintRow]:
        """Return hints for a run that verifies `anchors`.

        lane: its number
        anchors: rows of the run that hints may follow
        room: most hints
        batch: number of this batch of hints
        below: None: the first anchor is the tip. Otherwise the anchors are speculative tokens,
            without the tip; those without a parent among them follow the path continued by these
            tokens. Only `chained` proposers get anything but None
        """

    def learn(self, lane: int, choices: Sequence[Choice | None], *, batch: int = 0) -> None:
        """Record the target's choices after the anchors and hints of a batch.

        lane: its number
        choices: in the order of anchors and hints; None: not wanted, skipped, or no room for the
            row
        batch: its number
        Called once for each batch that was issued, in the order of issue.
        """

    def closed(self, lane: int) -> None:
        """Remove a lane that has ended; no effect on one that was never opened."""


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of tokens, or characters, that both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
