"""The recent and the best time of each stage and member for a run, which show slow ranks.

Runs of several rows are scaled to one row by the cost of rows (`exact_width.Widths.curve`). A
stage's time is the mean of its last runs without the few slowest; time in which it waited for a
core of another stage (`own_seconds`), or its leader for other members, is excluded. Members of a
stage process the same runs, so their reports give the time of each relative to the leader's,
whatever the runs were. The member of a plain stage reports nothing: it takes the stage's time and
waits for no other. `LoadWatch` counts requests, prompt rows and tokens meanwhile. Pure.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Spans
from pipeinfer.core.policy import Policy
from pipeinfer.planning.judge import LoadMix

WINDOW = 64  #: runs whose mean is the time of a stage
_FEW = 16  #: least number of runs for a time
_OTHERS = 2  #: stored runs that are too wide for the curve (prompts), relative to the others
_LOOKS = 5  #: reports that a member's time rests on
_LEAST = 1e-9  #: seconds; less is nothing


class Share(Struct, frozen=True):
    """The pool of cores that a stage computes on, and the threads that it keeps busy."""

    pool: str
    threads: int = 1


class StagePace:
    """The times of the stages of a grid and of their members.

    curve: (rows, time relative to one row), rows ascending.
    shares, cores: which stages share which cores, see `own_seconds`; without them none do.
    planned: seconds of each stage by the plan, where its ranks were measured.
    """

    def __init__(self, grid: Grid, curve: Sequence[tuple[int, float]],
                 shares: Sequence[Share] = (), cores: Mapping[str, float] | None = None,
                 planned: Sequence[float] = ()) -> None:
        self._grid, self._n = grid, grid.n_stages
        self._runs: deque[tuple[int, Spans]] = deque(maxlen=WINDOW)
        self._others: deque[Spans] = deque(maxlen=WINDOW * _OTHERS)
        self._reports: dict[int, deque[tuple[int, float, float]]] = {}
        self._shares = shares or [Share(str(stage)) for stage in range(self._n)]
        self._cores, self._planned = cores or {}, planned
        self._best = [float("inf")] * self._n
        self._lately: list[float] = [0.0] * self._n
        self._counted = self._seen = 0
        self._rows, self._costs = zip(*((1, 1.0), *curve), strict=True)

    def saw(self, rows: int, spans: Spans) -> None:
        """Record a run of `rows` rows that has passed all stages. spans: as in
        `messages.Decode`."""
        if len(spans) != self._n:
            return
        if rows > self._rows[-1]:
            self._others.append(spans)  # too wide to scale, but takes cores from other runs
            return
        self._runs.append((rows, spans))
        self._seen += 1
        if self._seen % _FEW == 0:
            self._best = [min(pair) for pair in zip(self._best, self.seconds, strict=True)]

    def reported(self, node: int | None, runs: int, compute: float, waited: float) -> None:
        """Record the report of a member: totals of runs, and of seconds of computing and waiting.

        A lost report costs nothing, as the next one has totals again. node: None if the member
        has left the grid.
        """
        if node is not None:
            self._reports.setdefault(node, deque(maxlen=_LOOKS)).append((runs, compute, waited))

    @property
    def known(self) -> bool:
        """Whether there have been enough runs, and reports of each member of each wide stage."""
        return self._seen >= _FEW and all(
            width == 1 or self._window(stage) is not None
            for stage, width in enumerate(self._grid.widths, 1))

    @property
    def settled(self) -> bool:
        """Whether the times rest on a full window of runs over the present stages."""
        return self._seen >= WINDOW

    @property
    def seconds(self) -> list[float]:
        """The recent seconds of each stage for a run of one row; zeros until there are enough
        runs."""
        if self._seen >= _FEW and self._counted != self._seen:
            self._counted, self._lately = self._seen, self._figures()
        return self._lately

    @property
    def members(self) -> list[tuple[float, float]]:
        """The seconds of computing and of waiting of each node in a run of one row; empty until
        members have reported."""
        found, some = [], False
        for stage, took in enumerate(self.seconds, 1):
            relative = self._relative(stage)
            some |= bool(relative)
            found += [(took * compute, took * waited) for compute, waited in relative] or [
                (took, 0.0)] * self._grid.widths[stage - 1]
        return found if some else []

    @property
    def slowdown(self) -> list[float]:
        """The time of each stage relative to its best, or where that is more, to the plan: how
        much more than the plan it takes than the stage that keeps to it best. 1 until known."""
        drift = self.drift
        if len(self._planned) != self._n or not self.settled or min(self.seconds) <= 0:
            return drift
        times = [now / planned for now, planned in zip(self.seconds, self._planned, strict=True)]
        return [max(one, time / min(times)) for one, time in zip(drift, times, strict=True)]

    @property
    def drift(self) -> list[float]:
        """The time of each stage relative to its best; 1 until known."""
        return [now / best if 0 < best < float("inf") else 1.0
                for now, best in zip(self.seconds, self._best, strict=True)]

    def _figures(self) -> list[float]:
        every = [spans for _, spans in self._runs] + list(self._others)
        own = own_seconds(
            [Interval(stage, start, seconds - waited) for spans in every
             for stage, (start, seconds, waited) in enumerate(spans)],
            self._shares, self._cores)
        costs = np.interp([rows for rows, _ in self._runs], self._rows, self._costs).tolist()
        found = []
        for stage in range(self._n):
            last = sorted(own[k * self._n + stage] / cost for k, cost in enumerate(costs))
            found.append(statistics.fmean(last[:max(1, len(last) - len(last) // _FEW)]))
        return found

    def _relative(self, stage: int) -> list[tuple[float, float]]:
        """Return the computing and the waiting of each member of a stage, relative to the
        leader's computing in the same runs; empty until members have reported."""
        window = self._window(stage)
        if window is None:
            return []
        took = []
        for node in self._grid.members(stage):
            reports = {runs: rest for runs, *rest in self._reports[node]}
            took.append(tuple(b - a for a, b in zip(*(reports[runs] for runs in window),
                                                    strict=True)))
        base = took[0][0]
        if base < _LEAST:
            return []
        return [(max(compute, 0.0) / base, max(waited, 0.0) / base) for compute, waited in took]

    def _window(self, stage: int) -> tuple[int, int] | None:
        """The first and the last number of runs for which all members of a stage have reported."""
        told = [{runs for runs, _, _ in self._reports.get(node, ())}
                for node in self._grid.members(stage)]
        common = set.intersection(*told)
        return (min(common), max(common)) if len(common) > 1 else None


# --- computing without waiting for cores ------------------------------------------------------


class Interval(Struct, frozen=True):
    """A period in which a stage worked; start: seconds since any epoch."""

    stage: int
    start: float
    seconds: float


def own_seconds(intervals: Sequence[Interval], shares: Sequence[Share],
                cores: Mapping[str, float]) -> list[float]:
    """Return, for each interval, its duration if the stage had had the cores to itself.

    Stages of one host with fewer cores than threads delay each other, so the duration of a run
    does not show the speed of the stage. While such stages work at the same time, each progresses
    at the rate of cores over threads; each instant counts at that rate. All times of one pool come
    from one host's clock.

    shares: by stage. cores: of each pool; a pool that is missing has enough.
    """
    found = [one.seconds for one in intervals]
    pools: dict[str, list[int]] = {}
    for index, one in enumerate(intervals):
        pools.setdefault(shares[one.stage].pool, []).append(index)
    for pool, members in pools.items():
        present = {intervals[index].stage for index in members}
        if pool in cores and sum(shares[stage].threads for stage in present) > cores[pool]:
            _sweep(intervals, shares, cores[pool], members, found)
    return found


def _sweep(intervals: Sequence[Interval], shares: Sequence[Share], cores: float,
           members: Sequence[int], found: list[float]) -> None:
    """Go from each start or end to the next one, and add the progress of the working stages."""
    starts = sorted(members, key=lambda index: intervals[index].start)
    ends: list[tuple[float, int]] = []
    own = dict.fromkeys(members, 0.0)
    at, threads, following = 0.0, 0, 0
    while ends or following < len(starts):
        opens = intervals[starts[following]].start if following < len(starts) else float("inf")
        now = min(opens, ends[0][0]) if ends else opens
        rate = min(1.0, cores / threads) if threads else 1.0
        for _, index in ends:
            own[index] += (now - at) * rate
        at = now
        if ends and ends[0][0] <= opens:
            _, index = heapq.heappop(ends)
            threads -= shares[intervals[index].stage].threads
        else:
            index, following = starts[following], following + 1
            one = intervals[index]
            heapq.heappush(ends, (one.start + one.seconds, index))
            threads += shares[one.stage].threads
    for index, seconds in own.items():
        found[index] = seconds


_STEP = 20.0  #: seconds of work between two marks
_MARKS = 10  #: stored marks: the load before the oldest does not count
_ALIKE = 1.25  #: loads whose streams and prompts are within this factor can be compared
_FEW_TOKENS = 64  #: fewer give no speed


class Seen(Struct, frozen=True):
    """Sums over a period: seconds with runs in flight, streams times seconds, prompt rows,
    output tokens."""

    busy: float = 0.0
    streams: float = 0.0
    prompts: float = 0.0
    tokens: int = 0

    def since(self, then: Seen) -> Seen:
        """Return the part after `then`."""
        return Seen(self.busy - then.busy, self.streams - then.streams,
                    self.prompts - then.prompts, self.tokens - then.tokens)

    @property
    def speed(self) -> float:
        """Tokens per second of work, 0 if there were too few tokens."""
        return self.tokens / self.busy if self.tokens >= _FEW_TOKENS and self.busy > 0 else 0.0

    def mix(self, policy: Policy, acceptance: float) -> LoadMix:
        """Return the observed load as a load to plan for."""
        streams = max(1, round(self.streams / self.busy)) if self.busy > 0 else 1
        prompts = self.prompts / self.tokens if self.tokens > 0 else 0.0
        return LoadMix(policy, streams, prompts, acceptance)

    def like(self, other: Seen) -> bool:
        """Whether both loads are so similar that their speeds can be compared."""
        if not self.speed or not other.speed:
            return False
        one, two = (seen.mix(Policy.ITERATIVE, 0.0) for seen in (self, other))
        near = [(one.streams, two.streams), (1 + one.prompt_rows, 1 + two.prompt_rows)]
        return all(max(pair) <= min(pair) * _ALIKE for pair in near)


class LoadWatch(Struct):
    """Sums up the load; must be called at every change of the runs in flight. worked: seconds
    with runs in flight since the beginning."""

    worked: float = 0.0
    _sum: Seen = field(default_factory=Seen)
    _marks: deque[Seen] = field(default_factory=lambda: deque(maxlen=_MARKS))
    _streams: int = 0
    _since: float = 0.0

    def running(self, streams: int, when: float) -> None:
        """Record that from `when` (seconds) on so many requests have runs in flight."""
        passed = max(0.0, when - self._since) if self._streams else 0.0
        self._sum = Seen(self._sum.busy + passed, self._sum.streams + passed * self._streams,
                         self._sum.prompts, self._sum.tokens)
        self._streams, self._since = streams, when
        self.worked += passed

    def prompt(self, rows: int) -> None:
        """Record prompt rows that were issued."""
        self._sum = Seen(self._sum.busy, self._sum.streams, self._sum.prompts + rows,
                         self._sum.tokens)

    def lately(self, tokens: int) -> Seen:
        """Return the load of the last minutes of work. tokens: output tokens so far."""
        now = Seen(self._sum.busy, self._sum.streams, self._sum.prompts, tokens)
        if not self._marks:
            self._marks.append(Seen())
        found = now.since(self._marks[0])
        if now.busy - self._marks[-1].busy >= _STEP:
            self._marks.append(now)
        return found

    def restart(self, tokens: int) -> None:
        """Discard the past, because the stages have changed."""
        self._sum = Seen(tokens=tokens)
        self._marks.clear()
        self._marks.append(self._sum)
