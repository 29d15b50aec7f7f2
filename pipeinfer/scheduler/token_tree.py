"""The token tree of one lane, and the walk that accepts tokens.

The root is the last accepted token (the *frontier*). Below it are tokens that were already issued
speculatively. When the target's choice after the frontier arrives, that choice is accepted: if an
issued child has this token, the frontier moves there; else the caller issues the chosen token
alone. Every other subtree dies. SpecInfer's verification, PipeInfer's continuous speculation and
its invalidation are all this walk (docs/algorithms.md 3).

Sequence ids: the first child that continues its parent's id has the same id, every further one
starts an id of its own; rows of one run that lie on several new paths carry all their ids. The pool
allocates the ids. Independent of runs in flight, policies and drafts.

Under `--policy published` each speculative run has ids of its own (`BufferedTree`): PipeInfer's
pipelined multibuffering of the cache (paper, section IV-C; docs/algorithms.md 4.10). Accepted
tokens have the lane's first id, the canonical sequence (the front buffer), which never changes.
Each speculative run takes a further id for each of its paths, first in, first out (a back buffer),
with copies of the cells that it attends to. Accepted cells are copied to the canonical sequence and
from there to the lane's other ids; an id that no path needs is free again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt
from msgspec import Struct, field
from typing_extensions import override

from pipeinfer.core.drafting import Proposal
from pipeinfer.core.messages import NO_RUN
from pipeinfer.core.types import Choice
from pipeinfer.scheduler.sequence_pool import SequencePool

PLANNED = -2  #: `run_id` of a node that has not been issued


class Node(Struct, eq=False):
    """A token of the tree, issued or planned.

    A planned node has no ids, its `run_id` is PLANNED, and it is not among its parent's children
    yet.

    token: vocabulary id
    pos: position in the text
    parent: the node before it; None for the root
    seq_ids: ids that its cell is stored under; it attends to the first, which its first child
        continues
    run_id: the run that evaluates it, or PLANNED
    speculative: whether it is a speculative token
    score: log of the estimated probability of the speculative tokens that lead to it
    priority: the score that sets its place in the queue
    ranked: whether a draft has proposed what may follow it (`guesses`)
    guesses: these proposals
    children: issued nodes that follow it
    choice: the target's choice after it; None while in flight
    taps: its row for a head of the target, see `Decode.taps`
    alive: whether it can still be accepted
    accepted: whether the frontier has reached it
    skip: positions that are left free behind it
    hint: whether its result is a hint for its proposer; it is never accepted
    wanted: whether its choice is returned
    sees: further ids that it attends to
    paid: whether only a draft's model has proposed it
    hinted: whether hints below it were planned
    step: how many passes through the pipeline, one after the other, led to its being issued
    """

    token: int
    pos: int
    parent: Node | None
    seq_ids: tuple[int, ...]
    run_id: int
    speculative: bool
    score: float = 0.0
    priority: float = 0.0
    ranked: bool = False
    guesses: list[Proposal] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    choice: Choice | None = None
    taps: npt.NDArray[Any] | None = None
    alive: bool = True
    accepted: bool = False
    skip: int = 0
    hint: bool = False
    wanted: bool = True
    sees: tuple[int, ...] = ()
    paid: bool = False
    hinted: bool = False
    step: int = 0

    @property
    def next_pos(self) -> int:
        """The position of its children."""
        return self.pos + 1 + self.skip

    def child(self, token: int) -> Node | None:
        """The child with `token` that may be accepted; None if there is none."""
        return next((c for c in self.children if c.token == token and not c.hint), None)

    def subtree(self) -> Iterator[Node]:
        """This node and everything below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    @property
    def open(self) -> bool:
        """Whether it can still be accepted later: it is alive, and no choice on its path is
        decided.
        """
        node = self
        while node.run_id == PLANNED:
            assert node.parent is not None
            node = node.parent
            if node.choice is not None:
                return False
        return node.alive and self.choice is None

    def path_from(self, ancestor: Node) -> list[int]:
        """The tokens after `ancestor`, down to this node."""
        tokens: list[int] = []
        node = self
        while node is not ancestor:
            tokens.append(node.token)
            assert node.parent is not None
            node = node.parent
        return tokens[::-1]


class Tree(Struct):
    """The token tree of one lane.

    lane: its number, for the pool
    pool: allocates sequence ids
    frontier: the last accepted token
    """

    lane: int
    pool: SequencePool
    frontier: Node

    @property
    def main_id(self) -> int:
        """The sequence id of the accepted tokens that are in flight or computed."""
        return self.frontier.seq_ids[0]

    def add(self, token: int, run_id: int) -> Node:
        """Add an accepted token as the new frontier.

        run_id: the run that it is issued in; NO_RUN: it is not issued yet
        """
        here = self.frontier
        node = self._attach(here, token, here.seq_ids[:1], run_id, speculative=False)
        node.parent = None
        node.accepted = True
        self.frontier = node
        return node

    def plan(self, tip: Node, proposals: Sequence[Proposal], alternative_weight: float = 1.0
             ) -> list[Node]:
        """Return nodes for `proposals` below `tip`, index by index; none is issued yet.

        alternative_weight: gain of an accepted alternative relative to that of another accepted
            token, in (0, 1].
        """
        nodes: list[Node] = []
        for proposal in proposals:
            parent = tip if proposal.parent < 0 else nodes[proposal.parent]
            score = parent.score + math.log(max(proposal.confidence, 1e-9))
            weight = math.log(alternative_weight) if proposal.alternative else 0.0
            nodes.append(Node(proposal.token, parent.next_pos, parent, (), PLANNED,
                              speculative=True, score=score, priority=score + weight,
                              paid=proposal.paid))
        return nodes

    def issue(self, nodes: Sequence[Node], run_id: int) -> list[Node]:
        """Issue planned nodes, parents first, in one run; returns those issued, in row order.

        Nodes that repeat a sibling's token (hints: another hint's), or for which no id is left,
        are dropped together with what hangs below them. A parent may be a row of the same run
        (synchronous trees): it then gets the new ids as well, see `widen`.
        """
        kept = self._affordable(nodes)
        children: dict[int, list[Node]] = {}
        roots: dict[int, Node] = {}
        inside = {id(node) for node in kept}
        for node in kept:
            assert node.parent is not None
            children.setdefault(id(node.parent), []).append(node)
            if id(node.parent) not in inside:
                roots[id(node.parent)] = node.parent

        def assign(node: Node, primary: int, base: Node) -> tuple[int, ...]:
            """Ids of the leaves below `node`; the first child inherits `primary`."""
            own: tuple[int, ...] = ()
            for k, child in enumerate(children.get(id(node), ())):
                own += assign(child, primary if k == 0 else self._branch(base), base)
            node.seq_ids = own or (primary,)
            return node.seq_ids

        for base in roots.values():
            free = self._continues(base)
            for k, node in enumerate(children[id(base)]):
                primary = base.seq_ids[0] if k == 0 and free else self._branch(base)
                assign(node, primary, base)
        for node in kept:
            assert node.parent is not None
            node.parent.children.append(node)
            node.run_id = run_id
        return kept

    def widen(self, tip: Node, nodes: Sequence[Node]) -> None:
        """Let `tip`, a row of the same run as its new subtree, carry all ids of that subtree."""
        ids = dict.fromkeys(tip.seq_ids[:1])
        for node in nodes:
            ids.update(dict.fromkeys(node.seq_ids))
        tip.seq_ids = tuple(ids)

    def rows_left(self, base: Node, width: int) -> int:
        """Return how many speculative tokens fit into a run of `width` rows below `base`."""
        del base
        return width

    def repeated(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the rows that `nodes` need before them in their run.

        nodes: newly issued ones, or the accepted token to be issued and those below it.
        """
        del nodes
        return []

    def sent(self, tip: Node) -> None:
        """Note that the run of the accepted token `tip` was issued."""

    def step(self, token: int) -> tuple[Node | None, list[Node]]:
        """Accept `token` after the frontier.

        Returns the child that the frontier moved to (None: the token has not been issued, and
        the frontier stays until `add`) and the nodes that died, in no particular order.
        """
        here = self.frontier
        survivor, dead = self._settle(token)
        length = here.pos + 1
        keep = {here.seq_ids[0]} if survivor is None else {
            i for n in survivor.subtree() for i in n.seq_ids
        }
        gone = dict.fromkeys(i for n in dead for i in n.seq_ids if i not in keep)
        if survivor is None and dead:
            self.pool.truncate(here.seq_ids[0], length)
        for seq_id in gone:
            self.pool.release(seq_id, length)
        return survivor, dead

    def _settle(self, token: int) -> tuple[Node | None, list[Node]]:
        """Do what `step` does to the nodes, without their ids; return the same."""
        here = self.frontier
        survivor = here.child(token)
        dead = [n for c in here.children if c is not survivor for n in c.subtree()]
        for node in dead:
            node.alive = False
        here.children = [] if survivor is None else [survivor]
        if survivor is not None:
            survivor.accepted = True
            self.frontier = survivor
        return survivor, dead

    def prune(self) -> list[Node]:
        """Kill everything below the frontier; return the nodes that died."""
        here = self.frontier
        if not here.children:
            return []
        dead = [node for node in here.subtree() if node is not here]
        self._drop(dead, here.seq_ids[0], here.pos + 1)
        here.children = []
        return dead

    def restart(self, token: int, pos: int) -> list[Node]:
        """Replace the frontier by a row that is not issued; kill the frontier and all below it.

        token, pos: of the new frontier. The lane's first id loses its cells from `pos` on. Returns
            the nodes that died.
        """
        here = self.frontier
        below = [node for node in here.subtree() if node is not here]
        main = here.seq_ids[0]
        self._drop(below, main, pos)
        here.alive = False
        self.frontier = Node(token, pos, None, (main,), NO_RUN, speculative=False, accepted=True)
        return [here, *below]

    def _drop(self, dead: Sequence[Node], main: int, length: int) -> None:
        self.pool.truncate(main, length)
        for seq_id in dict.fromkeys(i for node in dead for i in node.seq_ids if i != main):
            self.pool.release(seq_id, self._shared(seq_id, length))
        for node in dead:
            node.alive = False

    def _shared(self, seq_id: int, length: int) -> int:
        """How many of the first `length` positions an id that dies has from others' runs."""
        del seq_id
        return length

    def kill(self) -> list[Node]:
        """Kill the whole tree because the lane ends; the caller releases the lane's ids."""
        nodes = list(self.frontier.subtree())
        for node in nodes:
            node.alive = False
        return nodes

    def _attach(
        self, parent: Node, token: int, seq_ids: tuple[int, ...], run_id: int, *,
        speculative: bool,
    ) -> Node:
        node = Node(token, parent.next_pos, parent, seq_ids, run_id, speculative,
                    score=parent.score, priority=parent.score)
        parent.children.append(node)
        return node

    def _attach_chain(self, chain: Sequence[Node], seq_id: int, run_id: int) -> None:
        """Make planned nodes that follow each other a run with an id of its own."""
        for node in chain:
            assert node.parent is not None
            node.parent.children.append(node)
            node.seq_ids, node.run_id = (seq_id,), run_id

    def _continues(self, base: Node) -> bool:
        """Whether a child of another run continues the id of `base`."""
        return not base.children

    def _branch(self, tip: Node) -> int:
        return self.pool.branch(self.lane, tip.seq_ids[0], tip.pos + 1)

    def _affordable(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes for which there is a sequence id, without repeated siblings."""
        budget = self.pool.available
        inside = {id(node) for node in nodes}
        continued: dict[int, bool] = {}
        seen: set[tuple[int, int, bool]] = set()
        kept: list[Node] = []
        kept_ids: set[int] = set()
        for node in nodes:
            parent = node.parent
            assert parent is not None
            key = id(parent)
            if key in inside and key not in kept_ids:
                continue
            if key not in continued:
                continued[key] = key not in inside and not self._continues(parent)
                seen.update((key, child.token, child.hint) for child in parent.children)
            if (key, node.token, node.hint) in seen:
                continue
            if continued[key]:
                if budget == 0:
                    continue
                budget -= 1
            continued[key] = True
            seen.add((key, node.token, node.hint))
            kept.append(node)
            kept_ids.add(id(node))
        return kept


def chain_of(nodes: Sequence[Node]) -> list[Node]:
    """Return the first of these nodes and those that follow it, one below the other."""
    chain: list[Node] = []
    for node in nodes:
        if not chain or node.parent is chain[-1]:
            chain.append(node)
    return chain


class BufferedTree(Tree):
    """Speculative tokens with ids per run; the frontier's first id is the canonical one.

    branching: whether runs may be trees, and follow where others did; otherwise all are one chain.
    shares: whether runs attend to cells of earlier runs in flight. Without that (multibuffering
        switched off) a run repeats every row of its path that is not accepted.
    """

    branching: bool = False
    shares: bool = True
    _own: dict[int, int] = field(default_factory=dict)  # ids with repeated rows: their first pos

    @override
    def rows_left(self, base: Node, width: int) -> int:
        return width if self.shares else max(0, width - len(self._path(base)))

    @override
    def issue(self, nodes: Sequence[Node], run_id: int) -> list[Node]:
        """Issue a tree below one node, or its first chain; of that the paths with a free id."""
        if not self.branching:
            nodes = chain_of(nodes)
            if nodes and nodes[0].parent is not None and nodes[0].parent.children:
                return []
        return super().issue(nodes, run_id)

    @override
    def _continues(self, base: Node) -> bool:
        return False

    @override
    def _branch(self, tip: Node) -> int:
        here = self.frontier
        repeats = not self.shares and tip.run_id != NO_RUN
        seq_id = self.pool.branch(self.lane, here.seq_ids[0], here.pos) if repeats \
            else super()._branch(tip)
        self._own.pop(seq_id, None)
        if repeats:
            self._own[seq_id] = here.pos
        return seq_id

    @override
    def repeated(self, nodes: Sequence[Node]) -> list[Node]:
        base, ids = nodes[0].parent, tuple(dict.fromkeys(i for n in nodes for i in n.seq_ids))
        if base is None or ids[0] not in self._own:
            return []
        return [Node(node.token, node.pos, None, ids, NO_RUN, speculative=False, wanted=False)
                for node in self._path(base)]

    @override
    def sent(self, tip: Node) -> None:
        """Early sharing: after the tip's run every id of the lane has the tip's cell."""
        if self.shares:
            self.pool.propagate(self.lane, tip.seq_ids[0], tip.pos + 1)

    def again(self) -> Node | None:
        """Return the frontier as a row of a further run, under an id of its own; None without a
        free id.
        """
        here = self.frontier
        if not self.pool.available:
            return None
        seq_id = self.pool.branch(self.lane, here.seq_ids[0], here.pos)
        return Node(here.token, here.pos, None, (seq_id,), NO_RUN, speculative=False, hint=True)

    def drop(self, node: Node) -> None:
        """Release the id of a node that `again` returned, once its run is issued."""
        self.pool.release(node.seq_ids[0], node.pos)

    @override
    def step(self, token: int) -> tuple[Node | None, list[Node]]:
        """Accept `token` as `Tree.step` does; the survivor's cell is copied to the canonical
        sequence.
        """
        here = self.frontier
        survivor, dead = self._settle(token)
        left = dict.fromkeys((i for n in dead for i in n.seq_ids), here.pos + 1)
        end = here
        if survivor is not None:
            canonical, end = here.seq_ids[0], survivor
            left |= dict.fromkeys(survivor.seq_ids, survivor.pos + 1)
            self.pool.share(survivor.seq_ids[0], canonical, survivor.pos, survivor.pos + 1)
            survivor.seq_ids = (canonical,)
        used = {end.seq_ids[0], *(i for n in end.subtree() if n is not end for i in n.seq_ids)}
        for seq_id, length in left.items():
            if seq_id not in used:
                self.pool.release(seq_id, self._shared(seq_id, length))
        self.pool.propagate(self.lane, self.frontier.seq_ids[0], end.pos + self.shares)
        return survivor, dead

    @override
    def _shared(self, seq_id: int, length: int) -> int:
        """Without the rows that its run repeats, which are not there if the run was skipped."""
        return min(length, self._own.pop(seq_id, length))

    def _path(self, base: Node) -> list[Node]:
        """The nodes from the frontier down to `base`."""
        path = [base]
        while path[-1] is not self.frontier:
            parent = path[-1].parent
            assert parent is not None
            path.append(parent)
        return path[::-1]
