"""Measures the members of wide stages and estimates other placements of their slices.

`balance` decides and moves; `planning.regrid` searches placements. This module changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.cluster.job import RunningJob
from pipeinfer.planning.judge import Arrangement, Judge, StageTime, score
from pipeinfer.planning.measured_grid import slice_shares
from pipeinfer.planning.regrid import Rate
from pipeinfer.planning.replan import Holding, MoveVerdict
from pipeinfer.planning.wide import stages_of


class GridBalance:
    """The measurements and estimates of a session whose stages are cut into slices."""

    def __init__(self, session: RunningJob) -> None:
        self._session = session

    @property
    def known(self) -> bool:
        """Whether every member has reported enough times."""
        times = self._session.head.times
        return times.pace.known and times.members.known

    @property
    def slowdown(self) -> list[float]:
        """Slowdown of each member relative to its best time; empty until known."""
        times = self._session.head.times
        return times.members.slowdown(times.pace.seconds) if self.known else []

    def better(self, judge: Judge) -> MoveVerdict:
        """Return the best placement of the present slices."""
        held = self._session.assembly.held
        model = self._session.loaded.job.model
        cuts = {one.cut for one in held if one.cut}
        return self._session.assembly.better_grid(
            self._seconds, {cut: slice_shares(model, cut) for cut in cuts}, self._rate(judge))

    def now(self, judge: Judge) -> float:
        """Return the tokens per second of the present stages, estimated from their present
        times."""
        teams = stages_of(self._session.assembly.held)
        left = iter(self._seconds)
        return self._rate(judge)([max(next(left) for _ in team) for team in teams], teams)

    @property
    def _seconds(self) -> list[float]:
        """Seconds that each member computes for a run of one row."""
        times = self._session.head.times
        seconds = times.pace.seconds
        return [computing for computing, _ in times.members.figures(seconds)] or seconds

    def _sums(self) -> list[float]:
        """Return, for each stage, the seconds that a run spends in sums: the wait of its least
        waiting member."""
        times = self._session.head.times
        figures = times.members.figures(times.pace.seconds)
        found, node = [], 0
        for width in times.members.grid.widths:
            found.append(min((waiting for _, waiting in figures[node:node + width]), default=0.0))
            node += width
        return found

    def _rate(self, judge: Judge) -> Rate:
        sums = self._sums()

        def rate(seconds: Sequence[float], grid: Sequence[Sequence[Holding]]) -> float:
            stages = []
            for took, waits, team in zip(seconds, sums, grid, strict=True):
                seats = [judge.seats.get(one.rank) for one in team]
                pools = {seat.host if seat else "" for seat in seats}
                stages.append(StageTime(  # cores count where all members share those of one host
                    took, judge.curve, waits if len(team) > 1 else 0.0,
                    pool=pools.pop() if len(pools) == 1 else "",
                    threads=sum(seat.cores for seat in seats if seat)))
            return score(Arrangement(tuple(stages), judge.link, draft=judge.draft,
                                     cores=judge.cores), judge.mixes)

        return rate
