"""Several proposers in order: the quick ones first, the better ones where those have low
confidence.

The PipeInfer paper suggests more than one draft model, the smallest first. Here proposers are
queried in order until one returns a token of high confidence. The more probable chain of proposals
is returned, by what each proposer's claims were worth so far (`TrackRecord`), and the others'
first tokens become alternatives; a job for trees gets the merged tree of all, as SpecInfer merges
those of its small models. Independent of models.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from msgspec import Struct, structs

from pipeinfer.core.calibration import Calibration
from pipeinfer.core.drafting import SURE, FeedDraft, Proposal, StartDraft
from pipeinfer.strategies.proposers.base import Proposer, ReadsRows

Judged: TypeAlias = tuple[tuple[Proposal, ...], float]  #: proposals, chance of the first one

_LANES = 64  #: whose proposals are remembered
_PLACES = 64  #: of each of them
_SHORT = 0.1  #: by which a claim of near certainty may miss what it is worth


class _Trial(Struct, frozen=True):
    """A first proposal: its source, token and claim, after `base` accepted tokens and `suffix`."""

    source: int
    token: int
    claim: float
    base: int
    suffix: tuple[int, ...]


class TrackRecord:
    """The trials of all sources; see the module docstring.

    trust: by how much the claims of each source are reduced before any trial
    """

    def __init__(self, trust: Sequence[float]) -> None:
        self._known = [Calibration() for _ in trust]
        self._trust = tuple(trust)
        self._open: OrderedDict[int, deque[_Trial]] = OrderedDict()

    def settle(self, job: StartDraft) -> None:
        """Compare earlier proposals in the job's lane with its accepted tokens."""
        accepted, open_ = job.accepted, self._open.get(job.lane)
        while open_ and (place := open_[0].base + len(open_[0].suffix)) < len(accepted):
            one = open_.popleft()
            if tuple(accepted[one.base:place]) == one.suffix:
                self._known[one.source].learn(one.claim, accepted[place] == one.token, first=True)

    def add(self, source: int, job: StartDraft, proposals: tuple[Proposal, ...]) -> None:
        """Remember what a source proposed first for a job, if anything."""
        if not proposals:
            return
        if job.lane not in self._open and len(self._open) >= _LANES:
            self._open.popitem(last=False)
        self._open.setdefault(job.lane, deque(maxlen=_PLACES)).append(_Trial(
            source, proposals[0].token, likely(proposals[0], job), job.base, job.suffix))

    def judged(self, source: int, job: StartDraft, proposals: tuple[Proposal, ...]) -> Judged:
        """Return the proposals of a source with the probability that the first one is right."""
        if not proposals:
            return proposals, 0.0
        return proposals, self._known[source].estimate(
            likely(proposals[0], job), first=True, trust=self._trust[source])


def certain(found: Judged, job: StartDraft, sure: float = SURE) -> bool:
    """Return whether the first proposal is nearly certain: its confidence is at least `sure`, and
    such confidences were right as often, less `_SHORT`."""
    proposals, chance = found
    return bool(proposals) and likely(proposals[0], job) >= sure and chance >= sure - _SHORT


def likely(proposal: Proposal, job: StartDraft) -> float:
    """Return how probable a proposal is; its confidence, less what a prediction head's fade by."""
    if not proposal.depth or not job.fade:
        return proposal.confidence
    return proposal.confidence * job.fade[min(proposal.depth, len(job.fade)) - 1]


@runtime_checkable
class Stepped(Protocol):
    """A proposer that works in steps: see `DraftModel.steps`."""

    def steps(self, job: StartDraft) -> Generator[int, None, tuple[Proposal, ...]]:
        """Execute a job and return its proposals; yields each evaluation's number of rows before
        it.
        """


class Cascade:
    """A proposer made of others, the quickest first.

    proposers: in the order of querying; ValueError without any
    sure: confidence of a first token at which no further proposer is queried
    """

    def __init__(self, proposers: Sequence[Proposer], sure: float = SURE) -> None:
        if not proposers:
            raise ValueError("a cascade needs at least one proposer")
        self._proposers, self._sure = tuple(proposers), sure
        self._record = TrackRecord([1.0] * len(proposers))
        self.free = all(proposer.free for proposer in proposers)

    @property
    def rows_evaluated(self) -> int:
        """The number of rows that all proposers together have evaluated."""
        return sum(proposer.rows_evaluated for proposer in self._proposers)

    def feed(self, rows: FeedDraft) -> None:
        """Store rows of accepted tokens; those of a lane may come more than once."""
        for proposer in self._proposers:
            if isinstance(proposer, ReadsRows):
                proposer.feed(rows)

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """Return proposals below the job's path, parents before children, the best chain first."""
        best: Judged = (), 0.0
        self._record.settle(job)
        for proposer in self._asked(job):
            newer = proposer.propose(job, stopped)
            if newer is None:
                return None
            best = self._merge(proposer, job, best, newer)
            if certain(best, job, self._sure):
                break
        return best[0]

    def steps(self, job: StartDraft) -> Generator[int, None, tuple[Proposal, ...]]:
        """Execute a job, yielding before each evaluation of a model: see `DraftModel.steps`."""
        best: Judged = (), 0.0
        self._record.settle(job)
        for proposer in self._asked(job):
            if isinstance(proposer, Stepped):
                newer = yield from proposer.steps(job)
            else:
                newer = proposer.propose(job, lambda: False) or ()
            best = self._merge(proposer, job, best, newer)
            if certain(best, job, self._sure):
                break
        return best[0]

    def _merge(self, proposer: Proposer, job: StartDraft, older: Judged,
               newer: tuple[Proposal, ...]) -> Judged:
        source = self._proposers.index(proposer)
        self._record.add(source, job, newer)
        return merged(older, self._record.judged(source, job, newer), job)

    def _asked(self, job: StartDraft) -> Sequence[Proposer]:
        if not job.max_tokens and job.base < len(job.accepted):  # rows of a chunk have come
            return [one for one in self._proposers if isinstance(one, ReadsRows)]
        return [one for one in self._proposers if one.free or not job.free_only]

    def close(self) -> None:
        """Release memory, models and threads."""
        for proposer in self._proposers:
            proposer.close()


def merged(first: Judged, second: Judged, job: StartDraft) -> Judged:
    """Merge the proposals of two proposers, each with the chance of its first one.

    For a job of several branches the result is a tree, see `merged_trees`. Else it is the chain
    whose first token is more probable (the second if both are equal), with first tokens of the
    other among at most `job.alternatives` alternatives to its first token. If both have the same
    first token, it is assumed to be wrong only if both proposers are, independently.
    """
    (older, one), (newer, other) = first, second
    if not older or not newer:
        return second if newer else first
    chance = max(one, other)
    if job.branches > 1:
        return merged_trees((older, newer), job), chance
    best, others = (newer, older) if other >= one else (older, newer)
    best = _shared(best, others)
    if best[0].token == others[0].token:
        doubt = (1.0 - best[0].confidence) * (1.0 - others[0].confidence)
        best = (structs.replace(best[0], confidence=1.0 - doubt), *best[1:])
    named = {p.token for p in best if p.parent < 0}
    alternatives = [p for p in best if p.alternative]
    room = job.alternatives - sum(p.parent < 0 for p in alternatives)
    left = 1.0 - best[0].confidence
    for proposal in others:
        if room > 0 and proposal.parent < 0 and proposal.token not in named:
            named.add(proposal.token)
            alternatives.append(
                Proposal(-1, proposal.token, min(proposal.confidence, left), alternative=True,
                         paid=proposal.paid)
            )
            room -= 1
    return (*(p for p in best if not p.alternative), *alternatives), chance


def merged_trees(trees: Sequence[tuple[Proposal, ...]], job: StartDraft) -> tuple[Proposal, ...]:
    """Merge trees of proposals: each path once, and of them the likeliest that `job` has room for.

    A token that several proposers named on the same path is assumed to be wrong only if all of them
    are, independently.
    """
    found: dict[tuple[int, ...], Proposal] = {}
    for tree in trees:
        paths: list[tuple[int, ...]] = []
        for one in tree:
            paths.append((*(paths[one.parent] if one.parent >= 0 else ()), one.token))
            if (known := found.get(paths[-1])) is not None:
                doubt = (1.0 - known.confidence) * (1.0 - one.confidence)
                one = structs.replace(one, confidence=1.0 - doubt, paid=known.paid and one.paid)
            found[paths[-1]] = one
    chances = {path: math.prod(likely(found[path[:n]], job) for n in range(1, len(path) + 1))
               for path in found}
    kept: dict[tuple[int, ...], int] = {(): -1}
    continued: set[tuple[int, ...]] = set()
    result: list[Proposal] = []
    for path in sorted(found, key=lambda path: (-chances[path], len(path))):
        before, leaves = path[:-1], len(kept) - len(continued)
        full = before in continued and leaves >= job.branches
        if before in kept and not full and len(result) < job.max_tokens:
            continued.add(before)
            kept[path] = len(result)
            result.append(structs.replace(found[path], parent=kept[before]))
    return tuple(result)


def _shared(best: tuple[Proposal, ...], others: tuple[Proposal, ...]) -> tuple[Proposal, ...]:
    """The chain `best`; tokens that both chains contain count as paid only if paid in both."""
    count, at = 0, -1
    for one, other in zip(best, others, strict=False):
        if (one.parent, one.token) != (at, other.token) or other.parent != at or \
                one.alternative or other.alternative:
            break
        count, at = count + 1, count
    return tuple(structs.replace(one, paid=one.paid and others[k].paid) if k < count else one
                 for k, one in enumerate(best))
