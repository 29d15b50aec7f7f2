"""A draft model that decodes by lookahead: the chain that it would name, in fewer evaluations.

Where the draft names several tokens, one evaluation has the newest token, candidates of an n-gram
pool below it, and a window's rows (`lookahead`, docs/algorithms.md 6). Candidates that the draft
itself would have named stay in its cache, so the next tokens need no evaluation. This pays where
rows of the draft cost little. Trees of several branches are drafted token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from pipeinfer.backends.base import Backend
from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.types import END, Choice, make_rows
from pipeinfer.strategies.proposers import lookahead
from pipeinfer.strategies.proposers.base import Anchor
from pipeinfer.strategies.proposers.draft_model import Branch, DraftModel
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

_LANES = 64  #: whose n-grams are kept


class _Row(Struct):
    """A row of an evaluation: its token, parent, depth, and the branches that it is part of."""

    token: int
    parent: int
    depth: int
    wanted: bool = True
    sides: tuple[int, ...] = ()


class DraftLookahead(DraftModel):
    """A draft model that decodes by lookahead. ahead: sizes and pools of all lanes; others as in
    `DraftModel`. The backend has `ahead.paths` sequence ids beyond `paths`."""

    def __init__(self, backend: Backend, ahead: lookahead.Lookahead, *args: Any, **kwargs: Any
                 ) -> None:
        super().__init__(backend, *args, **kwargs)
        self._ahead = ahead
        self._lanes: OrderedDict[int, int] = OrderedDict()  # tokens of each that its pool has

    def _evaluate(self, job: StartDraft, branches: list[Branch]) -> Generator[int, None, None]:
        """Evaluate rows of the draft, and what may follow a chain's newest token."""
        main, here = branches[0], self._here
        position = job.base + len(job.suffix) + len(main.tokens) - 1
        known = position < len(here.tokens) and position in here.rankings \
            and here.tokens[position] == main.pending
        if len(branches) > 1 or main.seq_id != here.seq_id or known or job.branches > 1:
            yield from super()._evaluate(job, branches)
            return
        self._cut(position)
        self._follow(job)
        rows, n_anchors = self._rows(job, main.pending, job.max_depth - len(main.tokens))
        yield len(rows)
        used = sorted({side for row in rows for side in row.sides})
        for side in used:
            self.backend.seq_cp(here.seq_id, side, 0, position)
        try:
            logits = self._decode(make_rows([
                (row.token, position + row.depth, (here.seq_id, *row.sides) if not k else row.sides,
                 row.wanted) for k, row in enumerate(rows)]))
            assert logits is not None
            self.rows_evaluated += len(rows)
            best = iter(np.argmax(logits[:, : self._n_vocab], axis=1).tolist())
            self._ahead.learn(job.lane, [Choice(next(best)) if row.wanted else None
                                         for row in rows])
            self._walk(job, position, rows[:n_anchors], logits)
        finally:
            for side in used:
                self.backend.seq_rm(side, 0, END)
        main.ranking = here.rankings[position]

    def _follow(self, job: StartDraft) -> None:
        """Give the job's accepted tokens to the lane's n-gram pool."""
        lane, had = job.lane, self._lanes.pop(job.lane, job.base + 1)
        if had > job.base:
            self._ahead.closed(lane)
            self._ahead.opened(lane, job.accepted[: job.base])
        elif had < job.base:
            self._ahead.accepted(lane, job.accepted[had : job.base])
        self._lanes[lane] = job.base
        if len(self._lanes) > _LANES:
            self._ahead.closed(self._lanes.popitem(last=False)[0])

    def _rows(self, job: StartDraft, token: int, depth: int) -> tuple[list[_Row], int]:
        """Return the rows of an evaluation, and how many of them are the newest token and the
        candidates below it."""
        room = self.backend.info.n_batch - 1
        tails = self._ahead.tails(job.lane, token, max(depth, 0), job.stop_ids)[: self._ahead.most]
        tails = [tail for tail in tails if max(tail) < self.backend.info.n_vocab]
        found = lookahead.trie(tails, room)
        anchors = [Anchor(-1, token), *(Anchor(one.parent + 1, one.token) for one in found)]
        hints = self._ahead.hints(job.lane, anchors, room - len(found))
        rows: list[_Row] = []
        for parent, token, wanted in (*((one.parent, one.token, True) for one in anchors),
                                      *((one.parent, one.token, one.wanted) for one in hints)):
            above = rows[parent].depth + 1 if parent >= 0 else 0
            rows.append(_Row(token, parent, above, wanted))
        parents = {row.parent for row in rows}
        leaves = [k for k in range(1, len(rows)) if k not in parents]
        for number, leaf in enumerate(leaves, 1):
            at = leaf
            while at >= 0:
                rows[at].sides = (*rows[at].sides, self._side(number))
                at = rows[at].parent
        return rows, len(anchors)

    def _walk(self, job: StartDraft, position: int, anchors: list[_Row], logits: Any) -> None:
        """Append the newest token and the candidates that the draft would have named."""
        here, at = self._here, 0
        while True:
            row, place = anchors[at], position + anchors[at].depth
            here.tokens.append(row.token)
            history = np.array(here.tokens if job.params.reads_path else [], np.int32)
            ranking = here.rankings[place] = self._rank(job, logits[at], history, place)
            below = [k for k, one in enumerate(anchors) if k and one.parent == at
                     and ranking.ids and one.token == ranking.ids[0]]
            if not below:
                break
            at = below[0]
        if at:
            self.backend.seq_cp(anchors[at].sides[0], here.seq_id, position + 1,
                                position + anchors[at].depth + 1)


def _sizes(options: Mapping[str, Any]) -> lookahead.Lookahead:
    return lookahead.Lookahead(
        options["lookahead_window"], options["lookahead_ngram"], options["lookahead_candidates"],
        prompt_pool=options["prompt_pool"])


def _make(setup: ProposerSetup) -> DraftLookahead:
    assert setup.backend is not None
    return DraftLookahead(setup.backend, _sizes(setup.options), setup.n_vocab, paths=setup.paths,
                          vocabulary=setup.vocabulary)


SPEC = ProposerSpec(
    "draft-lookahead", "the draft model (-md), which decodes by lookahead", worker=_make,
    options=lookahead.SPEC.options, resource="pipeinfer.strategies.resources:Draft",
    branches=lambda options: _sizes(options).paths)
