"""Splits contiguous layers over ranks in a fixed order, so that the slowest stage is fastest.

The result is exact, see `least_maximum` and `best_path`. Among splits with the same slowest stage
the one with the fewest stages wins, then the least total time, then the most even one, then the one
with more layers on earlier ranks. Pure: callers pass costs and sizes, in their own unit of cost
(usually bytes of weights).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer.errors import PlanError

Matrix = npt.NDArray[np.float64]


def least_sum(steps: Sequence[Matrix]) -> float:
    """Return the least sum of costs with which the ranks take all layers, inf if they cannot."""
    return _least(steps, np.add)


def least_maximum(steps: Sequence[Matrix]) -> float:
    """Return the least possible cost of the most expensive step, inf if the ranks cannot take
    all layers."""
    return _least(steps, np.maximum)


def best_path(keys: Sequence[Sequence[Matrix]], *, same: float = 0.0, later: bool = True
              ) -> list[int]:
    """Return the boundaries between ranks, `len(steps) + 1` of them: 0, ..., n. A path must
    exist.

    keys: sequences of steps. The path has the least sum by the first of them; among equals, the
        least by the second, and so on.
    same: relative difference below which sums are equal.
    later: among paths that are equal by all keys, whether to choose the one whose last boundaries
        are as late as possible, else as early as possible.
    """
    size = keys[0][0].shape[0] if keys[0] else 1
    sums = [np.full(size, np.inf) for _ in keys]
    for sum_ in sums:
        sum_[0] = 0.0
    columns, starts = np.arange(size), []
    for step in zip(*keys, strict=True):
        candidates = [before[:, None] + costs for before, costs in zip(sums, step, strict=True)]
        chosen = np.isfinite(candidates[0])
        for values in candidates:
            least = np.min(np.where(chosen, values, np.inf), axis=0)
            chosen &= values <= least * (1 + same)
        start = size - 1 - np.argmax(chosen[::-1], axis=0) if later else np.argmax(chosen, axis=0)
        found = chosen.any(axis=0)
        sums = [np.where(found, values[start, columns], np.inf) for values in candidates]
        starts.append(start)
    cuts = [size - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return cuts[::-1]


def _least(steps: Sequence[Matrix], join: np.ufunc) -> float:
    best = np.full(steps[0].shape[0] if steps else 1, np.inf)
    best[0] = 0.0
    for costs in steps:
        best = np.min(join(best[:, None], costs), axis=0)
    return float(best[-1])


_GIB = 2**30
SAME_SPEED = 1.1  #: measured speeds within this factor count as equal
LEAVE = 1.03  #: least speed-up for which a slow rank is left out
_SAME = 1e-9  #: totals that differ by less, relatively, are equal


class Member(Struct, frozen=True):
    """A rank that can hold a stage, or slices of one. Alone, a run of one row through its stage
    takes `overhead + cost * per_cost` seconds.

    memory: bytes that it may fill.
    layers: a fixed number of layers (0 leaves the rank out); None: free.
    optional: whether the rank may be left out.
    curve: (rows, time relative to one row), ascending, for wide stages.
    room: name of the memory, which other ranks may fill, too; "": that of its host
    """

    name: str
    per_cost: float
    overhead: float = 0.0
    memory: float = float("inf")
    layers: int | None = None
    optional: bool = False
    curve: tuple[tuple[int, float], ...] = ()
    room: str = ""


class Load(Struct, frozen=True):
    """The layers to place: for each its cost and its bytes (weights and KV cache).

    first_*: additional cost and bytes of the stage with layer 0. last_*: of that with the last
        layer.
    scratch: bytes of any stage.
    whole: bytes of each layer that every slice of it has (a compressed cache); () for none.
    barred: ranges `[start, stop)` that cannot be a stage. bar: the reason.
    """

    costs: tuple[float, ...]
    sizes: tuple[float, ...]
    first_cost: float = 0.0
    first_bytes: float = 0.0
    last_cost: float = 0.0
    last_bytes: float = 0.0
    scratch: float = 0.0
    whole: tuple[float, ...] = ()
    barred: frozenset[tuple[int, int]] = frozenset()
    bar: str = ""

    def stage_cost(self, start: int, stop: int) -> float:
        """Return the cost of a stage with layers start to stop - 1."""
        return (sum(self.costs[start:stop]) + self.first_cost * (start == 0)
                + self.last_cost * (stop == len(self.costs)))

    def stage_bytes(self, start: int, stop: int) -> float:
        """Return the memory of a stage with layers start to stop - 1."""
        return (sum(self.sizes[start:stop]) + self.first_bytes * (start == 0) + self.scratch
                + self.last_bytes * (stop == len(self.sizes)))


    def slices_bytes(self, start: int, stop: int, share: float, count: int) -> float:
        """Return the memory of `count` slices of a stage, which have `share` of it together."""
        return self.stage_bytes(start, stop) * share + sum(self.whole[start:stop]) * (count - share)

    def cut_in(self, count: int) -> Load:
        """Return the layers as they are in `count` slices together."""
        if not self.whole:
            return self
        return structs.replace(self, sizes=tuple(
            size + (count - 1) * own for size, own in zip(self.sizes, self.whole, strict=True)))


class Split(Struct, frozen=True):
    """The number of layers of each rank, 0 for a rank that is left out; with its seconds and
    bytes."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    sizes: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """The time of the slowest stage."""
        return max(self.seconds)

    @property
    def total(self) -> float:
        """The time through all stages, without links."""
        return sum(self.seconds)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (rank, first layer, last layer + 1) of every stage."""
        found, start = [], 0
        for rank, count in enumerate(self.counts):
            if count:
                found.append((rank, start, start + count))
            start += count
        return found


def partition(load: Load, members: Sequence[Member]) -> Split:
    """Return the best split. Raises PlanError: too few layers, or the rank that lacks memory."""
    n = len(load.costs)
    _check_counts(n, members)
    times = [stage_times(load, member, bounded=True) for member in members]
    bound = least_maximum(times)
    if not np.isfinite(bound):
        raise _too_big(load, members)
    times = [np.where(matrix <= bound, matrix, np.inf) for matrix in times]
    return measure(load, members, _best_under(times))


def measure(load: Load, members: Sequence[Member], counts: Sequence[int]) -> Split:
    """Compute the times and sizes of a given split."""
    seconds, sizes, start = [], [], 0
    for member, count in zip(members, counts, strict=True):
        stop = start + count
        seconds.append(member.overhead + member.per_cost * load.stage_cost(start, stop)
                       if count else 0.0)
        sizes.append(load.stage_bytes(start, stop) if count else 0.0)
        start = stop
    return Split(tuple(counts), tuple(seconds), tuple(sizes))


def check_fits(split: Split, members: Sequence[Member]) -> None:
    """Raise PlanError with the rank that lacks the most memory, if one does."""
    if lack := _lack(split, members):
        raise PlanError(f"{lack}: {remedy(members)}")


def _lack(split: Split, members: Sequence[Member]) -> str:
    """Describe the rank that lacks the most memory; "" if all have enough."""
    lacks = [size - member.memory for size, member in zip(split.sizes, members, strict=True)]
    worst = int(np.argmax(lacks))
    member = members[worst]
    return "" if lacks[worst] <= 0 else (
        f"{member.name} needs {size_text(split.sizes[worst])} for {split.counts[worst]} layers "
        f"(weights, cache, scratch), but has {size_text(member.memory)}: it lacks "
        f"{size_text(lacks[worst])}")


def remedy(members: Sequence[Member]) -> str:
    """Return what to do where their memory is not enough."""
    lower = "a lower -ngl, " if any(member.room for member in members) else ""
    return f"use {lower}more hosts, a smaller quantisation or a smaller context (-c)"


def size_text(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / 2**20:.0f} MiB"


def _check_counts(n: int, members: Sequence[Member]) -> None:
    forced = sum(member.layers or 0 for member in members)
    free = [member for member in members if member.layers is None]
    needed = sum(not member.optional for member in free)
    if forced > n or (not free and forced != n):
        raise PlanError(f"the fixed layer counts add up to {forced}; the model has {n}")
    if forced + needed > n:
        raise PlanError(
            f"{len(members)} ranks for {n} layers"
            + (f", of which {forced} are fixed" if forced else "")
            + ": every rank needs at least one; start fewer ranks")


def stage_times(load: Load, member: Member, *, bounded: bool) -> Matrix:
    """Return [start, stop] -> seconds, inf where the rank cannot hold that; [i, i] leaves it
    out.

    bounded: whether the rank's memory limits it.
    """
    n = len(load.costs)
    cost = _ranges(load.costs, load.first_cost, load.last_cost)
    count = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
    allowed = count > 0
    if bounded:
        size = _ranges(load.sizes, load.first_bytes, load.last_bytes) + load.scratch
        allowed &= size <= member.memory
    for start, stop in load.barred:
        allowed[start, stop] = False
    matrix = np.where(allowed, member.overhead + member.per_cost * cost, np.inf)
    if member.optional or member.layers == 0:
        matrix[count == 0] = 0.0
    if member.layers is not None:
        matrix[count != member.layers] = np.inf
    return matrix


def _ranges(values: Sequence[float], first: float, last: float) -> Matrix:
    """Return [start, stop] -> the sum of a range, with the additional values of the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    matrix: Matrix = sums[None, :] - sums[:, None]
    matrix[0, :] += first
    matrix[:, -1] += last
    return matrix


def _best_under(times: Sequence[Matrix]) -> list[int]:
    """Return counts: fewest stages, then least total, then least sum of squares, then earlier
    ranks."""
    used = ~np.eye(times[0].shape[0], dtype=bool)
    stages = [np.where(np.isfinite(matrix), used, np.inf) for matrix in times]
    cuts = best_path([stages, times, [matrix**2 for matrix in times]], same=_SAME)
    return [stop - start for start, stop in itertools.pairwise(cuts)]


def _too_big(load: Load, members: Sequence[Member]) -> PlanError:
    """Return why no split fits, based on the fastest split that ignores memory."""
    n = len(load.costs)
    times = [stage_times(load, member, bounded=False) for member in members]
    bound = least_maximum(times)
    if not np.isfinite(bound):  # memory is not the reason
        return PlanError(f"these ranks cannot have a stage each: {load.bar}; or start fewer ranks")
    times = [np.where(matrix <= bound, matrix, np.inf) for matrix in times]
    split = measure(load, members, _best_under(times))
    room = sum(member.memory for member in members if member.layers != 0)
    need = load.stage_bytes(0, n)
    together = ("no contiguous split fits" if need <= room else
                f"the model needs {size_text(need)} but all ranks together have {size_text(room)}")
    lack = _lack(split, members)
    return PlanError(f"{lack}{'; ' * bool(lack)}{together}: {remedy(members)}")


def level(speeds: Mapping[int, float]) -> dict[int, float]:
    """Seconds per byte by rank, with those within SAME_SPEED of each other made equal.

    Noise between equal machines must not make an unequal plan.
    """
    result: dict[int, float] = {}
    group: list[int] = []
    for rank in sorted(speeds, key=lambda r: speeds[r]):
        if group and speeds[rank] > speeds[group[0]] * SAME_SPEED:
            group = []
        group.append(rank)
        middle = statistics.median(speeds[r] for r in group)
        result.update(dict.fromkeys(group, middle))
    return result


def by_slowest(split: Split) -> float:
    """Return the runs per second of a full pipeline."""
    return 1.0 / split.slowest


def choose(
    load: Load, members: Sequence[Member], predict: Callable[[Split], float]
) -> tuple[Split, dict[int, str]]:
    """Return the best split, and the members that are left out, with the reason.

    predict: returns the tokens per second of a split, above 0. Members of equal speed are never
        left out; slower ones if that is faster by LEAVE or more. Raises PlanError when all together
        cannot hold the model.
    """
    out = {i: "set to hold no layers" for i, m in enumerate(members) if m.layers == 0}
    trial = list(members)
    spare = [i for i, m in enumerate(members) if m.layers is None]
    best = partition(load, trial)
    speed = predict(best)
    left_out = dict(out)
    fastest = min((members[i].per_cost for i in spare), default=0.0)
    for index in sorted(spare, key=lambda i: -members[i].per_cost):
        if members[index].per_cost <= fastest * SAME_SPEED:
            break
        trial[index] = structs.replace(members[index], layers=0)
        out[index] = (
            f"takes {members[index].per_cost / fastest:.1f} times as long as the fastest rank; "
            "faster without it")
        try:
            split = partition(load, trial)
        except PlanError:
            break
        faster = predict(split)
        if faster > speed * LEAVE:
            best, speed, left_out = split, faster, dict(out)
    return best, left_out
