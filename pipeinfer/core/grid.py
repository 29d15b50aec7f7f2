"""The numbering of a pipeline's nodes by stage and member.

One rank holds a stage, or several ranks share its layers as slices and all-reduce their partial
results: a wide stage. Node 0 is the head. In a pipeline of plain stages the nodes 1, 2, ... are the
stages; with wide stages, members are counted stage by stage. Pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from msgspec import Struct

from pipeinfer.core.control import PortName
from pipeinfer.errors import ProtocolError, UsageError


class Grid(Struct, frozen=True):
    """The stages of a pipeline and the members of each.

    widths: number of members of each stage, in order

    Node 0 is the head, which is not a stage. Member 0 leads its stage: only it receives
    cancellations and sends results to the head.
    """

    widths: tuple[int, ...]

    @classmethod
    def plain(cls, n_stages: int) -> Grid:
        """A pipeline of stages with one member each."""
        return cls((1,) * n_stages)

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.widths)

    @property
    def n_nodes(self) -> int:
        """The number of members of all stages together; their nodes are 1 to this."""
        return sum(self.widths)

    @property
    def is_wide(self) -> bool:
        """Whether any stage has more than one member."""
        return self.n_nodes > self.n_stages

    def members(self, stage: int) -> range:
        """The nodes of a stage (1 to `n_stages`), its leader first."""
        first = 1 + sum(self.widths[: stage - 1])
        return range(first, first + self.widths[stage - 1])

    def leader(self, stage: int) -> int:
        """The node that leads a stage; for stage 0 the head's node, 0."""
        return self.members(stage)[0] if stage else 0

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leaders' nodes, of stages 1, 2, ..."""
        return tuple(1 + before for before in itertools.accumulate((0, *self.widths[:-1])))

    def name(self, node: int) -> PortName:
        """The stage and member of a node. Raises ProtocolError if there is no such node."""
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
        """The nodes of the next stage to which this node sends rows.

        Each member receives its rows from one node. The head sends to all members of the first
        stage. The last stage has no successors. Raises ProtocolError if there is no such node.
        """
        if not node:
            return tuple(self.members(1))
        name = self.name(node)
        if name.stage == self.n_stages:
            return ()
        width = self.widths[name.stage - 1]
        return tuple(other for i, other in enumerate(self.members(name.stage + 1))
                     if i % width == name.member)

    def predecessor(self, node: int) -> int:
        """The node from which this one receives its rows. Raises ProtocolError as `name` does."""
        name = self.name(node)
        if name.stage == 1:
            return 0
        before = self.members(name.stage - 1)
        return before[name.member % len(before)]


def parse_widths(text: str, option: str = "--grid") -> tuple[int, ...]:
    """Return the number of members of each stage from the text of an option.

    text: "2x4" (stages x members) or "4,3,1" (members of each stage)
    option: name of the option, for the error message
    Raises UsageError for any other text.
    """
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
    """Distribute the slices of a stage over its members, in order and as evenly as possible.

    n_slices: the slices are 0 to `n_slices - 1`
    n_members: members of the stage
    Returns the slices of each member. Raises UsageError where a member would get none.
    """
    if n_slices < n_members:
        raise UsageError(f"{n_slices} slices for {n_members} members: every member of a stage "
                         "needs at least one; raise --slices")
    size, extra = divmod(n_slices, n_members)
    bounds = list(itertools.accumulate((size + (i < extra) for i in range(n_members)), initial=0))
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))


def grouped(widths: Sequence[int], candidates: Sequence[int], groups: Mapping[int, str]
            ) -> tuple[tuple[int, ...], ...] | None:
    """Assign ranks to stages so that the members of each stage are of one group.

    widths: members of each stage
    candidates: ranks in order of preference
    groups: the group of a rank; "" where the rank is missing
    Returns the ranks of each stage, with the earliest ranks possible in the order of the stages;
    None where no assignment exists.
    """
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
    """The member that holds slice `index`. Raises ProtocolError where no member does."""
    for member, held in enumerate(holders):
        if index in held:
            return member
    raise ProtocolError(f"no member of the stage holds slice {index}")
