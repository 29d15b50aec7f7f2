"""The recent computing and waiting times of the members of wide stages.

Members of a stage process the same runs, so their computing times can be compared, whatever the
runs were. The time of a run of one row comes from the stage (`StagePace`), and a member's share of
it from here. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeinfer.core.grid import Grid

_LOOKS = 5  #: reports that a figure rests on
_LEAST = 1e-9  #: seconds; less is nothing


class MemberPace:
    """The times of all nodes of a grid. Reports are running totals, so a lost report costs
    nothing."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._seen: dict[int, deque[tuple[int, float, float]]] = {}
        self._best: dict[int, float] = {}

    def saw(self, node: int | None, runs: int, compute: float, waited: float) -> None:
        """Record the totals of a node: runs, and seconds of computing and waiting. node: None if
        it has left the grid."""
        if node is not None:
            self._seen.setdefault(node, deque(maxlen=_LOOKS)).append((runs, compute, waited))

    @property
    def known(self) -> bool:
        """Whether there are times for each member of each wide stage."""
        return all(self._window(stage) is not None for stage in range(1, self.grid.n_stages + 1)
                   if self.grid.widths[stage - 1] > 1)

    def shares(self, stage: int) -> list[tuple[float, float]]:
        """Return seconds of computing and of waiting for each member of a stage, relative to the
        leader's computing in the same runs; empty until known."""
        window = self._window(stage)
        if window is None:
            return []
        took = []
        for node in self.grid.members(stage):
            reports = {runs: rest for runs, *rest in self._seen[node]}
            took.append(tuple(b - a for a, b in zip(*(reports[runs] for runs in window),
                                                    strict=True)))
        base = took[0][0]
        if base < _LEAST:
            return []
        return [(max(compute, 0.0) / base, max(waited, 0.0) / base) for compute, waited in took]

    def figures(self, seconds: Sequence[float]) -> list[tuple[float, float]]:
        """Return, for each node, the seconds of computing and of waiting in a run of one row.

        seconds: computing of each stage's leader. Empty until something is known.
        """
        found, some = [], False
        for stage, (width, took) in enumerate(zip(self.grid.widths, seconds, strict=False), 1):
            shares = self.shares(stage)
            some |= bool(shares)
            found += [(took * compute, took * waited) for compute, waited in shares] or [
                (took, 0.0)] * width
        return found if some else []

    def slowdown(self, seconds: Sequence[float]) -> list[float]:
        """Return each node's computing time relative to its best so far; empty until known.

        seconds: as in `figures`.
        """
        now = [computing for computing, _ in self.figures(seconds)] if min(seconds) > 0 else []
        for node, took in enumerate(now, 1):
            self._best[node] = min(took, self._best.get(node, took))
        return [took / self._best[node] for node, took in enumerate(now, 1)]

    def _window(self, stage: int) -> tuple[int, int] | None:
        """The first and the last number of runs for which all members of a stage have reported."""
        told = [{runs for runs, _, _ in self._seen.get(node, ())}
                for node in self.grid.members(stage)]
        common = set.intersection(*told)
        return (min(common), max(common)) if len(common) > 1 else None
