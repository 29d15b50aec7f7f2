"""Chooses a grid: the number of stages, their widths, and the hosts of each.

More stages allow more runs in flight. Wider stages shorten the way of each run, at the cost of two
sums per layer. Stages are contiguous groups of hosts, in a few orders of the hosts. For each bound
on the slowest stage, dynamic programming over (hosts, layers) finds the shortest way; hosts may be
left out. The plan with the most tokens per second, as judged, wins. Pure: callers pass speeds,
links and the cost of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer.core.grid import grouped
from pipeinfer.errors import PlanError
from pipeinfer.models.slice_parts import layout
from pipeinfer.planning.judge import Arrangement, LoadMix, score
from pipeinfer.planning.partition import SAME_SPEED, Load, Matrix, Member, size_text
from pipeinfer.planning.teams import Network, PlannedTeam, SumCost, TeamCut, team

_BOUNDS = 24  #: bounds on the slowest stage that are tried
_ROWS = (1, 4)  #: rows of the runs whose way is minimised
_SWAPPED = 9  #: swaps are tried for at most so many hosts
_SAME = 1 + 1e-9


class GridPlan(Struct, frozen=True):
    """The stages in order, with the layers of each.

    tokens: estimated tokens per second.
    others: names and speeds of the best plans of other shapes, for `why`.
    """

    cluster: Cluster
    stages: tuple[PlannedTeam, ...]
    layers: tuple[int, ...]
    tokens: float
    others: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, stages: tuple[PlannedTeam, ...], layers: tuple[int, ...]
           ) -> GridPlan:
        """Return these stages with their estimated speed."""
        made = arrange(cluster, stages, layers)
        return cls(cluster, stages, layers, score(made, cluster.mixes))

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of members of each stage."""
        return tuple(stage.width for stage in self.stages)

    @property
    def name(self) -> str:
        """The shape as text, such as 2x4, or 4,2,2 where stages differ."""
        return shape(self.widths)

    @property
    def arrangement(self) -> Arrangement:
        """The stages with their times, as the judge needs them."""
        return arrange(self.cluster, self.stages, self.layers)

    @property
    def memory(self) -> list[list[float]]:
        """The bytes of memory of each member of each stage."""
        end = len(self.stages) - 1
        return [self.cluster.bytes_of(one, count, first=k == 0, last=k == end)
                for k, (one, count) in enumerate(zip(self.stages, self.layers, strict=True))]

    @property
    def options(self) -> str:
        """The options that start a job with this grid; hosts in the order of its stages."""
        text, shares = f"--grid {self.name}", []
        for stage in self.stages:
            speeds = [1 / self.cluster.hosts[index].per_cost for index in stage.hosts]
            unequal = max(speeds) > SAME_SPEED * min(speeds)
            shares.append(":".join(f"{speed / max(speeds):.2f}" for speed in speeds)
                          if unequal else str(stage.width))
        if any(":" in share for share in shares):
            text += f" --slices {','.join(shares)}"
        return text

    def why(self) -> str:
        """Explain the plan in one sentence."""
        made = self.arrangement
        computing = sum(stage.seconds for stage in made.stages)
        sums = sum(stage.sums for stage in made.stages)
        text = (f"grid {self.name} (stages x width): a token computes for {1e3 * computing:.1f} ms,"
                f" waits {1e3 * sums:.1f} ms for sums and "
                f"{1e3 * (made.way() - computing - sums):.1f} ms for links")
        cut = self.cluster.cut
        for width in sorted(set(self.widths)):
            parts, groups = layout(width, cut.blocks, cut.divided[0])
            if groups > 1:
                text += (f"; of {width} members {parts} share the columns of an expert, and the "
                         f"experts are divided into {groups} groups")
        for name, speed in self.others[:2]:
            text += f"; {name} would have {speed / self.tokens:.2f} times the speed"
        left = len(self.cluster.hosts) - sum(self.widths)
        if left:
            used = {index for stage in self.stages for index in stage.hosts}
            idle = [host.name for i, host in enumerate(self.cluster.hosts) if i not in used]
            text += f"; {', '.join(idle)} left out"
        return text


def shape(widths: Sequence[int]) -> str:
    """Return a grid in the format of --grid: stages x width, or the width of each stage."""
    if len(set(widths)) == 1:
        return f"{len(widths)}x{widths[0]}"
    return ",".join(map(str, widths))


def best_grid(cluster: Cluster) -> GridPlan:
    """Return the fastest grid, as judged. Raises PlanError when the hosts cannot hold the
    model."""
    found: dict[tuple[int, ...], GridPlan] = {}
    hosts = range(len(cluster.hosts))
    orders = _orders(cluster)
    for order in orders:
        _keep(found, _by_bounds(cluster, order))
    if found and len(orders) > 1 and len(cluster.hosts) <= _SWAPPED:
        _swap(cluster, found)
    if not found:
        need = cluster.load.stage_bytes(0, cluster.n_layers)
        room = sum(cluster.hosts[i].memory for i in hosts)
        raise PlanError(f"no grid of {len(cluster.hosts)} hosts holds the model: it needs "
                        f"{size_text(need)}, they have {size_text(room)} together; use more hosts, "
                        "a smaller quantisation or a smaller context (-c)")
    ranked = sorted(found.values(), key=lambda plan: -plan.tokens)
    return structs.replace(ranked[0], others=tuple(
        (plan.name, plan.tokens) for plan in ranked[1:]))


def even_grid(cluster: Cluster, widths: Sequence[int]) -> GridPlan:
    """Return the hosts in their order as stages of these widths, with layers distributed by
    speed.

    Raises PlanError if the cut, the groups or the memory do not allow it.
    """
    if not all(map(cluster.cut.allows, widths)) or sum(widths) > len(cluster.hosts):
        raise PlanError(f"this model's layers cannot be cut for {shape(widths)} on "
                        f"{len(cluster.hosts)} hosts: possible widths are "
                        f"{', '.join(map(str, cluster.cut.widths(len(cluster.hosts))))}")
    teams = grouped(widths, range(len(cluster.hosts)), dict(enumerate(cluster.groups)))
    if teams is None:
        raise PlanError(f"{shape(widths)} needs hosts of different groups in one stage")
    stages = tuple(map(cluster.team, teams))
    layers = _level(cluster, stages)
    if layers is None:
        raise PlanError(f"{shape(widths)} does not fit the memory of its hosts")
    return GridPlan.of(cluster, stages, layers)


def _keep(found: dict[tuple[int, ...], GridPlan], plans: Sequence[GridPlan]) -> None:
    """Keep the fastest plan of each shape."""
    for plan in plans:
        before = found.get(plan.widths)
        if before is None or plan.tokens > before.tokens * _SAME:
            found[plan.widths] = plan


# --- orders of the hosts ----------------------------------------------------------------------


def _orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the orders of the hosts in which contiguous groups are searched.

    They are the given order, the order of speed, and chains along the best links from a few hosts;
    only the given one if all hosts are alike. With groups, each order is also sorted by group.
    """
    hosts, network = cluster.hosts, cluster.network
    given = tuple(range(len(hosts)))
    alike = len({(host.per_cost, host.memory, host.curve) for host in hosts}) == 1
    found = [given]
    if not alike:
        found.append(tuple(sorted(given, key=lambda i: hosts[i].per_cost)))
    if network.special:
        starts = sorted(given, key=lambda i: hosts[i].per_cost)[:4]
        for start in starts:
            chain, left = [start], set(given) - {start}
            while left:
                here = chain[-1]
                chain.append(min(left, key=lambda i: (
                    cluster.sums.seconds(2, cluster.cut.n_embd, network.between(here, i)),
                    hosts[i].per_cost, i)))
                left.discard(chain[-1])
            found.append(tuple(chain))
    if len(set(cluster.groups)) > 1:  # makes hosts that may form a stage neighbours
        found += [tuple(sorted(order, key=lambda i: min(
            place for place, other in enumerate(order)
            if cluster.groups[other] == cluster.groups[i]))) for order in list(found)]
    return list(dict.fromkeys(found))


def _swap(cluster: Cluster, found: dict[tuple[int, ...], GridPlan]) -> None:
    """Improve the best plans: swap two hosts and split the layers again, as long as that helps."""
    for widths in sorted(found, key=lambda key: -found[key].tokens)[:6]:
        better = True
        while better:
            better = False
            plan = found[widths]
            used = [index for stage in plan.stages for index in stage.hosts]
            rest = [i for i in range(len(cluster.hosts)) if i not in used]
            places = [*used, *rest]
            for a, b in itertools.combinations(range(len(places)), 2):
                if a >= len(used):
                    continue
                order = list(places)
                order[a], order[b] = order[b], order[a]
                one = _along(cluster, order, widths)
                if one is not None and one.tokens > found[widths].tokens * 1.001:
                    found[widths], better = one, True


def _along(cluster: Cluster, order: Sequence[int], widths: Sequence[int]) -> GridPlan | None:
    """Return stages of these widths along an order, with the layers that make the slowest stage
    fast."""
    cuts = list(itertools.accumulate(widths, initial=0))
    if not all(cluster.together(order[a:b]) for a, b in itertools.pairwise(cuts)):
        return None
    stages = tuple(cluster.team(sorted(order[a:b])) for a, b in itertools.pairwise(cuts))
    layers = _level(cluster, stages)
    return None if layers is None else GridPlan.of(cluster, stages, layers)


def _level(cluster: Cluster, stages: Sequence[PlannedTeam]) -> tuple[int, ...] | None:
    """Return the layers of each stage that minimise the slowest stage's time; None: they do not
    fit."""
    end, counts = len(stages) - 1, [1] * len(stages)
    most = [cluster.most_layers(one, first=k == 0, last=k == end) for k, one in enumerate(stages)]
    if sum(most) < cluster.n_layers or min(most) < 1 or len(stages) > cluster.n_layers:
        return None
    base = [one.time(0, cluster.load.last_cost if k == end else 0.0, cluster.cut,
                     cluster.sums).taken(1) for k, one in enumerate(stages)]
    each = [one.time(1, 0.0, cluster.cut, cluster.sums).taken(1) - one.overhead for one in stages]
    for _ in range(cluster.n_layers - len(stages)):
        open_ = [k for k in range(len(stages)) if counts[k] < most[k]]
        index = min(open_, key=lambda k: (base[k] + (counts[k] + 1) * each[k], k))
        counts[index] += 1
    return tuple(counts)


# --- dynamic programming ----------------------------------------------------------------------


class _Group(Struct, frozen=True):
    """Hosts start to stop - 1 of an order as one stage.

    fixed: seconds without layers. each: seconds of each layer. last: further seconds of the last
        stage.
    most: the most layers of the first, the last, and any other stage.
    """

    start: int
    stop: int
    one: PlannedTeam
    fixed: float
    each: float
    last: float
    most: tuple[int, int, int]


def _by_bounds(cluster: Cluster, order: Sequence[int]) -> list[GridPlan]:
    """Return, for each bound, the plan with the shortest way; and regular grids of each width."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], GridPlan] = {}

    def add(stages: tuple[PlannedTeam, ...], layers: tuple[int, ...]) -> None:
        key = (tuple(index for one in stages for index in (*one.hosts, -1)), layers)
        if key not in found:
            found[key] = GridPlan.of(cluster, stages, layers)

    for rows in _ROWS:
        groups = _groups(cluster, order, rows)
        if not groups:
            continue
        n = cluster.n_layers
        low = 1 / sum(1 / max(g.each, 1e-12) for g in groups if g.stop - g.start == 1 or n == 1) \
            if any(g.stop - g.start == 1 for g in groups) else min(g.each for g in groups)
        low = max(low, min(g.fixed + g.each for g in groups))
        high = max(g.fixed + n * g.each + g.last for g in groups)
        for bound in np.geomspace(low, high, _BOUNDS):
            path = _shortest(cluster, len(order), groups, float(bound))
            if path is not None:
                add(tuple(group.one for group, _ in path), tuple(count for _, count in path))
    for width in cluster.cut.widths(len(order)):
        count = len(order) // width
        if cluster.allows(width):
            one = _along(cluster, order, [width] * count)
            if one is not None:
                add(one.stages, one.layers)
    return list(found.values())


def _groups(cluster: Cluster, order: Sequence[int], rows: int) -> list[_Group]:
    found = []
    for start, stop in itertools.combinations(range(len(order) + 1), 2):
        if not cluster.allows(stop - start) or not cluster.together(order[start:stop]):
            continue
        one = cluster.team(sorted(order[start:stop]))
        none, layer, last = (one.time(count, cost, cluster.cut, cluster.sums) for count, cost in (
            (0, 0.0), (1, 0.0), (0, cluster.load.last_cost)))
        hop = cluster.hop
        if stop < len(order):
            wire = cluster.network.between(order[stop - 1], order[stop])
            hop += wire.latency + rows * 4 * cluster.cut.n_embd / wire.bandwidth
        fixed = none.taken(rows) + hop
        most = (cluster.most_layers(one, first=True, last=False),
                cluster.most_layers(one, first=False, last=True),
                cluster.most_layers(one, first=False, last=False))
        found.append(_Group(start, stop, one, fixed, layer.taken(rows) - none.taken(rows),
                            last.taken(rows) - none.taken(rows), most))
    return found


def _shortest(cluster: Cluster, n_hosts: int, groups: Sequence[_Group], bound: float
              ) -> list[tuple[_Group, int]] | None:
    """Return the stages with the least total time of which none takes longer than the bound."""
    n = cluster.n_layers
    best: Matrix = np.full((n_hosts + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    delta = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
    came: dict[tuple[int, int], tuple[int, int, _Group | None]] = {}
    starting: dict[int, list[_Group]] = {}
    for group in groups:
        starting.setdefault(group.start, []).append(group)
    for at in range(n_hosts):
        here = best[at]
        skip = here < best[at + 1]
        for layer in np.flatnonzero(skip).tolist():
            best[at + 1, layer] = here[layer]
            came[at + 1, layer] = (at, layer, None)
        for group in starting.get(at, ()):
            _extend(group, here, best[group.stop], delta, came, bound)
    if not np.isfinite(best[n_hosts, n]):
        return None
    path: list[tuple[_Group, int]] = []
    at, layer = n_hosts, n
    while (at, layer) != (0, 0):
        before, placed, used = came[at, layer]
        if used is not None:
            path.append((used, layer - placed))
        at, layer = before, placed
    return path[::-1]


def _extend(group: _Group, here: Matrix, there: Matrix, delta: npt.NDArray[np.int64],
            came: dict[tuple[int, int], tuple[int, int, _Group | None]], bound: float) -> None:
    """Extend every partial plan by a stage of this group with every possible number of layers.

    delta: int[n + 1, n + 1]: layers between two boundaries.
    """
    times = group.fixed + group.each * delta
    times[:, -1] += group.last
    first, last, other = group.most
    most = np.full(delta.shape, other)
    most[0, :], most[:, -1] = first, last
    most[0, -1] = min(first, last)
    usable = (delta > 0) & (delta <= most) & (times <= bound * _SAME)
    ways = np.where(usable, here[:, None] + times, np.inf)
    start = np.argmin(ways, axis=0)
    least = ways[start, np.arange(len(there))]
    for layer in np.flatnonzero(least < there).tolist():
        there[layer] = least[layer]
        came[group.stop, layer] = (group.start, int(start[layer]), group)


@dataclass(frozen=True)
class Cluster:
    """Everything that a grid is planned for.

    hosts: machines, or sockets of them.
    load: costs and bytes of the layers; all layers are assumed to have the same cost.
    cut: how a layer may be cut. sums: the cost of a sum. mixes: the loads to plan for.
    hop: CPU seconds of a message between stages. draft: seconds per proposal.
    widths: the allowed widths, () for all that the cut allows.
    groups: of each host; hosts of different groups may not form a stage. (): no restriction.
    """

    hosts: tuple[Member, ...]
    network: Network
    load: Load
    cut: TeamCut
    sums: SumCost = field(default_factory=SumCost)
    mixes: tuple[LoadMix, ...] = (LoadMix(),)
    hop: float = 0.0
    draft: float = 0.0
    widths: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    _teams: dict[tuple[int, ...], PlannedTeam] = field(default_factory=dict, compare=False)

    @cached_property
    def n_layers(self) -> int:
        """The number of layers of the model."""
        return len(self.load.costs)

    @cached_property
    def cost(self) -> float:
        """The average cost of a layer."""
        return sum(self.load.costs) / self.n_layers

    def team(self, chosen: Sequence[int]) -> PlannedTeam:
        """Return these hosts as one stage, see `teams.team`. The result is cached."""
        key = tuple(chosen)
        if key not in self._teams:
            self._teams[key] = team(self.hosts, key, self.network, self.cut, self.cost)
        return self._teams[key]

    def allows(self, width: int) -> bool:
        """Whether a stage may have this width."""
        return self.cut.allows(width) and (not self.widths or width in self.widths)

    def together(self, chosen: Sequence[int]) -> bool:
        """Whether these hosts may form a stage."""
        return not self.groups or len({self.groups[index] for index in chosen}) == 1

    def bytes_of(self, one: PlannedTeam, n_layers: int, *, first: bool, last: bool) -> list[float]:
        """Return the bytes of memory of each member of a stage."""
        size = sum(self.load.sizes) / self.n_layers
        ends = self.load.first_bytes * first + self.load.scratch
        return [share * n_layers * size + ends + self.load.last_bytes * last / one.width
                for share in one.shares]

    def most_layers(self, one: PlannedTeam, *, first: bool, last: bool) -> int:
        """Return the number of layers that the members' memory allows."""
        size, found = sum(self.load.sizes) / self.n_layers, float(self.n_layers)
        base = self.bytes_of(one, 0, first=first, last=last)
        for index, share, taken in zip(one.hosts, one.shares, base, strict=True):
            room = self.hosts[index].memory - taken
            found = min(found, room / (share * size) if size else found if room >= 0 else -1.0)
        return int(max(found, 0.0))


def arrange(cluster: Cluster, stages: Sequence[PlannedTeam], layers: Sequence[int]) -> Arrangement:
    """Return stages with these numbers of layers as an arrangement for the judge."""
    end, n_embd = len(stages) - 1, cluster.cut.n_embd
    times = tuple(one.time(count, cluster.load.last_cost if k == end else 0.0, cluster.cut,
                           cluster.sums)
                  for k, (one, count) in enumerate(zip(stages, layers, strict=True)))
    hops = [_hop(cluster, a, b) for a, b in itertools.pairwise(stages)] or [0.0]
    per_row = 4 * n_embd / cluster.network.usual.bandwidth
    usual = cluster.network.usual.latency + cluster.hop
    link = (sum(hops) + 2 * usual) / (len(stages) + 1)
    return Arrangement(times, link, per_row * (len(stages) - 1) / (len(stages) + 1), cluster.draft)


def _hop(cluster: Cluster, one: PlannedTeam, two: PlannedTeam) -> float:
    """Return the seconds from a stage to the next: each member of it receives from one of this
    one's."""
    wires = [cluster.network.between(one.hosts[k % one.width], host)
             for k, host in enumerate(two.hosts)]
    size = 4 * cluster.cut.n_embd
    return cluster.hop + max(wire.latency + size / wire.bandwidth for wire in wires)
