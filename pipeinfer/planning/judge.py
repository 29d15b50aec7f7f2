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
from typing import TypeAlias

from msgspec import Struct, field

from pipeinfer.core.policy import Policy
from pipeinfer.planning.partition import Split

Curve: TypeAlias = tuple[tuple[int, float], ...]
CHUNK = 64  #: rows of a prompt that travel together
LINK = 100e-6  #: seconds from a stage to the next one if not measured
_SIZES = (1, 2, 3, 4, 6, 8)  #: numbers of speculative tokens in a run that are compared
_HORIZON = 32  #: speculative tokens of a cycle that are computed one by one
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


def gain(acceptance: float) -> float:
    """Return the average number of speculative tokens accepted in a row. acceptance: 0 to 1."""
    kept = min(max(acceptance, 0.0), _MOST)
    return kept / (1 - kept)


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
    plain = max(_in_groups(arrangement, streams, size)
                for size in range(1, min(streams, _WIDEST) + 1))
    if mix.policy is Policy.ITERATIVE:
        return plain
    if mix.policy is Policy.SPECULATIVE:
        return max(plain, *(_in_turns(arrangement, mix.acceptance, streams, size)
                            for size in range(1, _WIDEST)))
    return max(plain, *(_guessing(arrangement, mix.acceptance, streams, size, join)
                        for size in _SIZES for join in (False, True)))


def _in_groups(arrangement: Arrangement, streams: int, size: int) -> float:
    """Tokens per second of plain decoding with `size` requests in each run."""
    runs = -(-streams // size)
    return streams / max(arrangement.way(size), runs * arrangement.slot(size))


def _in_turns(arrangement: Arrangement, acceptance: float, streams: int, size: int) -> float:
    """Tokens per second of synchronous speculation with chains of `size` tokens, a run per
    request."""
    tokens = sum(acceptance**level for level in range(size + 1))
    cycle = arrangement.way(size + 1) + size * arrangement.draft
    return streams * tokens / max(cycle, streams * arrangement.slot(size + 1))


def _guessing(arrangement: Arrangement, acceptance: float, streams: int, size: int, join: bool
              ) -> float:
    """Tokens per second of continuous speculation with runs of `size` speculative tokens, the
    first of which may join the tip.

    A cycle begins with an accepted token's run and ends when the first wrong token is found. Runs
    follow each other at slots, or as fast as the draft proposes; those of other requests take
    slots between, and all together cannot have more rows than the pipeline can process.
    """
    acceptance = min(acceptance, _MOST)
    slot, per_run = streams * arrangement.slot(size), size * arrangement.draft
    rows, guesses = (1 + size, size) if join else (1, 0)
    drafted = per_run
    issue = drafted if join else 0.0
    done = issue + arrangement.way(rows)
    step, way = streams * arrangement.slot(rows), arrangement.way(size)
    busy = step  # what the cycle's useful runs and those of other requests take
    reach, tokens, seconds = 1.0, 0.0, 0.0
    for right in range(_HORIZON):
        while guesses < right:
            if join or guesses:
                drafted += per_run
            issue = max(drafted, issue + step)
            step = slot
            busy += slot
            done = max(issue + way, done + slot / streams)
            guesses += size
        share = reach * (1 - acceptance)
        tokens += share * (1 + right)
        seconds += share * max(done, busy)
        reach *= acceptance
    further = gain(acceptance)
    tokens += reach * (1 + _HORIZON + further)
    seconds += reach * (max(done, busy) + further * max(slot, per_run) / size)
    return min(streams * tokens / seconds, streams * size / slot)


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
