"""Whether querying the draft's models gains more tokens than its time costs.

An account holds the tokens that the models have gained, minus those that plain decoding would have
made in the time they took. An overdrawn account rests, each time for longer, and is then tried
again, because the text may have changed.
"""

from __future__ import annotations

from msgspec import Struct

LOSS = 1.0  #: tokens that a trial may cost
_MEMORY = 0.97  #: weight of the balance's past at each job
_KNOWN = 24  #: jobs without a rest after which the next rest is a short one again
_RESTS = (24, 384)  #: the shortest and the longest rest, in jobs


class Account(Struct):
    """balance: gains minus costs, in tokens; the past fades. rest: jobs to go without a query."""

    rest: int = 0
    balance: float = 0.0
    _next: int = _RESTS[0]  # length of the next rest
    _since: int = 0  # jobs since the last rest

    def add(self, gain: float) -> None:
        """Record a gain; a cost is negative."""
        self.balance += gain

    def went(self, gain: float) -> None:
        """Record the gain of a job; the past fades."""
        self.balance = self.balance * _MEMORY + gain
        self._since += 1
        if self._since >= _KNOWN:
            self._next = _RESTS[0]

    def ask(self) -> bool:
        """Return whether to query the models in the next job, which counts towards a rest."""
        if self.rest:
            self.rest -= 1
            return False
        if self.balance > -LOSS:
            return True
        self.rest, self.balance, self._since = self._next, 0.0, 0
        self._next = min(2 * self._next, _RESTS[1])
        return False
