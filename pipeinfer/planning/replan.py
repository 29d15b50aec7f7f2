"""Reassigns the layers of lost stages so that as few layers move as the memory allows.

A living stage keeps its layers where possible. A spare rank replaces a lost stage if it can hold
its layers; else the neighbours share them, and what does not fit there moves on along the
pipeline. Among assignments that move equally many layers, one with the fastest slowest stage is
taken, and of those one with the fewest stages; unless another one, for which more must move, is
judged to be much faster. `rebalance` does not minimise moved layers but maximises speed. Pure:
callers pass costs, sizes and memory.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec import Struct, structs

from pipeinfer.core.control import Standing
from pipeinfer.core.grid import Grid
from pipeinfer.errors import PlanError
from pipeinfer.planning.judge import Judge
from pipeinfer.planning.partition import (
    SAME_SPEED,
    Load,
    Matrix,
    Member,
    best_path,
    least_sum,
    level,
    measure,
    partition,
    remedy,
    size_text,
    stage_times,
)

_FURTHER = 1 / 4096  #: what a stage counts, in layers moved: of equals the fewest stages
_SAME = 1e-6  #: speeds that differ by less, relatively, are equal
HEALTHY = 1.5  #: multiple of the fastest rank's time up to which a rank counts as equally fast
FOLD = 1.25  #: least speed-up for which a rank that is as fast as the others is left out
_LINE = 3  #: least number of stages for a line through their times
_PART = 0.9  #: of a stage's time that may be overhead
WORTH_MOVING = 1.25  #: least speed-up for which more layers move than a loss makes necessary


class Holding(Struct, frozen=True):
    """A rank and the layers `[start, stop)` that it holds.

    member: its number in its stage; 0 leads.
    cut: names of the slices of these layers, none if the layers are whole.
    slices: which of them the rank holds.
    """

    rank: int
    start: int
    stop: int
    member: int = 0
    cut: tuple[str, ...] = ()
    slices: tuple[int, ...] = ()


def replan(load: Load, members: Mapping[int, Member], held: Sequence[Holding],
           spares: Sequence[int], lost: Sequence[Holding] = (), judge: Judge | None = None
           ) -> tuple[Holding, ...]:
    """Return the stages from now on, in order.

    members: memory and speed of each of these ranks.
    held: of the living stages, in order of their layers.
    spares: living ranks without a stage. More of them than lost stages are used only if that moves
        fewer layers.
    lost: of the lost stages.
    judge: finds a faster assignment of the same ranks; None: do not search.
    Raises PlanError when the ranks cannot hold the model, with the missing memory.
    """
    missing = len(load.costs) - sum(holding.stop - holding.start for holding in held)
    best: tuple[float, tuple[Holding, ...]] | None = None
    orders = [_with_spares(load, members, held, spares, limit) for limit in (lost, None)]
    for order in orders:
        if order and (found := _arranged(load, members, order)) is not None \
                and (best is None or found[0] < best[0]):
            best = found
        if best is not None and best[0] <= missing:
            break  # one spare for a lost stage will do; the others stay for the next loss
    if best is not None:
        return best[1] if judge is None else _much_faster(load, members, best[1], judge)
    if not orders[-1]:
        raise PlanError("no rank is left to hold the model's layers: start the job again")
    raise _too_few(load, [members[holding.rank] for holding in orders[-1]])


def _much_faster(load: Load, members: Mapping[int, Member], held: tuple[Holding, ...],
                 judge: Judge) -> tuple[Holding, ...]:
    """Return these stages, or the same ranks (perhaps fewer) with other layers if that pays."""
    ranks = [holding.rank for holding in held]

    def seated(chosen: Sequence[int]) -> list[Member]:
        return [structs.replace(
            members[rank], layers=None,
            per_cost=members[rank].per_cost * judge.faster(rank, None)) for rank in chosen]

    present = judge(measure(load, seated(ranks), [h.stop - h.start for h in held]), ranks,
                    now=True)
    best, speed = held, present * WORTH_MOVING
    for chosen in _fewer(ranks, {rank: members[rank].per_cost for rank in ranks}):
        with contextlib.suppress(PlanError):
            split = partition(load, seated(chosen))
            if (found := judge(split, chosen, now=True)) > speed:
                best = tuple(Holding(chosen[i], start, stop) for i, start, stop in split.ranges())
                speed = found
    return best


def _arranged(load: Load, members: Mapping[int, Member], order: Sequence[Holding]
              ) -> tuple[float, tuple[Holding, ...]] | None:
    """Return the number of moved layers and the best stages of ranks in this order, None if they
    cannot hold the model."""
    n = len(load.costs)
    moved = [_moved(n, holding) for holding in order]
    times = [stage_times(load, structs.replace(
        members[holding.rank], layers=None, optional=True), bounded=True) for holding in order]
    least = least_sum([np.where(np.isfinite(t), m, np.inf)
                       for m, t in zip(moved, times, strict=True)])
    if not np.isfinite(least):
        return None
    bounds = np.unique(np.concatenate([t[np.isfinite(t)] for t in times]))
    low, high = 0, len(bounds) - 1
    while low < high:  # the smallest bound on a stage's time that costs no further layer
        middle = (low + high) // 2
        found = least_sum([np.where(t <= bounds[middle], m, np.inf)
                           for m, t in zip(moved, times, strict=True)])
        low, high = (low, middle) if found <= least else (middle + 1, high)
    used = _FURTHER * ~np.eye(n + 1, dtype=bool)
    steps = [np.where(t <= bounds[low], m + used, np.inf)
             for m, t in zip(moved, times, strict=True)]
    cuts = best_path([steps], later=False)
    return least, tuple(Holding(holding.rank, start, stop) for holding, start, stop in zip(
        order, cuts, cuts[1:], strict=False) if start < stop)


class MoveVerdict(Struct, frozen=True):
    """The best stages, and their judged speed relative to the present one."""

    held: tuple[Holding, ...]
    gain: float


def rebalance(load: Load, members: Mapping[int, Member], held: Sequence[Holding],
              seconds: Sequence[float], spares: Sequence[int], judge: Judge,
              returning: Sequence[int] = ()) -> MoveVerdict:
    """Return the best stages by the present time of each for a run.

    seconds: of each stage of `held`.
    spares: idle ranks, assumed to have the median speed; one may replace the slowest stage.
    returning: those of them that held layers before and may get some again.
    Ranks may be left out.
    """
    ranks = [holding.rank for holding in held]
    costs = [load.stage_cost(holding.start, holding.stop) for holding in held]
    overhead = _overhead(costs, seconds)
    speeds = level({holding.rank: (took - overhead) / cost / judge.faster(holding.rank, None)
                    for holding, took, cost in zip(held, seconds, costs, strict=True)})
    middling = statistics.median(speeds.values())
    slow = max(ranks, key=lambda rank: speeds[rank])
    known = dict.fromkeys((*spares, *returning), middling) | speeds

    def seated(chosen: Sequence[int], holders: Sequence[int] | None) -> list[Member]:
        return [structs.replace(
            members[rank], overhead=overhead, layers=None,
            per_cost=known[rank] * judge.faster(rank, holders)) for rank in chosen]

    present = judge(measure(load, seated(ranks, None), [h.stop - h.start for h in held]), ranks,
                    now=True)
    orders = [ranks]
    if spares:
        orders.append([spares[0] if rank == slow else rank for rank in ranks])
    if returning:
        orders.append(sorted({*ranks, *returning}))
    best, gain = tuple(held), 1.0
    for order in orders:
        for chosen in _fewer(order, known):
            with contextlib.suppress(PlanError):
                split = partition(load, seated(chosen, chosen))
                faster = judge(split, chosen) / present
                if faster > gain * (fold(order, chosen, known) or 1 + _SAME):
                    best = tuple(Holding(chosen[i], start, stop)
                                 for i, start, stop in split.ranges())
                    gain = faster
    return MoveVerdict(best, gain)


def fold(before: Collection[int], after: Collection[int], speeds: Mapping[int, float]) -> float:
    """Return the least speed-up for which ranks of `before` are left out; 0 if none of them is
    about as fast as the fastest.

    A healthy rank is left out for much only, because the load may change.
    """
    least = min(speeds[rank] for rank in before)
    gone = set(before).difference(after)
    return FOLD if any(speeds[rank] <= least * HEALTHY for rank in gone) else 0.0


def _overhead(costs: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the seconds that any run takes on any stage, whatever its layers, if the stages'
    times fit one line. Without it a stage with a layer or two would look like a slow rank."""
    if len(costs) < _LINE or max(costs) < 2 * min(costs):
        return 0.0
    slope, level_ = np.polyfit(costs, seconds, 1)
    fitted = [level_ + slope * cost for cost in costs]
    straight = all(max(pair) <= SAME_SPEED * min(pair)
                   for pair in zip(fitted, seconds, strict=True))
    return float(level_) if straight and 0 < level_ < _PART * min(seconds) else 0.0


def _fewer(ranks: Sequence[int], speeds: Mapping[int, float]) -> list[list[int]]:
    """Return the ranks, then those without the slowest, and so on; of equal ones the last is
    removed."""
    left, found = list(ranks), []
    while left:
        found.append(list(left))
        left.remove(max(reversed(left), key=lambda rank: speeds[rank]))
    return found


def _with_spares(load: Load, members: Mapping[int, Member], held: Sequence[Holding],
                 spares: Sequence[int], lost: Sequence[Holding] | None) -> list[Holding]:
    """Return the living stages with spare ranks (empty holdings) where layers are missing.

    The fastest spare goes to the gap with the most work. Further spares go to the largest gaps
    again, for a gap that one of them cannot hold: as many as stages were lost there, at least one;
    with None any number.
    """
    n, at = len(load.costs), 0
    gaps: list[tuple[int, int]] = []
    for holding in held:
        gaps.append((at, holding.start))
        at = holding.stop
    gaps.append((at, n))
    work = sorted((i for i, (a, b) in enumerate(gaps) if a < b),
                  key=lambda i: -load.stage_cost(*gaps[i]))
    room = {i: len(spares) if lost is None else max(1, sum(
        gaps[i][0] <= one.start and one.stop <= gaps[i][1] for one in lost)) for i in work}
    places = [i for turn in range(len(spares)) for i in work if turn < room[i]]
    filled: dict[int, list[Holding]] = {}
    quick = sorted(spares, key=lambda rank: (members[rank].per_cost, rank))
    for rank, gap in zip(quick, places, strict=False):
        filled.setdefault(gap, []).append(Holding(rank, gaps[gap][0], gaps[gap][0]))
    order: list[Holding] = []
    for i in range(len(gaps)):
        order += filled.get(i, [])
        order += held[i:i + 1]
    return order


def _moved(n: int, holding: Holding) -> Matrix:
    """Return [start, stop] -> layers that the rank would have to load."""
    start, stop = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    common = np.maximum(np.minimum(stop, holding.stop) - np.maximum(start, holding.start), 0)
    return np.asarray((stop - start) - common, np.float64)


def _too_few(load: Load, members: Sequence[Member]) -> PlanError:
    n = len(load.costs)
    need = load.stage_bytes(0, n) + load.scratch * (len(members) - 1)
    room = sum(member.memory for member in members)
    names = ", ".join(member.name for member in members)
    lacks = f"{size_text(need - room)} are missing" if need > room else \
        "no contiguous split of its layers fits"
    return PlanError(
        f"the remaining ranks ({names}) cannot hold the model: it needs {size_text(need)}, but "
        f"they have {size_text(room)} together; {lacks}: start the job again and {remedy(members)}")


def cut_link(grid: Grid, standings: Mapping[int, Standing], patience: float
             ) -> tuple[int, int] | None:
    """Return the first cut link: the node that sent and the node that waits; None if there is
    none.

    standings: the answers to the roll call, by node. A node that computes or has not answered
        shows nothing about its links.
    patience: seconds for which both nodes must have been idle.
    The head's own links are not checked: it detects lost ranks itself.
    """
    for node in range(1, grid.n_nodes + 1):
        source, here = grid.predecessor(node), standings.get(node)
        before = standings.get(source)
        if here is None or before is None or here.received >= before.received:
            continue
        if min(here.idle, before.idle) > patience:
            return source, node
    return None


def left_out(source: int, waits: int, earlier: Collection[int]) -> int:
    """Return the rank to continue without, of two whose link is cut.

    It is the one that waits, unless the source has a cut link for the second time. Rank 0 stays.
    earlier: sources of links that were cut before.
    """
    return source if waits == 0 or (source in earlier and source != 0) else waits
