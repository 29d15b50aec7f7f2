"""How often a draft that claims a confidence is right, learnt while running.

A draft's own probability is a guess about the target. Whatever it claims, what counts is how often
the target chose what it named; every choice of the target at a place where the draft had named
something is a trial, issued or not. Starts from the claim itself and forgets slowly, so that a
useless draft is found out within a few dozen tokens and a useful one is trusted again.
"""

from __future__ import annotations

from msgspec import Struct, field

_BINS = 10
_PRIOR = 4.0  #: trials that the claim itself is worth
_MEMORY = 0.99  #: weight that a bin's past keeps at each new trial
_LONG_MEMORY = 0.995  #: the same for the acceptance of all first guesses
_TRIED = 6.0  #: trials after which a claim's worth is known
_RECENT = 32.0  #: trials over which claims are averaged


class Calibration(Struct):
    """Counts of trials and hits by claimed confidence, for first guesses and for alternatives."""

    _trials: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _BINS for _ in range(2)])
    _hits: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _BINS for _ in range(2)])
    _first: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _claims: float = 0.7
    _second: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def learn(self, claimed: float, hit: bool, *, first: bool) -> None:
        """A trial: the draft named a token with this confidence, and the target has chosen."""
        kind, slot = int(not first), _slot(claimed)
        trials, hits = self._trials[kind], self._hits[kind]
        trials[slot] = trials[slot] * _MEMORY + 1.0
        hits[slot] = hits[slot] * _MEMORY + hit
        if first:
            self._first[0] = self._first[0] * _LONG_MEMORY + 1.0
            self._first[1] = self._first[1] * _LONG_MEMORY + hit
            self._claims += (claimed - self._claims) / min(self._first[0], _RECENT)

    def learn_second(self, hit: bool) -> None:
        """A first guess was wrong; whether the next alternative was right."""
        self._second[0] = self._second[0] * _MEMORY + 1.0
        self._second[1] = self._second[1] * _MEMORY + hit

    def estimate(self, claimed: float, *, first: bool) -> float:
        """Probability that the target chooses a token named with this confidence."""
        kind, slot = int(not first), _slot(claimed)
        return ((claimed * _PRIOR + self._hits[kind][slot])
                / (_PRIOR + self._trials[kind][slot]))

    def least_claim(self, wanted: float) -> float:
        """The least confidence of first guesses that are right as often as `wanted`, as far as
        that is known: what has hardly been tried deserves a trial. Each question makes what lies
        below fade, since no trial does: another text may be another matter."""
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
        """Share of first guesses that the target chose lately; at first what the draft claims,
        and 0.7 before any trial."""
        return (self._claims * _PRIOR + self._first[1]) / (_PRIOR + self._first[0])

    @property
    def second(self) -> float:
        """Share of wrong first guesses whose next alternative was right (0.4 before any)."""
        return (0.4 * _PRIOR + self._second[1]) / (_PRIOR + self._second[0])


def _slot(claimed: float) -> int:
    return min(int(claimed * _BINS), _BINS - 1)
