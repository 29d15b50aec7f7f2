"""Which node is which member of which stage.

A stage is held by one rank, or by several that share its layers as slices and sum up partial
results: a wide stage. The nodes of a pipeline of plain stages are its stages; members of wide ones
are counted stage by stage. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from msgspec import Struct

from pipeinfer.core.control import PortName
from pipeinfer.errors import ProtocolError, UsageError


class Grid(Struct, frozen=True):
    """widths: members of each stage, in order. Node 0 is the head, which is no stage.

    Member 0 of a stage leads it: it alone is told of cancellations and answers the head.
    """

    widths: tuple[int, ...]

    @classmethod
    def plain(cls, n_stages: int) -> Grid:
        """A pipeline of stages with one member each."""
        return cls((1,) * n_stages)

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.widths)

    @property
    def n_nodes(self) -> int:
        """Members of all stages together; their nodes are 1 to this."""
        return sum(self.widths)

    @property
    def is_wide(self) -> bool:
        """Whether a stage has more than one member."""
        return self.n_nodes > self.n_stages

    def members(self, stage: int) -> range:
        """The nodes of a stage (1 to `n_stages`), its leader first."""
        first = 1 + sum(self.widths[: stage - 1])
        return range(first, first + self.widths[stage - 1])

    def leader(self, stage: int) -> int:
        """The node that leads a stage; 0 is the head's."""
        return self.members(stage)[0] if stage else 0

    @property
    def leaders(self) -> tuple[int, ...]:
        """The nodes that lead stages 1, 2, ..."""
        return tuple(1 + before for before in itertools.accumulate((0, *self.widths[:-1])))

    def name(self, node: int) -> PortName:
        """Stage and member of a node. Raises ProtocolError for one that there is not."""
        left = node - 1
        for stage, width in enumerate(self.widths, 1):
            if 0 <= left < width:
                return PortName(stage, left)
            left -= width
        raise ProtocolError(f"there is no node {node} among {self.n_nodes}")

    def node(self, name: PortName) -> int | None:
        """The node with this name, None where there is none."""
        if not 0 < name.stage <= self.n_stages or not 0 <= name.member < self.widths[
                name.stage - 1]:
            return None
        return self.members(name.stage)[name.member]

    def successors(self, node: int) -> tuple[int, ...]:
        """The members of the next stage that get their rows from this node: each gets them from
        one. The head's are all of the first stage; the last stage's are none."""
        if not node:
            return tuple(self.members(1))
        name = self.name(node)
        if name.stage == self.n_stages:
            return ()
        width = self.widths[name.stage - 1]
        return tuple(other for i, other in enumerate(self.members(name.stage + 1))
                     if i % width == name.member)

    def predecessor(self, node: int) -> int:
        """The node that this one gets its rows from."""
        name = self.name(node)
        if name.stage == 1:
            return 0
        before = self.members(name.stage - 1)
        return before[name.member % len(before)]


def parse_widths(text: str, option: str = "--grid") -> tuple[int, ...]:
    """Members of each stage from "2x4" (stages x members) or "4,3,1". Raises UsageError."""
    words = text.lower().split("x") if "x" in text.lower() else text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise UsageError(f"{option} {text}: give stages x members, such as 2x4, or the members "
                         "of each stage, such as 4,3")
    counts = tuple(int(word) for word in words)
    if "x" in text.lower():
        if len(counts) != 2:
            raise UsageError(f"{option} {text}: give two numbers, stages x members, such as 2x4")
        counts = (counts[1],) * min(counts[0], 4096)
    if not counts or not all(0 < count <= 1024 for count in counts):
        raise UsageError(f"{option} {text}: every stage needs from 1 to 1024 members")
    return counts


def deal(n_slices: int, n_members: int) -> tuple[tuple[int, ...], ...]:
    """Slices 0 to `n_slices - 1` on members, in order, as evenly as possible. Raises UsageError
    where a member would get none."""
    if n_slices < n_members:
        raise UsageError(f"{n_slices} slices for {n_members} members: every member of a stage "
                         "needs at least one; raise --slices")
    size, extra = divmod(n_slices, n_members)
    bounds = list(itertools.accumulate((size + (i < extra) for i in range(n_members)), initial=0))
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))


def grouped(widths: Sequence[int], candidates: Sequence[int], groups: Mapping[int, str]
            ) -> tuple[tuple[int, ...], ...] | None:
    """Ranks of stages with these widths, each of one group, as early ranks as possible in the order
    of the stages; None where there are none."""
    left: dict[str, list[int]] = {}
    for rank in candidates:
        left.setdefault(groups.get(rank, ""), []).append(rank)
    hopeless: set[tuple[int, ...]] = set()

    def rest(stage: int) -> list[tuple[int, ...]] | None:
        state = (stage, *map(len, left.values()))
        if stage == len(widths):
            return []
        if state in hopeless:
            return None
        width = widths[stage]
        able = sorted((own[:width], name) for name, own in left.items() if len(own) >= width)
        for team, name in able:
            own, left[name] = left[name], left[name][width:]
            further = rest(stage + 1)
            if further is not None:
                return [tuple(team), *further]
            left[name] = own
        hopeless.add(state)
        return None

    found = rest(0)
    return None if found is None else tuple(found)


def owner_of(holders: Sequence[Sequence[int]], index: int) -> int:
    """The member that holds a slice. Raises ProtocolError where none does."""
    for member, held in enumerate(holders):
        if index in held:
            return member
    raise ProtocolError(f"no member of the stage holds slice {index}")
