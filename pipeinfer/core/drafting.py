"""What the scheduler and a proposer say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class StartDraft:
    """Ask for proposals below a path.

    The path is the first `base` accepted tokens of the lane followed by `suffix`; `accepted`
    is the lane's own list, which only ever grows. max_depth bounds the levels, max_tokens the
    tokens in all; max_tokens 0 only brings the draft's cache up to the path. alternatives: how many
    alternatives of a drafted token are wanted besides. stop_ids are never proposed: they end the
    output when the target chooses them. shift: by how much the target's positions exceed those of
    the path.
    """

    job_id: int
    lane: int
    accepted: tuple[int, ...] | list[int]
    base: int
    suffix: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    max_depth: int
    branches: int
    p_min: float
    p_split: float
    stop_ids: frozenset[int]
    alternatives: int = 0
    shift: int = 0

ENOUGH = 0.6  #: a first guess as likely as that needs no second opinion


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token: `parent` indexes an earlier proposal of the batch, -1 is the tip.

    confidence: estimated probability that the target chooses it, given that its parent is.
    alternative: a second or later choice, below which nothing was drafted; these follow the others.
    """

    parent: int
    token: int
    confidence: float = 1.0
    alternative: bool = False
