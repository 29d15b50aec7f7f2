"""The members of a wide stage: each member's share of the layers, and the cost of a sum.

A member computes its share of the attention, the members add up their partial results, then the
same for the feed-forward part: two sums per layer, and in each all wait for the slowest member.
Shares follow speeds, in whole pieces: groups of heads, blocks of columns. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from pipeinfer.models.slice_parts import layout
from pipeinfer.planning.judge import Curve, StageTime, relative
from pipeinfer.planning.partition import Member

SUMS = 2  #: per layer
EXCHANGE = 28e-6  #: seconds; measured by messages between two ranks of a host, 32 KB each
PEER = 2e-6  #: seconds; assumed


class Wire(Struct, frozen=True):
    """The link between two hosts: seconds one way, bytes per second."""

    latency: float
    bandwidth: float


class Network(Struct, frozen=True):
    """The wires by pairs of hosts; `usual` for pairs that are not in `special`."""

    usual: Wire
    special: Mapping[frozenset[int], Wire] = field(default_factory=dict)

    def between(self, one: int, two: int) -> Wire:
        """Return the wire between two hosts, given by index. A host to itself takes no time."""
        if one == two:
            return Wire(0.0, math.inf)
        return self.special.get(frozenset((one, two)), self.usual)

    def worst(self, hosts: Sequence[int]) -> Wire:
        """Return the worst wire of these hosts: an exchange waits for its slowest part."""
        wires = [self.between(a, b) for k, a in enumerate(hosts) for b in hosts[k + 1:]]
        if not wires:
            return Wire(0.0, math.inf)
        return Wire(max(wire.latency for wire in wires), min(wire.bandwidth for wire in wires))


class SumCost(Struct, frozen=True):
    """The cost of a sum without the wire.

    item: bytes of a value on the wire.
    exchange: CPU seconds of an exchange. peer: CPU seconds of each further member.
    docs/wide-planning.md has the source of the figures.
    """

    item: int = 4
    exchange: float = EXCHANGE
    peer: float = PEER

    def seconds(self, width: int, values: float, wire: Wire) -> float:
        """Return the seconds of one sum of `values` values over `width` members.

        Either each member sends all its values to every other one, or each adds up a part of them
        and sends the result to the others: fewer bytes, but two exchanges. The faster way counts.
        """
        if width == 1:
            return 0.0
        size = values * self.item
        once = self.exchange + self.peer * (width - 2) + wire.latency
        whole = once + (width - 1) * size / wire.bandwidth
        parts = 2 * once + 2 * (width - 1) / width * size / wire.bandwidth
        return min(whole, parts)


class TeamCut(Struct, frozen=True):
    """How a layer can be cut.

    groups: KV groups, in the smallest units that end at a block of the quantisation.
    heads: pieces of the query heads that do so. With more members than groups, several members
        share a group, and each computes its keys and values.
    blocks: pieces of the FFN's columns.
    attention: share of a layer's cost that is attention. kv: share that is keys and values.
    whole: share of the cost that every member computes (routers; what all heads read).
    divided: into how many groups the experts of a mixture can be divided, and how many a row draws.
    stored: shares of a layer's memory that are attention, and that every member stores; None: as
        of the cost. Of a mixture's experts a row reads only some.
    """

    n_embd: int
    groups: int
    blocks: int
    attention: float
    kv: float = 0.0
    heads: int = 0
    whole: float = 0.0
    divided: tuple[int, int] = (1, 0)
    stored: tuple[float, float] | None = None

    def allows(self, width: int) -> bool:
        """Whether a layer can be cut for so many members."""
        return width <= max(self.groups, self.heads) and layout(
            width, self.blocks, self.divided[0])[0] > 0

    def widths(self, most: int) -> tuple[int, ...]:
        """Return all possible widths up to `most`."""
        return tuple(width for width in range(1, most + 1) if self.allows(width))


class PlannedTeam(Struct, frozen=True):
    """The members of a stage.

    hosts: their indices. pieces, blocks: of each member.
    layer: seconds of a layer's computing for one row. head: of the output matrix, per unit of
        cost.
    attention, feed: each member's part in the two parts of a layer, as shares of the whole layer.
    shares: each member's share of a layer's memory.
    wire: the worst between them.
    """

    hosts: tuple[int, ...]
    pieces: tuple[int, ...]
    blocks: tuple[int, ...]
    layer: float
    head: float
    overhead: float
    attention: tuple[float, ...]
    feed: tuple[float, ...]
    shares: tuple[float, ...]
    wire: Wire
    curve: Curve

    @property
    def width(self) -> int:
        """The number of members."""
        return len(self.hosts)

    def time(self, n_layers: int, last_cost: float, cut: TeamCut, sums: SumCost) -> StageTime:
        """Return the times of a stage with so many layers. last_cost: of the output matrix, 0
        without it."""
        one, two = (self.in_sums(n_layers, rows, cut, sums, last=last_cost > 0) for rows in (1, 2))
        seconds = self.overhead + n_layers * self.layer + last_cost * self.head
        return StageTime(seconds, self.curve, one, two - one)

    def in_sums(self, n_layers: int, rows: int, cut: TeamCut, sums: SumCost, *, last: bool
                ) -> float:
        """Return the seconds of all sums; for the output matrix one exchange that sends no whole
        rows."""
        found = SUMS * n_layers * sums.seconds(self.width, rows * cut.n_embd, self.wire)
        return found + (sums.seconds(self.width, 0.0, self.wire) if last else 0.0)


def team(hosts: Sequence[Member], chosen: Sequence[int], network: Network, cut: TeamCut, cost: float
         ) -> PlannedTeam:
    """Return these hosts as members of one stage, which the cut must allow. cost: of a layer."""
    members = [hosts[index] for index in chosen]
    speeds = [member.per_cost for member in members]
    pieces, keys = _heads(cut, speeds)
    width, groups = layout(len(speeds), cut.blocks, cut.divided[0])
    blocks = [own for k in range(groups)
              for own in shares_of(cut.blocks, speeds[k * width:(k + 1) * width])]
    busy = busiest(groups, cut.divided[1])
    total = sum(pieces)
    attention = [(cut.attention - cut.kv) * count / total + cut.kv * own / cut.groups
                 for count, own in zip(pieces, keys, strict=True)]
    feed = [(1 - cut.attention - cut.whole) * busy * count / cut.blocks for count in blocks]
    layer = cost * (max(s * a for s, a in zip(speeds, attention, strict=True))
                    + max(s * f for s, f in zip(speeds, feed, strict=True))
                    + cut.whole * max(speeds))
    heads, whole = cut.stored or (cut.attention, cut.whole)
    shares = [heads * part / cut.attention + (1 - heads - whole) * count / sum(blocks) + whole
              for part, count in zip(attention, blocks, strict=True)]
    return PlannedTeam(
        tuple(chosen), tuple(pieces), tuple(blocks), layer, 1 / sum(1 / s for s in speeds),
        max(member.overhead for member in members),
        tuple(attention), tuple(feed), tuple(shares), network.worst(chosen),
        _worst_curve([member.curve for member in members]))


def busiest(groups: int, drawn: int) -> float:
    """Return the share of a row's experts that the group has of which it draws most, on average.

    drawn: experts of a row, drawn as if at random.
    """
    if groups == 1:
        return 1.0
    found = 0.0
    for most in range(drawn):  # the chance that some group has more than these
        ways = np.ones(1)
        for _ in range(groups):
            ways = np.convolve(ways, [1 / math.factorial(k) for k in range(most + 1)])
        fewer = float(ways[drawn]) if drawn < len(ways) else 0.0
        found += 1 - fewer * math.factorial(drawn) / groups ** drawn
    return found / drawn


def _heads(cut: TeamCut, speeds: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return each member's pieces of the attention, and its groups of keys and values.

    With more members than groups, each has some query heads of one group, and computes its keys.
    """
    width = len(speeds)
    if width <= cut.groups:
        pieces = shares_of(cut.groups, speeds)
        return pieces, pieces
    found: list[int] = []
    sharers = [width // cut.groups + (k < width % cut.groups) for k in range(cut.groups)]
    for count in sharers:
        own = speeds[len(found):len(found) + count]
        found += shares_of(cut.heads // cut.groups, own)
    return found, [1] * width


def shares_of(pieces: int, speeds: Sequence[float]) -> list[int]:
    """Return whole pieces for each member, at least one, so that the slowest is as fast as
    possible.

    speeds: seconds per piece. Of equal members earlier ones get more.
    """
    counts = [1] * len(speeds)
    heap = [(2 * speed, index) for index, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(pieces - len(speeds)):
        _, index = heapq.heappop(heap)
        counts[index] += 1
        heapq.heappush(heap, ((counts[index] + 1) * speeds[index], index))
    return counts


def _worst_curve(curves: Sequence[Curve]) -> Curve:
    """Return, for each number of rows, the highest cost of all curves."""
    rows = sorted({point[0] for curve in curves for point in curve})
    return tuple((count, max(relative(curve, count) for curve in curves)) for count in rows)
