"""How often the first proposals of several sources were right, by their confidence.

Confidences of different sources cannot be compared directly: a small draft is often more confident
than a larger one that is right more often. The accepted tokens of later jobs show what the target
chose. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from pipeinfer.core.calibration import Calibration
from pipeinfer.core.drafting import SURE, Proposal, StartDraft

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
