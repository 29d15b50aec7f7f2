"""Proposals of a small draft model (PipeInfer section III, SpecInfer's expansion).

The draft keeps one path in its cache, with the candidates after each token it drafted from, and
brings it up to the job's path by the longest common prefix, so it needs no word about acceptance
or cancellation and a job that was stopped midway is taken up where it was. It applies the
target's sampling rule with the target's noise to its own logits (ALGORITHMS 0.4, R4). This module
knows neither llama.cpp nor threads: it works on any whole-model backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.backends.base import Backend
from pipeinfer.core import END, FloatArray, SamplingParams, make_rows
from pipeinfer.events import StartDraft
from pipeinfer.sampling import candidates
from pipeinfer.tree import Proposal

GAP_SCALE = 1.0  #: perturbed-score units per natural-log unit of the acceptance estimate


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best candidates after a row: ids, and confidence that each is the target's choice."""

    ids: list[int]
    confidences: list[float]


@dataclass(slots=True)
class _Branch:
    """One open path below the job's tip: its draft sequence id, leaf and candidates."""

    seq_id: int
    leaf: int
    tokens: list[int]
    ranking: Ranking
    pending: int = field(default=-1)


class DraftModel:
    """A `Proposer` over a whole-model backend with at least `branches` sequence ids.

    n_vocab: the target's vocabulary; ids beyond it are never proposed.
    """

    def __init__(self, backend: Backend, n_vocab: int | None = None) -> None:
        self.backend = backend
        self._n_vocab = n_vocab or backend.info.n_vocab
        self.rows_evaluated = 0
        self._path: list[int] = []
        self._lane = -1
        self._agreed = 0
        self._rankings: dict[int, Ranking] = {}

    def propose(
        self, job: StartDraft, stopped: Callable[[], bool]
    ) -> tuple[Proposal, ...] | None:
        """See `Proposer.propose`."""
        ranking = self._catch_up(job, stopped)
        if ranking is None:
            return None
        proposals: list[Proposal] = []
        open_branches = [_Branch(0, -1, [], ranking)]
        used_ids = 1
        depth = 0
        while len(proposals) < job.max_tokens and depth < job.max_depth:
            depth += 1
            grown, used_ids = self._grow(job, open_branches, proposals, used_ids)
            if not grown or len(proposals) >= job.max_tokens or depth >= job.max_depth:
                break
            if stopped():
                self._drop_sides(used_ids)
                return None
            self._evaluate(job, grown)
            open_branches = grown
        self._drop_sides(used_ids)
        return tuple(proposals)

    def close(self) -> None:
        """See `Proposer.close`."""
        self.backend.close()

    # --- the cache ----------------------------------------------------------------------------

    def _catch_up(self, job: StartDraft, stopped: Callable[[], bool]) -> Ranking | None:
        """Evaluate what the cache lacks of the job's path; candidates after its last token."""
        base, suffix = job.base, job.suffix
        length = base + len(suffix)
        if job.lane != self._lane:
            self._lane, self._agreed = job.lane, 0
            self._rankings.clear()  # they depend on the lane's parameters
        known = min(self._agreed, base, len(self._path))
        common = self._agreed = self._common(job.accepted, known, base)
        if common == base:
            common = base + _common_prefix(self._path[base:], suffix)
        if common == length and length - 1 in self._rankings:
            return self._rankings[length - 1]
        common = min(common, length - 1)
        todo = [job.accepted[i] if i < base else suffix[i - base] for i in range(common, length)]
        if max(todo) >= self.backend.info.n_vocab:
            return Ranking([], [])  # the target has ids that a smaller draft does not know
        self._cut(common)
        step = self.backend.info.n_batch
        for start in range(0, len(todo), step):
            if stopped():
                return None
            part = todo[start : start + step]
            last = start + len(part) == len(todo)
            first = common + start
            logits = self.backend.decode(make_rows(
                [(t, first + i, (0,), last and i == len(part) - 1) for i, t in enumerate(part)]
            ))
            self.rows_evaluated += len(part)
            self._path += part
        assert logits is not None
        ranking = self._rank(job.params, logits[-1], np.array(self._path, np.int32), length - 1)
        self._rankings[length - 1] = ranking
        return ranking

    def _cut(self, length: int) -> None:
        """Forget the path from position `length` on."""
        self.backend.seq_rm(0, length, END)
        for position in range(length, len(self._path)):
            self._rankings.pop(position, None)
        del self._path[length:]

    def _common(self, accepted: Any, start: int, base: int) -> int:
        stop = min(base, len(self._path))
        while start < stop and self._path[start] == accepted[start]:
            start += 1
        return start

    def _drop_sides(self, used_ids: int) -> None:
        for seq_id in range(1, used_ids):
            self.backend.seq_rm(seq_id, 0, END)

    # --- the tree -----------------------------------------------------------------------------

    def _grow(
        self, job: StartDraft, branches: list[_Branch], proposals: list[Proposal], used_ids: int
    ) -> tuple[list[_Branch], int]:
        """One more token per open branch, and new branches where the split cutoff allows."""
        grown: list[_Branch] = []
        for branch in branches:
            for rank, (token, confidence) in enumerate(
                zip(branch.ranking.ids, branch.ranking.confidences, strict=True)
            ):
                fork = rank > 0
                if len(proposals) >= job.max_tokens or token in job.stop_ids:
                    break
                if confidence < (job.p_split if fork else job.p_min):
                    break
                if fork and used_ids >= job.branches:
                    break
                seq_id = branch.seq_id
                if fork:
                    seq_id, used_ids = used_ids, used_ids + 1
                    length = job.base + len(job.suffix) + len(branch.tokens)
                    self.backend.seq_cp(branch.seq_id, seq_id, 0, length)
                proposals.append(Proposal(branch.leaf, token, confidence))
                grown.append(_Branch(seq_id, len(proposals) - 1, [*branch.tokens, token],
                                     branch.ranking, pending=token))
        return grown, used_ids

    def _evaluate(self, job: StartDraft, branches: list[_Branch]) -> None:
        """Decode every branch's newest token and rank what follows it."""
        position = job.base + len(job.suffix) + len(branches[0].tokens) - 1
        main = branches[0]
        if main.seq_id == 0 and position < len(self._path):
            # An interrupted job may have been here already: its work is not done twice.
            if self._path[position] == main.pending and position in self._rankings:
                main.ranking = self._rankings[position]
                branches = branches[1:]
            else:
                self._cut(position)
        if not branches:
            return
        logits = self.backend.decode(make_rows(
            [(b.pending, position, (b.seq_id,), True) for b in branches]
        ))
        assert logits is not None
        self.rows_evaluated += len(branches)
        path = [*job.accepted[: job.base], *job.suffix] if job.params.uses_history else []
        for branch, row in zip(branches, logits, strict=True):
            history = np.array([*path, *branch.tokens], np.int32)
            branch.ranking = self._rank(job.params, row, history, position)
            if branch.seq_id == 0:
                self._path.append(branch.pending)
                self._rankings[position] = branch.ranking

    def _rank(
        self, params: SamplingParams, logits: FloatArray, history: npt.NDArray[np.int32],
        position: int,
    ) -> Ranking:
        """The 8 best candidates; confidence is the softmax of the (perturbed) scores.

        At temperature 0 that is the draft's own probability. Above it the scores carry the
        shared noise, and the gap to the runner-up says how likely the target's choice agrees.
        """
        found = candidates(logits[: self._n_vocab], params, history, position)
        ids, scores = found.ranked(8) if len(found.ids) <= 64 else _top(found.ids, found.scores, 8)
        scale = GAP_SCALE if params.temperature > 0 else 1.0
        top = scores[0]
        total = float(np.exp((found.scores - top) / scale).sum())
        return Ranking(ids.tolist(), (np.exp((scores - top) / scale) / total).tolist())


def _top(ids: Any, scores: Any, count: int) -> tuple[Any, Any]:
    """The `count` best of many candidates without sorting all of them."""
    keep = np.argpartition(-scores, min(count, len(scores) - 1))[:count]
    keep = keep[np.argsort(-scores[keep], kind="stable")]
    return ids[keep], scores[keep]


def _common_prefix(a: list[int], b: tuple[int, ...]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
