"""Estimates the tokens per second of an arrangement of stages under a given load.

    way      seconds of a run from issue to result, in an empty pipeline
    slot     seconds after which the next run may follow: the time of the slowest stage, or of
             the cores that several stages share

A single request that decodes without speculation costs one way per token, so it gains from fewer
stages. Several requests, the chunks of a prompt and speculative tokens follow each other: they
cost one slot each, so they gain from more stages with cores of their own. A plan judged by only
one of the two is wrong for the other load. Pure: callers pass measured seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

from msgspec import Struct, field

from pipeinfer.core.policy import Policy
from pipeinfer.planning.partition import Split

Curve: TypeAlias = tuple[tuple[int, float], ...]
CHUNK = 64  #: rows of a prompt that travel together
LINK = 100e-6  #: seconds from a stage to the next one if not measured
_SIZES = (1, 2, 3, 4, 6, 8)  #: numbers of speculative tokens in a run that are compared
_HORIZON = 48  #: speculative tokens of a cycle that are computed one by one
_LONGEST = 512  #: assumed maximum of accepted speculative tokens in a row
_WIDEST = 8  #: rows of a run that a group of requests or a synchronous tree may have
_GROWTH = 0.9  #: twice the threads take 1 / 2**_GROWTH of the time
_MOST = 0.99  #: acceptance above it is treated as equal to it


class LoadMix(Struct, frozen=True):
    """A load on a pipeline.

    streams: concurrent requests.
    prompt_rows: prompt rows per output token. (Not a share of time, which would depend on the
        arrangement.)
    acceptance: of speculative tokens, 0 to 1.
    chunk: prompt rows in one run.
    """

    policy: Policy = Policy.ITERATIVE
    streams: int = 1
    prompt_rows: float = 0.0
    acceptance: float = 0.7
    chunk: int = CHUNK


class StageTime(Struct, frozen=True):
    """The times of a stage, alone on its cores.

    seconds: computing a run of one row.
    curve: (rows, time relative to one row), ascending.
    sums: seconds of the sums of a wide stage in a run of one row.
    row_sums: seconds of the sums for each further row.
    pool: name of the cores that it shares, "" for its own. threads: how many it keeps busy.
    """

    seconds: float
    curve: Curve = ()
    sums: float = 0.0
    row_sums: float = 0.0
    pool: str = ""
    threads: float = 1.0

    def computing(self, rows: int) -> float:
        """Return the seconds of computing, without sums."""
        return self.seconds * relative(self.curve, rows)

    def taken(self, rows: int) -> float:
        """Return the seconds for which a run of `rows` rows occupies the stage."""
        return self.computing(rows) + self.sums + self.row_sums * (rows - 1)


class Arrangement(Struct, frozen=True):
    """Stages in order, and the costs around them.

    link: seconds of one hop. row_link: seconds more for each further row.
    draft: seconds per proposal, 0 if it costs nothing.
    cores: of each pool that stages share.
    """

    stages: tuple[StageTime, ...]
    link: float = LINK
    row_link: float = 0.0
    draft: float = 0.0
    cores: Mapping[str, float] = field(default_factory=dict)

    def way(self, rows: int = 1) -> float:
        """Return the seconds from issue to result in an empty pipeline."""
        hops = (len(self.stages) + 1) * (self.link + self.row_link * (rows - 1))
        return sum(stage.taken(rows) for stage in self.stages) + hops

    def slot(self, rows: int = 1) -> float:
        """Return the seconds after which the next run may follow."""
        work: dict[str, float] = {}
        for stage in self.stages:
            if stage.pool:
                busy = stage.computing(rows) * stage.threads
                work[stage.pool] = work.get(stage.pool, 0.0) + busy
        shared = (seconds / self.cores[pool] for pool, seconds in work.items()
                  if pool in self.cores)
        return max(*(stage.taken(rows) for stage in self.stages), *shared, 0.0)


def relative(curve: Curve, rows: int) -> float:
    """Return the time of a run relative to one of a single row.

    It is interpolated linearly, and extrapolated beyond the last point. Without a curve further
    rows cost nothing.
    """
    low, high = (1, 1.0), (1, 1.0)
    for point in curve:
        low, high = high, point
        if rows <= point[0]:
            break
    if high[0] == low[0]:
        return high[1]
    return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])


def tokens_per_second(arrangement: Arrangement, mix: LoadMix) -> float:
    """Return the output tokens per second of all requests together, including their prompts'
    time."""
    rate = _generating(arrangement, mix)
    if mix.prompt_rows <= 0:
        return rate
    prompt = mix.prompt_rows * arrangement.slot(mix.chunk) / mix.chunk
    return 1 / (1 / rate + prompt)


def score(arrangement: Arrangement, mixes: Sequence[LoadMix]) -> float:
    """Return the geometric mean of the tokens per second under each of the loads."""
    logs = [math.log(max(tokens_per_second(arrangement, mix), 1e-12)) for mix in mixes]
    return math.exp(math.fsum(logs) / len(logs))


def _generating(arrangement: Arrangement, mix: LoadMix) -> float:
    streams = max(mix.streams, 1)
    rates = [plain(arrangement, streams, size) for size in range(1, min(streams, _WIDEST) + 1)]
    if mix.policy is Policy.SPECULATIVE:
        rates += [alternating(arrangement, mix.acceptance, size, streams)
                  for size in range(1, _WIDEST)]
    elif mix.policy is not Policy.ITERATIVE:
        rates += [overlapping(arrangement, min(mix.acceptance, _MOST), size, join=join,
                              streams=streams) for size in _SIZES for join in (False, True)]
    return max(rates)


# --- tokens per second of all requests, their prompts not counted -----------------------------


class Pipeline(Protocol):
    """The times of a pipeline, in seconds. draft: per proposal"""

    @property
    def draft(self) -> float: ...

    def way(self, rows: int) -> float:
        """Return the time from issue to result in an empty pipeline."""

    def slot(self, rows: int) -> float:
        """Return the time after which the next run may follow."""


def plain(pipeline: Pipeline, streams: int, size: int) -> float:
    """Return the speed of plain decoding with `size` requests in each run."""
    return streams / max(pipeline.way(size), -(-streams // size) * pipeline.slot(size))


def alternating(pipeline: Pipeline, acceptance: float, size: int, streams: int = 1) -> float:
    """Return the speed of synchronous speculation with chains of `size` tokens and a run for each
    request."""
    tokens = sum(acceptance**level for level in range(size + 1))
    cycle = pipeline.way(size + 1) + size * pipeline.draft
    return streams * tokens / max(cycle, streams * pipeline.slot(size + 1))


def overlapping(pipeline: Pipeline, acceptance: float, size: int, *, join: bool = False,
                streams: int = 1, credit: int = 1 << 30, alternatives: int = 0,
                second: float = 0.0) -> float:
    """Return the speed of continuous speculation with runs of `size` speculative tokens.

    acceptance: of first proposals. join: whether the first run joins the tip
    credit: most runs in flight. alternatives: most alternatives for each position
    second: how often the next alternative is right where a first proposal is wrong

    A cycle begins with an accepted token's run and ends when the first wrong token is found. Runs
    follow each other at slots, or as fast as the draft proposes; those of other requests take
    slots between, and all together cannot have more rows than the pipeline can process.
    """
    depth, hits = _composition(round(acceptance, 2), size, alternatives, round(second, 2))
    slot, way, drafted = streams * pipeline.slot(size), pipeline.way(size), size * pipeline.draft
    rows, guesses = (1 + size, depth) if join else (1, 0)
    step = busy = streams * pipeline.slot(rows)  # busy: useful runs, and those of other requests
    issues = [drafted if join else 0.0]
    results = [issues[0] + pipeline.way(rows)]
    reach, tokens, seconds = 1.0, 0.0, 0.0
    for right in range(_HORIZON):
        while guesses < right:  # the token after `right - 1` accepted ones is in a further run
            run = len(issues)
            if join or run > 1:
                drafted += depth * pipeline.draft
            issue = max(drafted, issues[-1] + step, results[run - credit] if run >= credit else 0.0)
            step, busy = slot, busy + slot
            issues.append(issue)
            results.append(max(issue + way, results[-1] + slot / streams))
            guesses += depth
        share = reach * (1.0 - acceptance)
        tokens += share * (1 + right + hits[right % depth])
        seconds += share * max(results[-1], busy)
        reach *= acceptance
    # Beyond the horizon a streak continues at the pipeline's steady rate.
    pace = max(slot, depth * pipeline.draft, way / credit) / depth
    further = acceptance / max(1.0 - acceptance, 1.0 / _LONGEST)
    tokens += reach * (1 + _HORIZON + further)
    seconds += reach * (max(results[-1], busy) + further * pace)
    speed = streams * tokens / seconds
    return min(speed, streams * size / slot) if streams > 1 else speed


@lru_cache(maxsize=4096)
def _composition(acceptance: float, size: int, alternatives: int, second: float
                 ) -> tuple[int, tuple[float, ...]]:
    """The composition of a run of `size` rows that is filled with the most probable tokens.

    Returns the levels of first proposals among them, and for each level how likely an alternative
    in the same run is the token where the first proposal is wrong.
    """
    offers: list[tuple[float, int, float]] = []  # probability, level, of an alternative
    for level in range(size):
        reach, left = acceptance**level, 1.0 - acceptance
        offers.append((reach * acceptance, level, 0.0))
        for _ in range(alternatives):
            offers.append((reach * left * second, level, left * second))
            left *= 1.0 - second
    offers.sort(key=lambda offer: -offer[0])
    kept = offers[:size]
    depth = max(1, len({offer[1] for offer in kept if offer[2] == 0.0}))
    wrong = max(1.0 - acceptance, 1e-9)
    return depth, tuple(
        sum(offer[2] for offer in kept if offer[1] == level) / wrong for level in range(depth)
    )


# --- ranks ------------------------------------------------------------------------------------


class Seat(Struct, frozen=True):
    """The place where a rank computes: host and number of own cores."""

    host: str
    cores: int = 1


class Judge(Struct, frozen=True):
    """Compares splits over ranks by `score`.

    seats: of each rank. cores: of each host, as far as stages may use them.
    mixes: the loads to judge by. curve: of all stages. link, draft: see `Arrangement`.
    grows: whether a rank takes over the threads of ranks of its host that are left out.
    using: present threads of ranks that do not use just their own.
    """

    seats: Mapping[int, Seat]
    cores: Mapping[str, float]
    mixes: tuple[LoadMix, ...] = (LoadMix(),)
    curve: Curve = ()
    link: float = LINK
    draft: float = 0.0
    grows: bool = False
    using: Mapping[int, int] = field(default_factory=dict)

    def threads(self, ranks: Sequence[int]) -> dict[int, int]:
        """Return the threads of each rank if these ranks alone hold stages."""
        return granted(self.seats, self.cores, ranks) if self.grows else {
            rank: self.seats[rank].cores for rank in ranks if rank in self.seats}

    def faster(self, rank: int, holders: Sequence[int] | None) -> float:
        """Return the factor of a rank's seconds on its own cores if these ranks hold stages;
        None: at present."""
        if rank not in self.seats:
            return 1.0
        own = self.seats[rank].cores
        used = self.using if holders is None else self.threads(holders)
        return float((own / (used.get(rank) or own)) ** _GROWTH)

    def arrangement(self, seconds: Sequence[float], teams: Sequence[Sequence[int]],
                    sums: Sequence[float] = (), *, now: bool = False) -> Arrangement:
        """Return stages as an arrangement.

        seconds: of computing, of the slowest member of each stage.
        teams: the ranks of each stage.
        sums: seconds of the sums of each stage, if it has several members. (): none.
        now: with the present threads.
        """
        threads = self.threads([rank for team in teams for rank in team])
        if now:
            threads = {rank: self.using.get(rank) or self.seats[rank].cores for rank in threads}
        stages = []
        for k, (took, team) in enumerate(zip(seconds, teams, strict=True)):
            pools = {self.seats[rank].host if rank in self.seats else "" for rank in team}
            stages.append(StageTime(  # cores count where all members share those of one host
                took, self.curve, sums[k] if sums and len(team) > 1 else 0.0,
                pool=pools.pop() if len(pools) == 1 else "",
                threads=sum(threads.get(rank, 0) for rank in team)))
        return Arrangement(tuple(stages), self.link, draft=self.draft, cores=self.cores)

    def rate(self, seconds: Sequence[float], teams: Sequence[Sequence[int]],
             sums: Sequence[float] = (), *, now: bool = False) -> float:
        """Return the tokens per second of stages, see `arrangement` and `score`."""
        return score(self.arrangement(seconds, teams, sums, now=now), self.mixes)

    def __call__(self, split: Split, ranks: Sequence[int], *, now: bool = False) -> float:
        """Return the tokens per second of a split over plain stages. ranks: of its members."""
        used = [i for i, _, _ in split.ranges()]
        return self.rate([split.seconds[i] for i in used], [[ranks[i]] for i in used], now=now)


def granted(seats: Mapping[int, Seat], cores: Mapping[str, float], ranks: Sequence[int]
            ) -> dict[int, int]:
    """Return the threads of each rank when ranks share the cores of their hosts evenly; never
    fewer than a rank's own."""
    found = {}
    for rank in ranks:
        if rank in seats:
            seat = seats[rank]
            here = sum(other in seats and seats[other].host == seat.host for other in ranks)
            found[rank] = max(seat.cores, int(cores.get(seat.host, 0) // here))
    return found


def expected(policy: Policy, parallel: int, acceptance: float = 0.7) -> tuple[LoadMix, ...]:
    """Return the loads to plan for before any is observed.

    They are one request and `parallel` requests, with prompts twice as long as their answers.
    """
    counts = sorted({1, max(parallel, 1)})
    return tuple(LoadMix(policy, streams, 2.0, acceptance) for streams in counts)
