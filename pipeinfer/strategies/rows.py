"""The seam for proposers that learn from rows of their own in the target's runs.

Such a proposer puts *probes* below the token that is verified next, and what the target chooses
after them tells it what to propose later (a window of lookahead, BiTA's masks). It is called inline
by the scheduler's drafting half, so it is pure and quick: no thread, no model. It can not change
the output, only how soon it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeinfer.core import Choice
from pipeinfer.events import StartDraft
from pipeinfer.tree import Proposal


@dataclass(frozen=True, slots=True)
class Anchor:
    """A row that is verified in this step. parent: index of an earlier one, -1 of the tip, which
    comes first."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """A row that is there for hints. parent: index among the anchors and, after these, the probes
    before it; its position follows its parent's. wanted: its choice is asked for. sees: sequence
    ids that it looks through besides its own (torch only)."""

    parent: int
    token: int
    wanted: bool = True
    sees: tuple[int, ...] = ()


class RowProposer(Protocol):
    """Proposes from what the target chose after its probes. Lanes are named by `StartDraft.lane`.

    candidates: most tokens that it proposes below a tip. rows: most probes of a step. paths: most
    paths of both together.
    """

    candidates: int
    rows: int
    paths: int

    def opened(self, lane: int, tokens: Sequence[int]) -> None:
        """A lane starts with these tokens (a prompt, or a path that had another name before)."""

    def accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """The lane's path has grown by these."""

    def propose(self, job: StartDraft) -> tuple[Proposal, ...]:
        """Proposals below the job's path, parents before children; at most `job.max_tokens` and
        `job.max_depth` levels, none of `job.stop_ids`. Empty: it knows nothing here."""

    def probes(self, lane: int, anchors: Sequence[Anchor], room: int) -> list[ProbeRow]:
        """Probes for a step that verifies `anchors`, at most `room`."""

    def learn(self, lane: int, choices: Sequence[Choice | None]) -> None:
        """What was chosen after the anchors and the probes of the last `probes`, in their order;
        None: not asked for, or there was no room for the row. Follows each `probes` that was
        answered."""

    def closed(self, lane: int) -> None:
        """The lane has ended. Harmless for one that was never opened."""
