"""The teams of wide stages: their ranks, the slices that each holds, and replacements after a
loss.

Slices are fixed when a job starts, and the loss of a member does not change them: another rank
takes the very same ones. Pure: callers pass memory and speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct, structs

from pipeinfer.core.grid import deal, grouped, parse_widths
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.models.slice_parts import Slice
from pipeinfer.planning.partition import Member
from pipeinfer.planning.replan import Holding


class Teams(Struct, frozen=True):
    """The ranks of each stage, the leader first; and the shares of its slices, () if its layers
    stay whole."""

    ranks: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank that leads each stage."""
        return tuple(team[0] for team in self.ranks)


def teams_of(grid: str, slices: str, candidates: Sequence[int],
             groups: Mapping[int, str] | None = None) -> Teams | None:
    """Return the teams that --grid and --slices request, None if neither is given.

    candidates: ranks that may hold layers, in order; those that are left over are spares.
    groups: of ranks; only ranks of one group form a stage.
    Raises UsageError.
    """
    if not grid and not slices:
        return None
    widths = parse_widths(grid) if grid else (1,) * len(candidates)
    need = sum(widths)
    if need > len(candidates):
        raise UsageError(
            f"--grid {grid} has {need} members, but only {len(candidates)} ranks can hold layers: "
            "start more ranks (rank 0 holds some only with --head-stage), or use a smaller grid")
    shares = shares_of(slices, widths)
    ranks = grouped(widths, candidates, groups or {})
    if ranks is None:
        by_group: dict[str, list[int]] = {}
        for rank in candidates:
            by_group.setdefault((groups or {}).get(rank, ""), []).append(rank)
        there = "; ".join(f"{name or 'no group'}: rank{'s' * (len(own) > 1)} "
                          f"{', '.join(map(str, own))}" for name, own in by_group.items())
        raise UsageError(f"--grid {grid} needs members of different groups of the nodes file in "
                         f"one stage ({there}): use narrower stages, or change the groups")
    return Teams(ranks, shares)


def shares_of(slices: str, widths: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return the shares of each stage's slices: "4" and "4,2" count them, "3:2:2" gives shares.

    Raises UsageError.
    """
    if not slices:
        return tuple(() if width == 1 else (1.0,) * width for width in widths)
    words = [word.strip() for word in slices.split(",")]
    if len(words) == 1:
        words *= len(widths)
    if len(words) != len(widths):
        raise UsageError(f"--slices {slices} is for {len(words)} stages, but there are "
                         f"{len(widths)}: give one number for each, or one for all")
    found = []
    for word, width in zip(words, widths, strict=True):
        parts = word.split(":")
        if not all(part.isascii() and part.replace(".", "", 1).isdigit() and 0 < float(part) < 1e6
                   for part in parts):
            raise UsageError(f"--slices {slices}: give how many slices each stage has, such as 4, "
                             "or their shares, such as 3:2:2")
        shares = [float(part) for part in parts]
        if len(parts) == 1:
            if not word.isdigit() or int(word) > 1024:
                raise UsageError(f"--slices {slices}: a stage has from 1 to 1024 slices")
            shares = [1.0] * int(word)
        deal(len(shares), width)  # raises if there are too few slices
        found.append(tuple(shares))
    return tuple(found)


def combined(members: Mapping[int, Member], teams: Teams) -> list[Member]:
    """Return each team as one member for the split of the layers: its speed is the sum of its
    members', its memory the least of its members' times their number."""
    found = []
    for team in teams.ranks:
        here = [members[rank] for rank in team]
        found.append(structs.replace(
            here[0], per_cost=1 / sum(1 / max(one.per_cost, 1e-12) for one in here),
            memory=min(one.memory for one in here) * len(here)))
    return found


def holdings(teams: Teams, ranges: Sequence[tuple[int, int]],
             cuts: Sequence[tuple[str, ...]]) -> tuple[Holding, ...]:
    """Return the first holdings, stage by stage, leaders first."""
    found = []
    for team, (start, stop), cut in zip(teams.ranks, ranges, cuts, strict=True):
        dealt = deal(len(cut), len(team)) if cut else ((),)
        found += [Holding(rank, start, stop, member, cut, own)
                  for member, (rank, own) in enumerate(zip(team, dealt, strict=True))]
    return tuple(found)


def stages_of(held: Sequence[Holding]) -> list[list[Holding]]:
    """Group holdings by stage."""
    stages: list[list[Holding]] = []
    for holding in held:
        if holding.member == 0:
            stages.append([])
        stages[-1].append(holding)
    return stages


def widths_of(held: Sequence[Holding]) -> tuple[int, ...]:
    """Return the number of members of each stage."""
    return tuple(map(len, stages_of(held)))


def is_cut(held: Sequence[Holding]) -> bool:
    """Whether any stage's layers are cut into slices."""
    return any(holding.cut for holding in held)


def share_of(holding: Holding) -> float:
    """Return the share of its layers' weights that a rank holds, by FFN columns (of a mixture
    those of its experts); 1 if they are whole."""
    if not holding.cut:
        return 1.0
    sizes = []
    for piece in map(Slice.parse, holding.cut):
        low, high = piece.expert_columns
        first, stop = piece.among or (0, 1)
        sizes.append((high - low) * (stop - first))
    return sum(sizes[index] for index in holding.slices) / sum(sizes)


def cut_layers(held: Sequence[Holding]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return which layers are cut into which slices, independent of ranks: tokens depend on
    this."""
    found: list[tuple[int, int, tuple[str, ...]]] = []
    for team in stages_of(held):
        start, stop, cut = team[0].start, team[0].stop, team[0].cut
        if found and found[-1][2] == cut:
            start = found.pop()[0]
        found.append((start, stop, cut))
    return found


def retake(held: Sequence[Holding], lost: Collection[int], spares: Sequence[int],
           room: Callable[[int, Holding], bool], groups: Mapping[int, str] | None = None
           ) -> tuple[Holding, ...]:
    """Return the holdings after a loss: every slice is held again, and none is cut again.

    held: before the loss, in order of nodes.
    lost: ranks.
    spares: one replaces a lost member; without one, the member of the same stage with the fewest
        slices takes its slices. A stage without any member is joined to a neighbour that is cut
        alike.
    room: whether a rank has the memory for a holding.
    groups: of ranks; spares of the lost member's group are preferred.
    Raises PlanError if that is not possible.
    """
    free = list(spares)
    near = groups or {}
    stages: list[_Team] = []
    for team in stages_of(held):
        alive = [one for one in team if one.rank not in lost]
        waiting = []
        for gone in (one for one in team if one.rank in lost):
            nearest = sorted(free, key=lambda rank: near.get(rank, "") != near.get(gone.rank, ""))
            stand_in = next((rank for rank in nearest if room(rank, gone)), None)
            if stand_in is None:
                waiting.append(gone)
            else:
                free.remove(stand_in)
                alive.append(structs.replace(gone, rank=stand_in))
        for gone in waiting if alive else ():
            able = [one for one in alive if room(one.rank, _both(one, gone))]
            if not able:
                raise PlanError(_lack([gone]))
            heir = min(able, key=lambda one: (len(one.slices), one.member))
            alive[alive.index(heir)] = _both(heir, gone)
        alive.sort(key=lambda one: one.slices)
        stages.append(_Team(team, alive))
    while empty := [one for one in stages if not one.alive]:
        if not any(_joined(stages, one, room) for one in empty):
            raise PlanError(_lack(empty[0].before))
    return tuple(structs.replace(one, member=member)
                 for team in stages for member, one in enumerate(team.alive))


class _Team(Struct):
    """A stage before a loss, and its holdings afterwards."""

    before: list[Holding]
    alive: list[Holding]


def _joined(stages: list[_Team], empty: _Team, room: Callable[[int, Holding], bool]) -> bool:
    """Join a stage without members to a neighbour, the one with fewer layers first; return
    whether that was possible."""
    at, layers = stages.index(empty), empty.before[0]
    beside = [stages[k] for k in (at - 1, at + 1) if 0 <= k < len(stages) and stages[k].alive]
    for team in sorted(beside, key=lambda one: one.alive[0].stop - one.alive[0].start):
        wider = [structs.replace(one, start=min(one.start, layers.start),
                                     stop=max(one.stop, layers.stop)) for one in team.alive]
        if wider[0].cut == layers.cut and all(room(one.rank, one) for one in wider):
            team.alive = wider
            stages.remove(empty)
            return True
    return False


def _lack(gone: Sequence[Holding]) -> str:
    numbers = sorted({index for one in gone for index in one.slices})
    what = f"slices {', '.join(map(str, numbers))} of " if gone[0].cut else ""
    return (f"no rank with the memory for it is left to hold {what}layers {gone[0].start} to "
            f"{gone[0].stop - 1}: start the job again, with --spares to survive this")


def _both(one: Holding, other: Holding) -> Holding:
    return structs.replace(one, slices=tuple(sorted({*one.slices, *other.slices})))
