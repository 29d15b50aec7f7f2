"""A queue of speculative tokens that wait to be issued, most probable first.

It holds every token of a lane that was drafted and not yet issued, ordered by the estimated
probability of acceptance (the product of the confidences on its path). This is the best order for a
pipeline in which every run takes one slot: an alternative to a doubtful token comes before the
tenth token of a long chain. Independent of runs in flight, limits and drafts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct, field

from pipeinfer.scheduler.token_tree import PLANNED, Node

_PRUNE = 256  #: entries beyond which decided ones are removed

_Heap: TypeAlias = list[tuple[float, int, Node]]


class GuessQueue(Struct):
    """The planned nodes of one lane, and its leaves: nodes below which nothing was drafted yet."""

    _planned: _Heap = field(default_factory=list)
    _leaves: _Heap = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, nodes: Sequence[Node]) -> None:
        """Add planned nodes, parents first."""
        for node in nodes:
            self._push(self._planned, node)
            self._push(self._leaves, node)

    def add_leaf(self, node: Node) -> None:
        """Add an issued node below which nothing was drafted."""
        self._push(self._leaves, node)

    def clear(self) -> None:
        """Remove all nodes."""
        self._planned.clear()
        self._leaves.clear()

    def best(self) -> Node | None:
        """The planned node that is most likely to be accepted; None without any."""
        return _top(self._planned, _waits)

    def best_leaf(self) -> Node | None:
        """The open leaf that is most likely to be accepted; None without any."""
        return _top(self._leaves, _unranked)

    def child(self, parent: Node, token: int) -> Node | None:
        """The planned node for `token` after `parent`; None if there is none."""
        return next((entry[2] for entry in self._planned
                     if entry[2].parent is parent and entry[2].token == token), None)

    def take(self, count: int, ids: int, floor: float, *, chain: bool = False,
             base: Node | None = None) -> list[Node]:
        """Remove and return up to `count` planned nodes for one run, parents first.

        ids: sequence ids left for branches
        floor: least priority
        chain: whether each is to follow the one before it
        base: the only issued node that they may follow, where their paths continue no id
        The parents of a run's rows are in the run or all in one earlier run, so that skipping stays
        transitive.
        """
        taken: list[Node] = []
        passed: list[tuple[float, int, Node]] = []
        inside: set[int] = set()
        busy: set[int] = set()  # parents that a child of this run continues
        origin: int | None = None
        while self._planned and len(taken) < count and len(passed) < 4 * count + 8:
            entry = heapq.heappop(self._planned)
            node = entry[2]
            if not _waits(node):
                continue
            if node.priority < floor:
                passed.append(entry)
                break
            parent = node.parent
            assert parent is not None
            own = id(parent) in inside
            continues = not parent.children and id(parent) not in busy and (own or base is None)
            fits = own or (parent.run_id != PLANNED and origin in (None, parent.run_id)
                           and base in (None, parent))
            if chain and taken and parent is not taken[-1]:
                fits = False
            if not fits or not (continues or ids):
                passed.append(entry)
                continue
            if not own:
                origin = parent.run_id
            ids -= not continues
            busy.add(id(parent))
            inside.add(id(node))
            taken.append(node)
        for entry in passed:
            heapq.heappush(self._planned, entry)
        return taken

    def _push(self, heap: _Heap, node: Node) -> None:
        if len(heap) > _PRUNE:
            keep = _waits if heap is self._planned else _unranked
            heap[:] = [entry for entry in heap if keep(entry[2])]
            heapq.heapify(heap)
        key = node.priority if heap is self._planned else node.score
        heapq.heappush(heap, (-key, next(self._count), node))


def probability(score: float, frontier: Node) -> float:
    """Convert a score to the probability of acceptance, given that `frontier` is accepted."""
    return math.exp(min(score - frontier.score, 0.0))


def _waits(node: Node) -> bool:
    return node.run_id == PLANNED and node.open


def _unranked(node: Node) -> bool:
    return not node.ranked and node.open


def _top(heap: _Heap, keep: Callable[[Node], bool]) -> Node | None:
    while heap:
        node = heap[0][2]
        if keep(node):
            return node
        heapq.heappop(heap)
    return None
