"""Separates a stage's computing time from its waiting for cores that other stages use.

Stages of one host with fewer cores than threads delay each other, so the duration of a run does
not show the speed of the stage. While such stages work at the same time, each progresses at the
rate of cores over threads; each instant counts at that rate. All times of one pool come from one
host's clock. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from msgspec import Struct


class Share(Struct, frozen=True):
    """The pool of cores that a stage computes on, and the threads that it keeps busy."""

    pool: str
    threads: int = 1


class Interval(Struct, frozen=True):
    """A period in which a stage worked; start: seconds since any epoch."""

    stage: int
    start: float
    seconds: float


def own_seconds(intervals: Sequence[Interval], shares: Sequence[Share],
                cores: Mapping[str, float]) -> list[float]:
    """Return, for each interval, its duration if the stage had had the cores to itself.

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
