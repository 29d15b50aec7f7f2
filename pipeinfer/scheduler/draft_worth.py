"""Whether a draft's models are worth asking where they take turns with the target.

There a model's answer costs time in which the target would have computed. What repeats the text
costs nothing, so the two are judged apart: what the models' guesses have brought, less the time of
their rows and of naming them, in tokens that plain decoding would make in that time. Models that
cost more than they bring rest, and are tried again now and then: another text may be another
matter. This module knows no clock.
"""

from __future__ import annotations

from msgspec import Struct, field

from pipeinfer.scheduler.rests import Rests

_MEMORY = 0.97  #: weight of the past at each question
_LOSS = 1.0  #: tokens that a trial of the models may cost
_KNOWN = 24  #: questions without a rest after which the next rest is a short one again


class DraftWorth(Struct):
    """The models' account; questions that no model was asked for do not count.

    balance: tokens, of which the past fades. rest: questions to go without the models. rests: how
    many they are next time.
    """

    balance: float = 0.0
    rest: int = 0
    rests: Rests = field(default_factory=lambda: Rests(_KNOWN))

    def ask(self) -> bool:
        """A question comes up: whether the models are to be asked, too."""
        if self.rest:
            self.rest -= 1
            return False
        if self.balance > -_LOSS:
            return True
        self.rest, self.balance = self.rests.begin(), 0.0
        return False

    def answered(self, evaluations: int, price: float) -> None:
        """A question made a model evaluate so many tokens, each of which takes as long as `price`
        tokens of plain decoding."""
        self.balance = _MEMORY * self.balance - evaluations * price
        self.rests.went()

    def issued(self, price: float) -> None:
        """Guesses that only models named go out, in rows that take as long as `price` tokens."""
        self.balance -= price

    def accepted(self) -> None:
        """One of these was right."""
        self.balance += 1.0
