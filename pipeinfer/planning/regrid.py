"""Moves slices of wide stages to other ranks while a job runs, if ranks have become slow.

Slices are never cut again, and no layer gets another cut, so no token changes. Only the placement
changes: two ranks swap places, or two members swap slices; a member takes a slice of another,
which may hold nothing then; an idle rank takes slices; layers move between neighbouring stages
that are cut alike. From the present placement, the best such step is taken as long as there is
one, once for the shortest way of a run and once for the fastest slowest stage. Of all placements
on these two descents the one with the best judged speed wins. Pure: callers pass the measured
times.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from pipeinfer.planning.partition import Load, level
from pipeinfer.planning.replan import Holding, MoveVerdict, fold
from pipeinfer.planning.wide import stages_of

Rate = Callable[[Sequence[float], Sequence[Sequence[int]]], float]
_STEPS = 32  #: at most, on each way
_BETTER = 1 - 1e-3  #: a step is taken if the time falls below this multiple of the time before

_Team = tuple[Holding, ...]
_Grid = tuple[_Team, ...]


class GridRoom(Struct, frozen=True):
    """The limits on placements.

    shares: a layer's work in each slice of a cut.
    memory: bytes by rank. bytes_of: returns the bytes of a holding.
    kinds: by rank; ranks of one stage have one kind (group, backend).
    spares: idle ranks. barred: see `Load`.
    """

    shares: Mapping[tuple[str, ...], Sequence[float]]
    memory: Mapping[int, float]
    bytes_of: Callable[[Holding], float]
    kinds: Mapping[int, Hashable]
    spares: tuple[int, ...] = ()
    barred: frozenset[tuple[int, int]] = frozenset()


def regrid(load: Load, held: Sequence[Holding], seconds: Sequence[float], room: GridRoom,
           rate: Rate) -> MoveVerdict:
    """Return the best placement by each member's present computing time for a run of one row.

    seconds: by node of `held`.
    rate: returns the tokens per second of stages with these times (of their slowest members) and
        ranks. An idle rank is assumed to have the median speed; a rank that is as fast as the
        others is left out only for a large gain.
    """
    present = tuple(tuple(team) for team in stages_of(held))
    costs: dict[tuple[int, int], float] = {}

    def work(one: Holding) -> float:
        """Cost of what a rank computes for a run of one row."""
        layers = one.start, one.stop
        if layers not in costs:
            costs[layers] = load.stage_cost(*layers)
        shares = room.shares.get(one.cut)
        return costs[layers] * (1.0 if shares is None else sum(shares[i] for i in one.slices))

    speeds = level({one.rank: took / max(work(one), 1e-12)
                    for one, took in zip(held, seconds, strict=True)})
    middling = statistics.median(speeds.values())
    known = dict.fromkeys(room.spares, middling) | speeds

    def took(team: _Team) -> float:
        """Seconds of its slowest member."""
        return max(known[one.rank] * work(one) for one in team)

    def speed(grid: _Grid) -> float:
        return rate([took(team) for team in grid], [[one.rank for one in team] for team in grid])

    seen: dict[_Grid, None] = {}
    for first in (sum, max):
        seen |= dict.fromkeys(_descent(present, room, known, took, first))
    now = speed(present)
    best, gain = present, 1.0
    for grid in seen:
        faster, after = speed(grid) / now, [one.rank for team in grid for one in team]
        if faster > gain * (fold(speeds, after, known) or 1 / _BETTER):
            best, gain = grid, faster
    return MoveVerdict(tuple(one for team in best for one in team), gain, known)


def _descent(present: _Grid, room: GridRoom, speeds: Mapping[int, float],
             took: Callable[[_Team], float], first: Callable[[list[float]], float]
             ) -> Iterator[_Grid]:
    """Yield the placements on the way down, taking the best step each time.

    first: the value to minimise; among equals, the sum of squares.
    """
    here, known = present, {id(team): took(team) for team in present}

    def height(grid: _Grid) -> tuple[float, float]:
        taken = [known[id(team)] if id(team) in known else took(team) for team in grid]
        return first(taken), sum(one * one for one in taken)

    at = height(present)
    for _ in range(_STEPS):
        known = {id(team): took(team) for team in here}  # a step leaves most teams as they are
        step = min(_steps(here, room, speeds), key=height, default=here)
        found = height(step)
        if found[0] >= at[0] * _BETTER and not (
                found[0] <= at[0] and found[1] < at[1] * _BETTER):
            return
        here, at = step, found
        yield here


def _steps(grid: _Grid, room: GridRoom, speeds: Mapping[int, float]) -> Iterator[_Grid]:
    """Yield every allowed placement that is one step away."""
    for step in itertools.chain(_places(grid, room, speeds), _dealt(grid, room),
                                _shifted(grid, room.barred)):
        if _allowed(grid, step, room):
            yield step


def _allowed(before: _Grid, grid: _Grid, room: GridRoom) -> bool:
    """Whether memory suffices and members of a stage are of one kind. Rank 0, if it is a member,
    keeps the first node, since its stage is a thread of the head's process."""
    if before[0][0].rank == 0 and grid[0][0].rank != 0:
        return False
    known = {frozenset(one.rank for one in team) for team in before}
    for team in grid:
        if any(team is other for other in before):
            continue
        ranks = frozenset(one.rank for one in team)
        if ranks not in known and len({room.kinds.get(rank) for rank in ranks}) > 1:
            return False
        if any(room.bytes_of(one) > room.memory.get(one.rank, 0.0) for one in team):
            return False
    return True


def _places(grid: _Grid, room: GridRoom, speeds: Mapping[int, float]) -> Iterator[_Grid]:
    """Yield placements with two ranks swapped, one of which may be idle. Ranks of equal speed
    are skipped: swapping them changes nothing, and on a large cluster they are nearly all pairs."""
    ranks = [one.rank for team in grid for one in team]
    idle = [rank for rank in room.spares if rank not in ranks]
    for one, other in (*itertools.combinations(ranks, 2), *itertools.product(ranks, idle)):
        if speeds[one] == speeds[other]:
            continue
        swap = {one: other, other: one}
        yield tuple(tuple(structs.replace(member, rank=swap.get(member.rank, member.rank))
                          for member in team) if any(member.rank in swap for member in team)
                    else team for team in grid)


def _dealt(grid: _Grid, room: GridRoom) -> Iterator[_Grid]:
    """Yield placements with other slices on the members of one stage, one of which may be new or
    end up without slices."""
    used = {one.rank for team in grid for one in team}
    idle = [rank for rank in room.spares if rank not in used]
    for at, team in enumerate(grid):
        if not team[0].cut:
            continue
        own = {one.rank: frozenset(one.slices) for one in team}
        for giver, taker in itertools.permutations((*own, *idle[:1]), 2):
            for index in own.get(giver, ()):
                yield _with(grid, at, own | {giver: own[giver] - {index},
                                             taker: own.get(taker, frozenset()) | {index}})
                if giver < taker and taker in own:
                    for back in own[taker]:
                        yield _with(grid, at, own | {giver: own[giver] - {index} | {back},
                                                     taker: own[taker] - {back} | {index}})


def _with(grid: _Grid, at: int, own: Mapping[int, frozenset[int]]) -> _Grid:
    """Return the grid with these slices by rank in one stage; the member with the first slice
    leads."""
    one = grid[at][0]
    holders = sorted((tuple(sorted(slices)), rank) for rank, slices in own.items() if slices)
    team = tuple(structs.replace(one, rank=rank, member=member, slices=slices)
                 for member, (slices, rank) in enumerate(holders))
    return (*grid[:at], team, *grid[at + 1:])


def _shifted(grid: _Grid, barred: frozenset[tuple[int, int]]) -> Iterator[_Grid]:
    """Yield placements with a layer moved between two neighbouring stages that are cut alike."""
    for at, (left, right) in enumerate(itertools.pairwise(grid)):
        if left[0].cut != right[0].cut:
            continue
        for cut in (left[0].stop - 1, left[0].stop + 1):
            if left[0].start < cut < right[0].stop and barred.isdisjoint(
                    {(left[0].start, cut), (cut, right[0].stop)}):
                yield (*grid[:at], tuple(structs.replace(one, stop=cut) for one in left),
                       tuple(structs.replace(one, start=cut) for one in right), *grid[at + 2:])
