"""BiTA's decoding (arXiv 2401.12522): groups of learned mask tokens propose the following tokens.

A group of M masks is below the current token and below every candidate. Mask r proposes, by its k
most likely tokens, the token r+1 places later. The proposals of the group below the last accepted
token are verified in the next step as a tree. Each of its levels has k tokens, and only the
likeliest has children (the paper's section 3.2; docs/algorithms.md 11.2, 11.3). Masks attend to the
learned prompts, which have a sequence id of their own. No other row attends to masks or prompts, so
they cannot change a choice.

Where a step's rows are bounded, the likeliest candidates are verified, with groups below the
likeliest of those, so that all rows share one run. Where runs travel through stages, the other
candidates follow in runs of their own with groups of their own, and every result adds proposals
(docs/algorithms.md 11.6). Pure: the backend holds the masks' vectors and the prompts.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from pipeinfer.config import Option, OwnOption
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.types import Choice
from pipeinfer.strategies.proposers.base import Anchor, HintRow
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

_HEARD = 32  #: batches of results that are stored: more than fit into a pipeline


class Shape(enum.StrEnum):
    """The shape of the tree of candidates that are verified together."""

    EFFICIENT = "efficient"  #: k per level, below the likeliest of the level before
    TRIANGLE = "triangle"  #: k, k-1, ... per level, as in the authors' evaluation scripts
    FULL = "full"  #: k below each token of the level before
    CHAIN = "chain"  #: the likeliest of each level, one group of masks behind the current token


class _MaskBatch(Struct):
    """Groups of masks that were issued together.

    at: index in the path of the token that the anchors follow, or of the tip
    below: tokens between that one and the anchors, see `InlineProposer.hints`; None for a step's
        batch
    anchors: numbers of anchors by (parent, token); 0 is the tip or, in a batch without it, the
        token that the others follow
    groups: for an anchor, the indices of its masks
    tops: the tokens that those proposed
    """

    at: int
    below: tuple[int, ...] | None
    anchors: dict[tuple[int, int], int]
    groups: dict[int, list[int]]
    tops: dict[int, list[tuple[tuple[int, float], ...]]] = field(default_factory=dict)


class _BitaLane(Struct):
    """The state of one lane.

    tokens: the path
    out: batches in flight, by number
    heard: the last batches with results
    """

    tokens: list[int]
    out: dict[int, _MaskBatch] = field(default_factory=dict)
    heard: deque[_MaskBatch] = field(default_factory=lambda: deque(maxlen=_HEARD))


class Bita:
    """The inline proposer of BiTA.

    first_id: token id of the first mask; the others follow
    masks: M
    top: k
    prompt_id: the sequence id of the learned prompts; None without prompts
    shape: of the tree
    width: most rows of a step, which limits the tree and its groups; 0: no bound
    groups: of masks in a limited step; 0: see `cut`
    Raises ValueError unless `masks` and `top` are at least 1.
    """

    def __init__(self, first_id: int, masks: int, top: int, prompt_id: int | None,
                 shape: Shape = Shape.EFFICIENT, width: int = 0, groups: int = 0) -> None:
        if masks < 1 or top < 1:
            raise ValueError(f"masks ({masks}) and likeliest tokens of each ({top}) must be at "
                             "least 1")
        self._first_id, self._masks, self._top, self._shape = first_id, masks, top, shape
        self._sees = () if prompt_id is None else (prompt_id,)
        nodes, most = tree_size(masks, top, shape), groups_of(masks, top, shape)
        self._nodes = nodes
        self._cut = width > masks + 1 and 1 + nodes + masks * most > width
        if self._cut:
            nodes, most = cut(masks, nodes, most, width, groups)
        self.candidates, self._groups = nodes, most
        self.rows, self.paths = masks * most, self._nodes + most
        self.chained = True
        self._lanes: dict[int, _BitaLane] = {}

    def opened(self, lane: int, tokens: Sequence[int]) -> None:
        """Add a lane with these tokens: a prompt, or the path of a lane that got a new number."""
        self._lanes[lane] = _BitaLane(list(tokens))

    def accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the lane's path."""
        self._lanes[lane].tokens += tokens

    def hints(self, lane: int, anchors: Sequence[Anchor], room: int, *, batch: int = 0,
              below: Sequence[int] | None = None) -> list[HintRow]:
        """Return hints for a run that verifies `anchors`."""
        state = self._lanes[lane]
        first = int(below is not None)  # number of the first anchor
        groups: dict[int, list[int]] = {}
        rows: list[HintRow] = []
        for k in range(min(self._groups, len(anchors))):
            if len(rows) + self._masks > room:
                break
            start = len(anchors) + len(rows)
            groups[k + first] = list(range(start, start + self._masks))
            rows += [HintRow(start + r - 1 if r else k, self._first_id + r, sees=self._sees)
                     for r in range(self._masks)]
        state.out[batch] = _MaskBatch(
            len(state.tokens) - 1, None if below is None else tuple(below),
            {(a.parent + first, a.token): k + first for k, a in enumerate(anchors) if k + first},
            groups)
        return rows

    def learn(self, lane: int, choices: Sequence[Choice | None], *, batch: int = 0) -> None:
        """Record the target's choices after the anchors and hints of a batch."""
        state = self._lanes[lane]
        one = state.out.pop(batch)
        for older in [number for number in state.out if number < batch]:
            del state.out[older]  # there was no room for it in a run
        for anchor, masks in one.groups.items():
            one.tops[anchor] = [choice.top for k in masks
                                if (choice := choices[k]) is not None and choice.top]
        state.heard.append(one)

    def propose(self, job: StartDraft) -> tuple[Proposal, ...]:
        """Return proposals below the job's path, parents before children."""
        if job.suffix:
            return ()  # there are only masks below accepted tokens
        lists = self._lists(self._lanes[job.lane])
        if self._cut:
            return self._likeliest(lists, job)
        found: list[Proposal] = []
        parents = [-1]
        for depth, named in enumerate(lists[: job.max_depth]):
            level = self._level(named, depth, job)
            children: list[int] = []
            for parent in parents:
                for rank, (token, p) in enumerate(level):
                    if len(found) >= job.max_tokens:
                        return tuple(found)
                    if not rank or self._shape is Shape.FULL:
                        children.append(len(found))
                    found.append(
                        Proposal(parent, token, math.exp(min(p, 0.0)), alternative=rank > 0)
                    )
            parents = children
            if not parents:
                break
        return tuple(found)

    def _level(self, named: Sequence[tuple[int, float]], depth: int, job: StartDraft
               ) -> list[tuple[int, float]]:
        size = _level_size(self._top, depth, self._shape)
        return [(token, p) for token, p in named if token not in job.stop_ids][:size]

    def _likeliest(self, lists: Sequence[Sequence[tuple[int, float]]], job: StartDraft
                   ) -> tuple[Proposal, ...]:
        """The candidates of the tree with the most probable paths by the masks' results, parents
        first.
        """
        levels = [self._level(named, depth, job) for depth, named in
                  enumerate(lists[: job.max_depth])]
        found: list[Proposal] = []
        waiting: list[tuple[float, int, int, int]] = []  # -log p of the path, depth, rank, parent

        def wait(depth: int, parent: int, doubt: float) -> None:
            for rank, (_, p) in enumerate(levels[depth] if depth < len(levels) else ()):
                heapq.heappush(waiting, (doubt - min(p, 0.0), depth, rank, parent))

        wait(0, -1, 0.0)
        while waiting and len(found) < min(self._nodes, job.max_tokens):
            doubt, depth, rank, parent = heapq.heappop(waiting)
            token, p = levels[depth][rank]
            found.append(Proposal(parent, token, math.exp(min(p, 0.0)), alternative=rank > 0))
            if not rank or self._shape is Shape.FULL:
                wait(depth + 1, len(found) - 1, doubt)
        return tuple(found)

    def closed(self, lane: int) -> None:
        """Remove a lane that has ended; no effect on one that was never opened."""
        self._lanes.pop(lane, None)

    def _lists(self, state: _BitaLane) -> list[tuple[tuple[int, float], ...]]:
        """The tokens that may follow the path, level by level.

        They come from the last row of the path that had masks, without the levels of the tokens
        that followed it.
        """
        best, found = -1, list[tuple[tuple[int, float], ...]]()
        for one in state.heard:
            at, named = _nearest(one, state.tokens)
            if at >= best and named:
                best, found = at, named[len(state.tokens) - at - 2 :]
        return found


def _nearest(batch: _MaskBatch, tokens: Sequence[int]
             ) -> tuple[int, list[tuple[tuple[int, float], ...]]]:
    """The index in a path of its last row with masks of this batch, and what those proposed.

    -1 and nothing where there is none.
    """
    between = batch.below or ()
    at = batch.at + len(between)
    if tuple(tokens[batch.at + 1 : at + 1]) != between or at + 1 >= len(tokens):
        return -1, []
    node, best, named = 0, at, batch.tops.get(0, [])
    for token in tokens[at + 1 : -1]:
        child = batch.anchors.get((node, token))
        if child is None:
            break
        node, at = child, at + 1
        if node in batch.groups:
            best, named = at, batch.tops.get(node, [])
    return best, named


def _level_size(top: int, depth: int, shape: Shape) -> int:
    """The tokens of mask `depth` that are verified below one token."""
    if shape is Shape.TRIANGLE:
        return max(top - depth, 1)
    return 1 if shape is Shape.CHAIN else top


def tree_size(masks: int, top: int, shape: Shape) -> int:
    """Return the most candidates that a step verifies, for M masks of k tokens each."""
    if shape is Shape.FULL:
        return sum(top**level for level in range(1, masks + 1))
    return sum(_level_size(top, depth, shape) for depth in range(masks))


def groups_of(masks: int, top: int, shape: Shape) -> int:
    """Return the number of groups of masks in an unlimited step."""
    return 1 if shape is Shape.CHAIN else tree_size(masks, top, shape) + 1


def cut(masks: int, nodes: int, groups: int, width: int, wanted: int = 0) -> tuple[int, int]:
    """Return the numbers of candidates and groups of a step with a bounded number of rows.

    masks: M
    nodes: candidates of the whole tree
    groups: groups of a whole step
    width: most rows
    wanted: number of groups; 0: one below the current token and, as far as there is room, one below
        each of the two likeliest candidates (measurements: docs/bita.md)
    """
    most = min(wanted or 3, groups, width // (masks + 1))  # a candidate for each but the first
    return min(nodes, width - 1 - masks * most), most


def _make(setup: ProposerSetup) -> Bita:
    assert setup.adapter is not None
    kept = {"bita_top", "bita_shape"} & setup.given  # an explicit size or shape is not limited
    return Bita(setup.n_vocab, setup.adapter.n_masks, setup.options["bita_top"],
                setup.prompt_id if setup.adapter.n_prompts else None,
                Shape(setup.options["bita_shape"]), 0 if kept else setup.width)


SPEC = ProposerSpec(
    "bita", "learned masks (--bita)", inline=_make,
    options={
        "bita": OwnOption("", Option(
            ("--bita",), "str",
            "BiTA adapter (safetensors) of the model: learned mask tokens that draft; with "
            "learned prompts on the torch backend only, see docs/bita.md. With --proposer, add "
            "--proposer bita, too.")),
        "bita_top": OwnOption(5, Option(
            ("--bita-top",), "int",
            "With --bita: how many tokens of each mask, best first, are verified. Neither given "
            "nor --bita-shape: cut to one run per step.",
            1, 8)),
        "bita_shape": OwnOption("efficient", Option(
            ("--bita-shape",), "str",
            "With --bita: as many tokens on each level below its best one (efficient) or below "
            "every token (full), one less on each further level (triangle), or the best tokens "
            "alone (chain).",
            choices=tuple(shape.value for shape in Shape))),
    },
    adapter="bita", backends=frozenset({"torch"}),
    why="learned prompts need rows that look through other sequences, which llama.cpp has not: "
        "add --backend torch (on every stage), or tune an adapter without prompts (train bita "
        "--prompting none)",
    synchronous=True)
