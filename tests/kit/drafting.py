"""Jobs for proposers, and a proposer that always says the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeinfer.core.drafting import Prefix, Proposal, StartDraft
from pipeinfer.core.types import SamplingParams


def job(accepted: Iterable[int], suffix: Iterable[int] = (), *, depth: int = 4, **changes: Any
        ) -> StartDraft:
    """A job for a chain of `depth` tokens behind accepted ones and a suffix; changes: its fields.
    """
    path = list(accepted)
    values: dict[str, Any] = {
        "job_id": 1, "lane": 0, "params": SamplingParams(), "max_tokens": depth,
        "max_depth": depth, "branches": 1, "p_min": 0.0, "p_split": 0.2, "stop_ids": frozenset()}
    return StartDraft(accepted=Prefix(path), base=len(path), suffix=tuple(suffix),
                      **(values | changes))


class Fixed:
    """A proposer of these tokens. asked: how often; -1: it was closed."""

    rows_evaluated = 1

    def __init__(self, *proposals: Proposal, free: bool = False) -> None:
        self.proposals, self.free, self.asked = proposals, free, 0

    def propose(self, job: StartDraft, stopped: object) -> tuple[Proposal, ...]:
        self.asked += 1
        return self.proposals

    def close(self) -> None:
        self.asked = -1
