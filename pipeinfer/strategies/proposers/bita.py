"""BiTA's decoding (arXiv 2401.12522): groups of learned mask tokens name what comes next.

After the current token and after every candidate hangs a group of M masks; mask r proposes, by its
k likeliest tokens, what follows r+1 tokens later. What the group behind the last accepted token
proposes is verified in the next step as a tree, of which each level offers k, k-1, ... tokens and
only the likeliest has children (docs/algorithms.md 11.2, 11.3). Masks see the learned prompts,
under a sequence id of their own; no other row sees masks or prompts, so nothing they propose can
change a choice. Where a step's rows are bounded, the likeliest candidates are verified, and groups
hang behind the likeliest of those, so that all rows share one run. Pure: the masks' vectors and the
prompts are the backend's affair.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.config import Option, OwnOption
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.types import Choice
from pipeinfer.strategies.proposers.base import Anchor, HintRow
from pipeinfer.strategies.spec import Need, ProposerSetup, ProposerSpec


class Shape(enum.StrEnum):
    """Which candidates are verified together."""

    EFFICIENT = "efficient"  #: k, k-1, ... per level, below the likeliest of the level before
    FULL = "full"  #: k below each token of the level before
    CHAIN = "chain"  #: the likeliest of each level, one group of masks behind the current token


@dataclass(slots=True)
class _Lane:
    """tokens: the path. anchors: of the last step, by (parent, token), the tip as 0 at index `at`
    of the path. groups: for an anchor, the indices of its masks. tops: what those named."""

    tokens: list[int]
    at: int = -1
    anchors: dict[tuple[int, int], int] = field(default_factory=dict)
    groups: dict[int, list[int]] = field(default_factory=dict)
    tops: dict[int, list[tuple[tuple[int, float], ...]]] = field(default_factory=dict)


class Bita:
    """An `InlineProposer`. first_id: token id of the first mask, the others follow. masks: M. top:
    k. prompt_id: the sequence id that the learned prompts are under; None without prompts. width:
    rows of a step at most, which cuts the tree and its groups; 0: no bound. groups: of masks in a
    step that is cut; 0: see `cut`."""

    def __init__(self, first_id: int, masks: int, top: int, prompt_id: int | None,
                 shape: Shape = Shape.EFFICIENT, width: int = 0, groups: int = 0) -> None:
        if masks < 1 or top < 1:
            raise ValueError(f"masks ({masks}) and likeliest tokens of each ({top}) must be at "
                             "least 1")
        self._first_id, self._masks, self._top, self._shape = first_id, masks, top, shape
        self._sees = () if prompt_id is None else (prompt_id,)
        nodes, most = tree_size(masks, top, shape), groups_of(masks, top, shape)
        self._cut = width > masks + 1 and 1 + nodes + masks * most > width
        if self._cut:
            nodes, most = cut(masks, nodes, most, width, groups)
        self.candidates, self._groups = nodes, most
        self.rows, self.paths = masks * most, nodes + most
        self._lanes: dict[int, _Lane] = {}

    def opened(self, lane: int, tokens: Sequence[int]) -> None:
        """See `InlineProposer.opened`."""
        self._lanes[lane] = _Lane(list(tokens))

    def accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """See `InlineProposer.accepted`."""
        self._lanes[lane].tokens += tokens

    def hints(self, lane: int, anchors: Sequence[Anchor], room: int) -> list[HintRow]:
        """See `InlineProposer.hints`."""
        state = self._lanes[lane]
        state.at, state.tops = len(state.tokens) - 1, {}
        state.anchors = {(a.parent, a.token): k for k, a in enumerate(anchors) if k}
        state.groups = {}
        rows: list[HintRow] = []
        for k in range(min(self._groups, len(anchors))):
            if len(rows) + self._masks > room:
                break
            first = len(anchors) + len(rows)
            state.groups[k] = list(range(first, first + self._masks))
            rows += [HintRow(first + r - 1 if r else k, self._first_id + r, sees=self._sees)
                     for r in range(self._masks)]
        return rows

    def learn(self, lane: int, choices: Sequence[Choice | None]) -> None:
        """See `InlineProposer.learn`."""
        state = self._lanes[lane]
        for anchor, masks in state.groups.items():
            state.tops[anchor] = [choice.top for k in masks
                                  if (choice := choices[k]) is not None and choice.top]

    def propose(self, job: StartDraft) -> tuple[Proposal, ...]:
        """See `InlineProposer.propose`."""
        if job.suffix:
            return ()  # masks were behind accepted tokens alone
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
        size = max(self._top - depth, 1) if self._shape is Shape.EFFICIENT else \
            self._top if self._shape is Shape.FULL else 1
        return [(token, p) for token, p in named if token not in job.stop_ids][:size]

    def _likeliest(self, lists: Sequence[Sequence[tuple[int, float]]], job: StartDraft
                   ) -> tuple[Proposal, ...]:
        """The candidates of the tree that are likeliest by what masks think of their whole paths,
        parents first."""
        levels = [self._level(named, depth, job) for depth, named in
                  enumerate(lists[: job.max_depth])]
        found: list[Proposal] = []
        waiting: list[tuple[float, int, int, int]] = []  # -log p of the path, depth, rank, parent

        def wait(depth: int, parent: int, doubt: float) -> None:
            for rank, (_, p) in enumerate(levels[depth] if depth < len(levels) else ()):
                heapq.heappush(waiting, (doubt - min(p, 0.0), depth, rank, parent))

        wait(0, -1, 0.0)
        while waiting and len(found) < min(self.candidates, job.max_tokens):
            doubt, depth, rank, parent = heapq.heappop(waiting)
            token, p = levels[depth][rank]
            found.append(Proposal(parent, token, math.exp(min(p, 0.0)), alternative=rank > 0))
            if not rank or self._shape is Shape.FULL:
                wait(depth + 1, len(found) - 1, doubt)
        return tuple(found)

    def closed(self, lane: int) -> None:
        """See `InlineProposer.closed`."""
        self._lanes.pop(lane, None)

    def _lists(self, state: _Lane) -> list[tuple[tuple[int, float], ...]]:
        """What may follow the path's last token, level by level: from the last accepted row that
        had masks, less what was accepted behind it."""
        if state.at < 0:
            return []
        node, group, behind = 0, 0, 0
        new = state.tokens[state.at + 1 :]
        for token in new[:-1]:
            child = state.anchors.get((node, token))
            if child is None:
                return []  # the path went on where no mask was
            node = child
            group, behind = (node, 0) if node in state.groups else (group, behind + 1)
        return state.tops.get(group, [])[behind:] if new else []


def tree_size(masks: int, top: int, shape: Shape) -> int:
    """How many candidates a step verifies at most."""
    if shape is Shape.CHAIN:
        return masks
    if shape is Shape.FULL:
        return sum(top**level for level in range(1, masks + 1))
    return sum(max(top - level, 1) for level in range(masks))


def groups_of(masks: int, top: int, shape: Shape) -> int:
    """How many groups of masks a whole step has."""
    return 1 if shape is Shape.CHAIN else tree_size(masks, top, shape) + 1


def cut(masks: int, nodes: int, groups: int, width: int, wanted: int = 0) -> tuple[int, int]:
    """Candidates and groups of a step of at most `width` rows, for a tree of `nodes` candidates.

    wanted: so many groups; 0: one behind the current token and, as far as there is room, one behind
    each of the two likeliest candidates (docs/bita.md has what was measured).
    """
    most = min(wanted or 3, groups, width // (masks + 1))  # a candidate for each but the first
    return min(nodes, width - 1 - masks * most), most


def _make(setup: ProposerSetup) -> Bita:
    assert setup.adapter is not None
    kept = {"bita_top", "bita_shape"} & setup.given  # what a user asks for is not cut
    return Bita(setup.n_vocab, setup.adapter.n_masks, setup.options["bita_top"],
                setup.prompt_id if setup.adapter.n_prompts else None,
                Shape(setup.options["bita_shape"]), 0 if kept else setup.width)


SPEC = ProposerSpec(
    "bita", "learned masks (--bita)", inline=_make,
    options={
        "bita": OwnOption("", Option(
            ("--bita",), "str",
            "BiTA adapter (safetensors) of the model: learned mask tokens guess ahead; with "
            "learned prompts on the torch backend only, see docs/bita.md. With --proposer, add "
            "--proposer bita, too.")),
        "bita_top": OwnOption(5, Option(
            ("--bita-top",), "int",
            "With --bita: how many of the likeliest tokens of the first mask are verified; one "
            "less for each further mask. Neither given nor --bita-shape: cut to one run per step.",
            1, 8)),
        "bita_shape": OwnOption("efficient", Option(
            ("--bita-shape",), "str",
            "With --bita: children below the likeliest token of each level (efficient), below "
            "every token, as many on each level (full), or the likeliest tokens alone (chain).",
            choices=tuple(shape.value for shape in Shape))),
    },
    needs=frozenset({Need.ADAPTER}), adapter="bita", backends=frozenset({"torch"}),
    why="learned prompts need rows that look through other sequences, which llama.cpp has not: "
        "add --backend torch (on every stage), or tune an adapter without prompts (train bita "
        "--prompting none)",
    synchronous=True)
