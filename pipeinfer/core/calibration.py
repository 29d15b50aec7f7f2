"""Calibration of confidences: how often tokens of a given confidence are accepted.

A draft's own probability is only an estimate of the target's. This module measures how often the
target chose the proposed token. Every choice of the target at a place with a proposal is a trial,
whether the proposal was issued or not. The estimate starts at the draft's confidence and forgets
slowly: a useless draft is detected within a few dozen tokens, and a useful one regains its rating.
"""

from __future__ import annotations

from msgspec import Struct, field

_BINS = 10
_PRIOR = 4.0  #: weight of the claimed confidence, in trials
_MEMORY = 0.99  #: weight of a bin's past at each new trial
_LONG_MEMORY = 0.995  #: the same for the acceptance of all first proposals
_TRIED = 6.0  #: trials after which a bin's estimate is reliable
_DEEPEST = 12  #: distance from which on all count as one
_RECENT = 32.0  #: trials over which claimed confidences are averaged


class Calibration(Struct):
    """Trials and hits by claimed confidence, for first proposals and for alternatives.

    Proposers whose proposals fade with the distance from the target's last row have further tables,
    one for each distance (`Proposal.depth`).
    """

    _trials: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _BINS for _ in range(2)])
    _hits: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _BINS for _ in range(2)])
    _by_depth: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    _fade: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(_DEEPEST)])
    _first: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _claims: float = 0.7
    _second: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def learn(self, claimed: float, hit: bool, *, first: bool, depth: int = 0) -> None:
        """Record a trial.

        claimed: the confidence with which the draft proposed a token
        hit: whether the target chose that token
        first: whether it was the first proposal at its place; False: an alternative
        depth: its distance, see `Proposal`
        """
        kind, slot = int(not first), _slot(claimed)
        tables = [(self._trials[kind], self._hits[kind])]
        if first and depth:
            deep = min(depth, _DEEPEST)
            tables.append(self._by_depth.setdefault(deep, ([0.0] * _BINS, [0.0] * _BINS)))
            claims = self._fade[deep - 1]
            claims[:] = claims[0] * _MEMORY + claimed, claims[1] * _MEMORY + hit
        for trials, hits in tables:
            trials[slot] = trials[slot] * _MEMORY + 1.0
            hits[slot] = hits[slot] * _MEMORY + hit
        if first:
            self._first[0] = self._first[0] * _LONG_MEMORY + 1.0
            self._first[1] = self._first[1] * _LONG_MEMORY + hit
            self._claims += (claimed - self._claims) / min(self._first[0], _RECENT)

    def learn_second(self, hit: bool) -> None:
        """Record that a first proposal was wrong. hit: whether the next alternative was right."""
        self._second[0] = self._second[0] * _MEMORY + 1.0
        self._second[1] = self._second[1] * _MEMORY + hit

    def estimate(self, claimed: float, *, first: bool, depth: int = 0, trust: float = 1.0
                 ) -> float:
        """Return the probability that the target chooses a token of this confidence.

        first, depth: as for `learn`
        trust: by how much the claim is reduced as long as there are no trials
        """
        kind, slot = int(not first), _slot(claimed)
        trials, hits = self._trials[kind], self._hits[kind]
        if first and depth:
            trials, hits = self._by_depth.get(min(depth, _DEEPEST), (trials, hits))
        return (claimed * trust * _PRIOR + hits[slot]) / (_PRIOR + trials[slot])

    @property
    def fade(self) -> tuple[float, ...]:
        """By how much a prediction head's claims have to be reduced at each distance, from 1; empty
        without such a head."""
        if not self._by_depth:
            return ()
        return tuple(min(1.0, (_PRIOR + hits) / (_PRIOR + claims)) for claims, hits in self._fade)

    @property
    def rates(self) -> tuple[float, ...]:
        """How often first proposals are right, by tenths of the claimed confidence."""
        return tuple(self.estimate((slot + 0.5) / _BINS, first=True) for slot in range(_BINS))

    def least_claim(self, wanted: float) -> float:
        """Return the least confidence at which first proposals are right as often as `wanted`.

        A bin with few trials counts as good enough, so that it is tried. Each call makes the trials
        of the bins below the result fade, because those bins get no new ones and the text may
        change.
        """
        trials, hits = self._trials[0], self._hits[0]
        least = _BINS
        while least and not (trials[least - 1] >= _TRIED and self.estimate(
                (least - 0.5) / _BINS, first=True) < wanted):
            least -= 1
        for slot in range(least):
            trials[slot] *= _MEMORY
            hits[slot] *= _MEMORY
        return least / _BINS

    @property
    def acceptance(self) -> float:
        """The recent share of first proposals that the target chose.

        It starts at the confidence that the draft claims, and at 0.7 before any trial.
        """
        return (self._claims * _PRIOR + self._first[1]) / (_PRIOR + self._first[0])

    @property
    def second(self) -> float:
        """The share of wrong first proposals whose next alternative was right (0.4 before any
        trial).
        """
        return (0.4 * _PRIOR + self._second[1]) / (_PRIOR + self._second[0])


def _slot(claimed: float) -> int:
    return min(int(claimed * _BINS), _BINS - 1)
