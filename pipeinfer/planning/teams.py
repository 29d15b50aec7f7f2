"""Ranks that hold the same layers together: each member's share, and what a sum between them costs.

A member computes its share of the attention, the members add up what they found, then the same for
the feed-forward part: two sums a layer, and at each of them all wait for the slowest member. Shares
follow speeds, in whole pieces: groups of heads, blocks of columns. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from pipeinfer.planning.judge import Curve, StageTime, relative

SUMS = 2  #: per layer
EXCHANGE = 28e-6  #: seconds; measured by messages between two ranks of a host, 32 KB each
PEER = 2e-6  #: seconds; assumed


class Host(Struct, frozen=True):
    """A machine, or a socket of one. per_cost: seconds per unit of cost for one row, with all its
    cores; overhead: seconds of each run; memory: bytes; curve: as in `StageTime`."""

    name: str
    per_cost: float
    memory: float = math.inf
    overhead: float = 0.0
    curve: Curve = ()


class Wire(Struct, frozen=True):
    """Between two hosts: seconds one way, bytes per second."""

    latency: float
    bandwidth: float


class Network(Struct, frozen=True):
    """Wires by pairs of hosts, `usual` for those that are not named."""

    usual: Wire
    special: Mapping[frozenset[int], Wire] = field(default_factory=dict)

    def between(self, one: int, two: int) -> Wire:
        """The wire between two hosts, by their indices; of a host with itself: no time."""
        if one == two:
            return Wire(0.0, math.inf)
        return self.special.get(frozenset((one, two)), self.usual)

    def worst(self, hosts: Sequence[int]) -> Wire:
        """Of any two of these hosts: an exchange waits for its slowest part."""
        wires = [self.between(a, b) for k, a in enumerate(hosts) for b in hosts[k + 1:]]
        if not wires:
            return Wire(0.0, math.inf)
        return Wire(max(wire.latency for wire in wires), min(wire.bandwidth for wire in wires))


class SumCost(Struct, frozen=True):
    """What a sum costs besides the wire. item: bytes of a value on the wire. exchange: seconds of
    processor time of an exchange, peer: of each further member. See docs/wide-planning.md for
    where the figures come from."""

    item: int = 4
    exchange: float = EXCHANGE
    peer: float = PEER

    def seconds(self, width: int, values: float, wire: Wire) -> float:
        """Of one sum of `values` values over `width` members.

        Either each member sends all it has to every other one, or each gets a part of the rows,
        adds it up and sends the result around: less to send, but two exchanges.
        """
        if width == 1:
            return 0.0
        size = values * self.item
        once = self.exchange + self.peer * (width - 2) + wire.latency
        whole = once + (width - 1) * size / wire.bandwidth
        parts = 2 * once + 2 * (width - 1) / width * size / wire.bandwidth
        return min(whole, parts)


class Cut(Struct, frozen=True):
    """How a layer can be shared out.

    groups: KV groups, in the smallest numbers that end at a block of the quantisation. heads:
    pieces of the query heads that do so: with more members than groups each takes some of one
    group, whose keys and values several compute then. blocks: pieces of the FFN's columns.
    attention: the part of a layer's cost that is attention, of which `kv` keys and values.
    """

    n_embd: int
    groups: int
    blocks: int
    attention: float
    kv: float = 0.0
    heads: int = 0

    def allows(self, width: int) -> bool:
        """Whether a layer can be cut for so many members."""
        if width <= self.groups:
            return width <= self.blocks
        return width <= self.heads and width <= self.blocks

    def widths(self, most: int) -> tuple[int, ...]:
        """All possible ones up to `most`."""
        return tuple(width for width in range(1, most + 1) if self.allows(width))


class Team(Struct, frozen=True):
    """Members of a stage. hosts: their indices; pieces, blocks: of each member; layer: seconds of
    a layer's computing for one row; head: of the output matrix per unit of cost; attention, feed:
    what each member computes in the two parts of a layer, as shares of the whole layer; wire: the
    worst between them."""

    hosts: tuple[int, ...]
    pieces: tuple[int, ...]
    blocks: tuple[int, ...]
    layer: float
    head: float
    overhead: float
    attention: tuple[float, ...]
    feed: tuple[float, ...]
    wire: Wire
    curve: Curve

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each member in a layer's weights."""
        return tuple(a + f for a, f in zip(self.attention, self.feed, strict=True))

    @property
    def width(self) -> int:
        """How many members."""
        return len(self.hosts)

    def time(self, n_layers: int, last_cost: float, cut: Cut, sums: SumCost) -> StageTime:
        """Of a stage with so many layers; last_cost: of the output matrix, 0 without it."""
        one, two = (self.in_sums(n_layers, rows, cut, sums, last=last_cost > 0) for rows in (1, 2))
        seconds = self.overhead + n_layers * self.layer + last_cost * self.head
        return StageTime(seconds, self.curve, one, two - one)

    def in_sums(self, n_layers: int, rows: int, cut: Cut, sums: SumCost, *, last: bool) -> float:
        """Seconds of all sums; the output's slices send their best choices only."""
        found = SUMS * n_layers * sums.seconds(self.width, rows * cut.n_embd, self.wire)
        return found + (sums.seconds(self.width, 0.0, self.wire) if last else 0.0)


def team(hosts: Sequence[Host], chosen: Sequence[int], network: Network, cut: Cut, cost: float
         ) -> Team:
    """These hosts as members of one stage; cost: of a layer. The cut must allow so many."""
    members = [hosts[index] for index in chosen]
    speeds = [member.per_cost for member in members]
    pieces, keys = _heads(cut, speeds)
    blocks = shares_of(cut.blocks, speeds)
    total = sum(pieces)
    attention = [(cut.attention - cut.kv) * count / total + cut.kv * own / cut.groups
                 for count, own in zip(pieces, keys, strict=True)]
    feed = [(1 - cut.attention) * count / sum(blocks) for count in blocks]
    layer = cost * (max(s * a for s, a in zip(speeds, attention, strict=True))
                    + max(s * f for s, f in zip(speeds, feed, strict=True)))
    return Team(
        tuple(chosen), tuple(pieces), tuple(blocks), layer, 1 / sum(1 / s for s in speeds),
        max(member.overhead for member in members),
        tuple(attention), tuple(feed), network.worst(chosen),
        _worst_curve([member.curve for member in members]))


def _heads(cut: Cut, speeds: Sequence[float]) -> tuple[list[int], list[int]]:
    """Pieces of the attention and groups of keys and values of each member.

    More members than groups: each has some of one group's query heads, and computes its keys.
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
    """Whole pieces for each member, at least one, so that the slowest is as fast as possible.

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
    """At each width the dearest of all."""
    rows = sorted({point[0] for curve in curves for point in curve})
    return tuple((count, max(relative(curve, count) for curve in curves)) for count in rows)
