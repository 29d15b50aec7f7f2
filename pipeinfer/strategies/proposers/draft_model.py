"""Proposals of a small draft model (PipeInfer section III, SpecInfer's expansion).

The draft has a few paths in its cache, with the candidates after each token it drafted from. It
moves one of them to a job's path by the longest common prefix. So it needs no messages about
acceptance or cancellation, and a job that was stopped midway can be continued. The draft applies
the target's sampling rule with the target's noise to its own logits (docs/algorithms.md 2.2).
Independent of llama.cpp and threads: it works on any whole-model backend.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pipeinfer.backends.base import Backend
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.sampling import best_shares
from pipeinfer.core.types import END, FloatArray, Rows, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.models.text.constraint import Constraints
from pipeinfer.strategies.proposers.base import common_prefix
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

if TYPE_CHECKING:
    from pipeinfer.models.text.vocabulary import Vocabulary

_KEEP_RANKINGS = 64  #: last positions whose candidates are copied with a path
_RANKED = 8  #: candidates that are stored after a token


class Ranking(Struct, frozen=True):
    """The best candidates after a row, best first.

    ids: vocabulary ids
    confidences: estimated probability that each is the target's choice
    """

    ids: list[int]
    confidences: list[float]


class _Path(Struct):
    """A cached path: its draft sequence id, tokens, and candidates after positions near its end.

    lane: whose path it is; candidates depend on the lane's parameters
    agreed: how many of the lane's accepted tokens it is known to start with
    used: time of the last use, as a count of jobs
    """

    seq_id: int
    lane: int = -1
    tokens: list[int] = field(default_factory=list)
    rankings: dict[int, Ranking] = field(default_factory=dict)
    agreed: int = 0
    used: int = 0


class Branch(Struct):
    """One open path below the job's tip: its draft sequence id, leaf and candidates.

    chance: the probability that all of its tokens are right
    """

    seq_id: int
    leaf: int
    tokens: list[int]
    ranking: Ranking
    pending: int = field(default=-1)
    chance: float = 1.0


class DraftModel:
    """A proposer over a whole-model backend.

    backend: the draft
    n_vocab: the target's vocabulary; ids beyond it are never proposed
    paths: how many paths stay in the cache at a time, so that a proposer that alternates between
        branches evaluates each token once. Sequence ids `0..paths-1` hold them, later ones the
        branches of a job
    vocabulary: with it, proposals follow the lane's grammar; None: grammars are ignored
    """

    free = False

    def __init__(self, backend: Backend, n_vocab: int | None = None, *, paths: int = 1,
                 vocabulary: Vocabulary | None = None) -> None:
        self.backend = backend
        self._n_vocab = n_vocab or backend.info.n_vocab
        self.rows_evaluated = 0
        self._constraints = None if vocabulary is None else Constraints(vocabulary)
        self._paths = [_Path(seq_id) for seq_id in range(paths)]
        self._here = self._paths[0]
        self._clock = 0

    def propose(
        self, job: StartDraft, stopped: Callable[[], bool]
    ) -> tuple[Proposal, ...] | None:
        """Return proposals below the job's path, parents before children, the best chain first."""
        steps = self.steps(job)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: tuple[Proposal, ...] = end.value
                return result
            if stopped():
                steps.close()
                return None

    def steps(self, job: StartDraft) -> Generator[int, None, tuple[Proposal, ...]]:
        """Execute a job, yielding before each evaluation the number of rows that it has.

        The caller may end the generator there (`close`): what was evaluated stays in the cache. The
        generator's return value is the tuple of proposals.
        """
        if job.free_only:
            return ()
        ranking = yield from self._catch_up(job)
        proposals: list[Proposal] = []
        alternatives: list[Proposal] = []
        open_branches = [Branch(self._here.seq_id, -1, [], ranking)]
        used_ids = 1
        depth = 0
        try:
            while len(proposals) < job.max_tokens and depth < job.max_depth:
                depth += 1
                grown, used_ids = self._grow(job, open_branches, proposals, alternatives, used_ids)
                grown = [one for one in grown if one.chance >= job.chain_min]
                if not grown or len(proposals) >= job.max_tokens or depth >= job.max_depth:
                    break
                yield from self._evaluate(job, grown)
                open_branches = grown
        finally:
            for k in range(1, used_ids):
                self.backend.seq_rm(self._side(k), 0, END)
        return (*proposals, *alternatives)

    def close(self) -> None:
        """Release memory, models and threads."""
        self.backend.close()

    # --- the cache ----------------------------------------------------------------------------

    def _catch_up(self, job: StartDraft) -> Generator[int, None, Ranking]:
        """Evaluate the tokens of the job's path that the cache lacks; candidates after the last
        token.
        """
        base, suffix = job.base, job.suffix
        length = base + len(suffix)
        common = self._choose_path(job)
        here = self._here
        if common == length and length - 1 in here.rankings:
            return here.rankings[length - 1]
        common = min(common, length - 1)
        todo = [job.accepted[i] if i < base else suffix[i - base] for i in range(common, length)]
        if max(todo) >= self.backend.info.n_vocab:
            return Ranking([], [])  # the target has ids that the draft's vocabulary lacks
        self._cut(common)
        first = common
        while first < length:
            part = todo[first - common :][: self._at_once(job, first)]
            yield len(part)
            last = first + len(part) == length
            logits = self._decode(make_rows(
                [(t, first + i, (here.seq_id,), last and i == len(part) - 1)
                 for i, t in enumerate(part)]
            ))
            self.rows_evaluated += len(part)
            here.tokens += part
            first += len(part)
        assert logits is not None
        if not len(logits):  # a head lacks the target's rows
            return Ranking([], [])
        ranking = self._rank(job, logits[-1], np.array(here.tokens, np.int32), length - 1)
        here.rankings[length - 1] = ranking
        return ranking

    def _at_once(self, job: StartDraft, first: int) -> int:
        """How many tokens of a path from index `first` on are evaluated together, at most."""
        del job, first
        return self.backend.info.n_batch

    def _choose_path(self, job: StartDraft) -> int:
        """Make the cached path with the longest prefix of the job's path the current one.

        Returns the length of that prefix. If tokens that another branch may still need would be cut
        off, the least recently used path is replaced by a copy of the prefix instead.
        """
        best, common = self._here, -1
        for path in self._paths:
            shared = self._shared(path, job)
            mine = path.lane == job.lane
            if (shared, mine, path is self._here) > (common, best.lane == job.lane,
                                                     best is self._here):
                best, common = path, shared
        length = job.base + len(job.suffix)
        mine = best.lane == job.lane
        keeps = not best.tokens or (mine and (
            common == len(best.tokens) or (common == length and length - 1 in best.rankings)))
        self._clock += 1
        if mine:
            best.used = self._clock
        if not keeps and len(self._paths) > 1:
            victim = min((p for p in self._paths if p is not best), key=lambda p: p.used)
            if victim.tokens:
                self.backend.seq_rm(victim.seq_id, 0, END)
            if common:
                self.backend.seq_cp(best.seq_id, victim.seq_id, 0, common)
            victim.tokens = best.tokens[:common]
            victim.rankings = {p: r for p, r in best.rankings.items()
                               if mine and common - _KEEP_RANKINGS <= p < common}
            victim.agreed = min(best.agreed, common) if mine else 0
            victim.used = self._clock
            best = victim
        if best.lane != job.lane:
            best.lane, best.agreed = job.lane, 0
            best.rankings.clear()
        self._here = best
        return common

    def _shared(self, path: _Path, job: StartDraft) -> int:
        """The number of tokens that a cached path and the job's path have in common."""
        base, tokens, accepted = job.base, path.tokens, job.accepted
        stop = min(base, len(tokens))
        common = min(path.agreed, stop) if path.lane == job.lane else 0
        while common < stop and tokens[common] == accepted[common]:
            common += 1
        if path.lane == job.lane:
            path.agreed = common
        if common == base:
            common += common_prefix(tokens[base:], job.suffix)
        return common

    def _cut(self, length: int) -> None:
        """Remove the current path's tokens from position `length` on."""
        here = self._here
        if length < len(here.tokens):
            self.backend.seq_rm(here.seq_id, length, END)
            for position in range(length, len(here.tokens)):
                here.rankings.pop(position, None)
            del here.tokens[length:]
        here.agreed = min(here.agreed, length)

    def _decode(self, rows: Rows) -> FloatArray | None:
        """Decode; while the cache is full, drop other paths, the least recently used first."""
        others = sorted((path for path in self._paths if path is not self._here and path.tokens),
                        key=lambda path: path.used)
        for path in others:
            try:
                return self.backend.decode(rows)
            except BackendError:
                self.backend.seq_rm(path.seq_id, 0, END)
                path.tokens, path.rankings, path.agreed = [], {}, 0
        return self.backend.decode(rows)

    def _side(self, k: int) -> int:
        """The sequence id of a job's k-th branch, k >= 1."""
        return len(self._paths) + k - 1

    # --- the tree -----------------------------------------------------------------------------

    def _grow(
        self, job: StartDraft, branches: list[Branch], proposals: list[Proposal],
        alternatives: list[Proposal], used_ids: int,
    ) -> tuple[list[Branch], int]:
        """Add a token to each open branch, and new branches where the split cutoff allows.

        Candidates that no branch follows become alternatives.
        """
        grown: list[Branch] = []
        for branch in branches:
            for rank, (token, confidence) in enumerate(
                zip(branch.ranking.ids, branch.ranking.confidences, strict=True)
            ):
                fork = rank > 0
                if token in job.stop_ids or confidence < (job.p_split if fork else job.p_min):
                    break
                full = len(proposals) >= job.max_tokens
                if full or (fork and used_ids >= job.branches):
                    if fork and rank <= job.alternatives:
                        alternatives.append(
                            Proposal(branch.leaf, token, confidence, alternative=True, paid=True)
                        )
                        continue
                    break
                seq_id = branch.seq_id
                if fork:
                    seq_id, used_ids = self._side(used_ids), used_ids + 1
                    length = job.base + len(job.suffix) + len(branch.tokens)
                    self.backend.seq_cp(branch.seq_id, seq_id, 0, length)
                proposals.append(Proposal(branch.leaf, token, confidence, paid=True))
                chance = job.chance(confidence, len(job.suffix) + len(branch.tokens) + 1)
                grown.append(Branch(seq_id, len(proposals) - 1, [*branch.tokens, token],
                                    branch.ranking, token, branch.chance * chance))
        return grown, used_ids

    def _evaluate(self, job: StartDraft, branches: list[Branch]) -> Generator[int, None, None]:
        """Decode every branch's newest token and rank what follows it."""
        position = job.base + len(job.suffix) + len(branches[0].tokens) - 1
        main, here = branches[0], self._here
        if main.seq_id == here.seq_id and position < len(here.tokens):
            # A job that was stopped may have evaluated this token already.
            if here.tokens[position] == main.pending and position in here.rankings:
                main.ranking = here.rankings[position]
                branches = branches[1:]
            else:
                self._cut(position)
        if not branches:
            return
        yield len(branches)
        logits = self._decode(make_rows(
            [(b.pending, position, (b.seq_id,), True) for b in branches]
        ))
        assert logits is not None
        self.rows_evaluated += len(branches)
        path = [*job.accepted[: job.base], *job.suffix] if job.params.reads_path else []
        for branch, row in zip(branches, logits, strict=True):
            history = np.array([*path, *branch.tokens], np.int32)
            branch.ranking = self._rank(job, row, history, position)
            if branch.seq_id == here.seq_id:
                here.tokens.append(branch.pending)
                here.rankings[position] = branch.ranking

    def _rank(
        self, job: StartDraft, logits: FloatArray, history: npt.NDArray[np.int32], position: int,
    ) -> Ranking:
        """The best candidates; confidence is the softmax of the (perturbed) scores.

        At temperature 0 that is the draft's own probability. Above it the scores contain the shared
        noise, and a larger gap to the second candidate means that the target more often chooses the
        first.
        """
        params, allowed = job.params, None
        if params.grammar and self._constraints is not None:
            constraint = self._constraints.of(job.lane, params.grammar)
            allowed = constraint.allowed(history[params.grammar_start :])
            if allowed is None:
                return Ranking([], [])
        ids, confidences = best_shares(logits[: self._n_vocab], params, history,
                                       position + job.shift, allowed, count=_RANKED)
        return Ranking(ids.tolist(), confidences.tolist())


def _make(setup: ProposerSetup) -> DraftModel:
    assert setup.backend is not None
    return DraftModel(setup.backend, setup.n_vocab, paths=setup.paths, vocabulary=setup.vocabulary)


SPEC = ProposerSpec("draft", "the draft model (-md)", worker=_make, 
                    resource="pipeinfer.strategies.resources:Draft", usual=3)
