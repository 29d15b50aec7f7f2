"""A cost account for the draft's models where they take turns with the target.

There a model's answer costs time in which the target could have computed. Prompt lookup costs no
such time, so the account is for models alone: tokens gained by their proposals, minus the time of
their evaluations and of the rows that verify them, in tokens of plain decoding. When the account is
overdrawn, the models rest for some drafting jobs and are then tried again, because the text may
have changed. Independent of clocks.
"""

from __future__ import annotations

from msgspec import Struct, field

from pipeinfer.scheduler.rests import Rests

_MEMORY = 0.97  #: weight of the past at each job
_LOSS = 1.0  #: tokens that a trial of the models may cost
_KNOWN = 24  #: jobs without a rest after which the next rest is a short one again


class DraftWorth(Struct):
    """The account of the draft's models; jobs that no model was evaluated for do not count.

    balance: in tokens; the past fades
    rest: jobs to go without the models
    rests: the lengths of successive rests
    """

    balance: float = 0.0
    rest: int = 0
    rests: Rests = field(default_factory=lambda: Rests(_KNOWN))

    def ask(self) -> bool:
        """Return whether the models take part in the next job. Starts a rest on an overdrawn
        account.
        """
        if self.rest:
            self.rest -= 1
            return False
        if self.balance > -_LOSS:
            return True
        self.rest, self.balance = self.rests.begin(), 0.0
        return False

    def answered(self, evaluations: int, price: float) -> None:
        """Debit a job's evaluations.

        evaluations: tokens that a model evaluated
        price: time of each, in tokens of plain decoding
        """
        self.balance = _MEMORY * self.balance - evaluations * price
        self.rests.went()

    def issued(self, price: float) -> None:
        """Debit rows of speculative tokens that only models proposed; price: in tokens of plain
        decoding.
        """
        self.balance -= price

    def accepted(self) -> None:
        """Credit the account with one accepted token of these."""
        self.balance += 1.0
