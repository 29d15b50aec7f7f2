"""Who is hit: ranks by what they are in a grid of stages and members. Knows no job."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pipeinfer.core.grid import Grid

VICTIMS = ("any", "leader", "member", "stage")


@dataclass(frozen=True, slots=True)
class Victims:
    """grid: of the ranks from 1 on, as the job starts; None for stages of one rank each. who: one
    of VICTIMS: any rank that holds layers, the leader of a stage, one of its other members, or all
    members of a stage at once."""

    grid: Grid | None = None
    who: str = "any"

    @property
    def wide(self) -> bool:
        """Whether a stage has several members."""
        return self.grid is not None and self.grid.is_wide

    def name(self, rank: int) -> str:
        """A rank, and what it is."""
        if self.grid is None or not 0 < rank <= self.grid.n_nodes:
            return f"rank {rank}"
        port = self.grid.name(rank)
        what = f"member {port.member}" if port.member else "leader"
        return f"rank {rank} ({what} of stage {port.stage})"

    def pick(self, holders: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
        """Whom to hit, and whom to hit later where that is wanted."""
        if self.grid is None or self.who == "any":
            first, *second = rng.sample(holders, min(2, len(holders)))
            return [first], second
        if self.who == "stage":
            stage = rng.randint(1, self.grid.n_stages)
            hit = [rank for rank in self.grid.members(stage) if rank in holders]
        else:
            hit = [rng.choice([rank for rank in self._alike() if rank in holders] or [*holders])]
        others = [rank for rank in holders if rank not in hit]
        return hit, rng.sample(others, min(1, len(others)))

    def pair(self, holders: Sequence[int], rng: random.Random) -> tuple[int, int]:
        """Two that speak to each other: members of one stage, else stages one after the other."""
        if self.grid is None or not self.wide:
            first = rng.randrange(len(holders) - 1)
            return holders[first], holders[first + 1]
        wide = [stage for stage in range(1, self.grid.n_stages + 1)
                if len(self.grid.members(stage)) > 1]
        one, other = rng.sample(self.grid.members(rng.choice(wide)), 2)
        return one, other

    def _alike(self) -> list[int]:
        assert self.grid is not None
        leaders = self.grid.leaders
        return [node for node in range(1, self.grid.n_nodes + 1)
                if (node in leaders) == (self.who == "leader")]


ANYONE = Victims()
