"""The input for planning a grid (hosts, links, model, load), and the times of stages on it.

Pure: callers pass speeds, links and the cost of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipeinfer.planning.judge import Arrangement, LoadMix
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.teams import Network, PlannedTeam, SumCost, TeamCut, team


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
