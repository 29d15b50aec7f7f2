"""Whether guesses pay where draft and target take turns and each guess is weighed: by accounts.

There what a step with guesses takes and brings is known as soon as it is back, so spans of plain
decoding need not be set against spans with guesses (`speculation_trial`), which a short answer
does not live to see. What steps have brought beyond what plain decoding would have made of their
time goes into an account; once it has lost too much, plain decoding rests it, a longer while each
time. How fast plain decoding is, a few tokens without guesses say, now and then. This module knows
no clock: it is told times, in seconds.
"""

from __future__ import annotations

from msgspec import Struct, field

from pipeinfer.scheduler.rests import Rests

_MEMORY = 0.98  #: weight of the account's past at each token
_LOSS = 4.0  #: tokens of a request that trying guesses may cost
_GAIN = 3.0  #: more is not saved up: another text may be another matter
_KNOWN = 48  #: tokens with guesses after which the next rest is a short one again
BEGIN = 12  #: tokens with guesses before it is asked how fast plain decoding is
_SAMPLE = 4  #: tokens without guesses that say how fast plain decoding is
_STALE = 64  #: tokens after which that is asked again, unless guesses bring much
_MUCH = 1.25  #: times plain decoding, for which it may have changed meanwhile
_SETTLE = 1  #: tokens after a change that do not count
_PAST = 0.5  #: weight of plain decoding's earlier samples


class _Account(Struct):
    """Of one number of requests. balance: tokens brought beyond plain decoding's. plain: tokens per
    second, 0 while unknown. rest: tokens to go without guesses. rests: how many they are next time.
    fresh: tokens until a sample of plain decoding is due. seconds, made: of the present one. begin:
    tokens with guesses before the first. early, waiting: how many came so far, and their seconds.
    """

    rest: float = 0.0
    begin: int = BEGIN
    balance: float = 0.0
    plain: float = 0.0
    rests: Rests = field(default_factory=lambda: Rests(_KNOWN))
    fresh: float = _STALE
    seconds: float = 0.0
    made: float = 0.0
    early: float = 0.0
    waiting: float = 0.0

    def plainly(self, tokens: float, seconds: float) -> None:
        """So many tokens of a request came without guesses."""
        self.seconds += seconds
        self.made += tokens
        self.rest -= tokens
        if self.rest > 0.0:
            return
        speed = self.made / max(self.seconds, 1e-9)
        self.plain = _PAST * self.plain + (1.0 - _PAST) * speed if self.plain else speed
        self.seconds = self.made = 0.0
        self.fresh = _STALE
        if self.waiting:
            tokens, seconds = self.early, self.waiting
            self.early = self.waiting = 0.0
            self.guessed(tokens, seconds)

    def guessed(self, tokens: float, seconds: float) -> None:
        """So many tokens of a request came with guesses."""
        if not self.plain:
            self.waiting, self.early = self.waiting + seconds, self.early + tokens
            if self.early >= self.begin:
                self.rest = _SAMPLE
            return
        brought = tokens - self.plain * seconds
        self.balance = min(_MEMORY * self.balance + brought, _GAIN)
        self.rests.went(tokens)
        if self.balance < -_LOSS:
            self.rest, self.balance = self.rests.begin(), 0.0
            return
        self.fresh -= tokens if tokens < _MUCH * self.plain * seconds else 0.0
        if self.fresh <= 0.0:
            self.rest = _SAMPLE


class TurnsTrial(Struct):
    """`speculate` says what to do now, see `SpeculationTrial`.

    rest: tokens without guesses at first, where they are not expected to pay. begin: tokens with
    guesses after that, before there is any doubt. hopeless: not even good guesses would pay.
    """

    rest: int = 0
    begin: int = BEGIN
    hopeless: bool = False
    speculate: bool = True
    _accounts: dict[int, _Account] = field(default_factory=dict)
    _key: object = None
    _last: tuple[int, float] | None = None
    _skip: int = 0

    def __post_init__(self) -> None:
        self.speculate = not (self.rest or self.hopeless)

    def tokens(self, total: int, now: float, lanes: int, key: object) -> bool:
        """See `SpeculationTrial.tokens`."""
        before = self.speculate
        if self.hopeless:
            return False
        if not lanes or key != self._key:
            self._key, self._last = key, (total, now) if lanes else None
            if lanes:
                self.speculate = self._account(lanes).rest <= 0.0
        elif self._last is None or total < self._skip:
            self._last = (total, now)
        else:
            self._step(total, now, lanes)
        if self.speculate != before:
            self._skip, self._last = total + _SETTLE * lanes, None
        return self.speculate != before

    def _step(self, total: int, now: float, lanes: int) -> None:
        assert self._last is not None
        made, seconds = (total - self._last[0]) / lanes, now - self._last[1]
        account = self._account(lanes)
        if self.speculate:
            account.guessed(made, seconds)
        else:
            account.plainly(made, seconds)
        self.speculate = account.rest <= 0.0
        self._last = (total, now)

    def _account(self, lanes: int) -> _Account:
        return self._accounts.setdefault(lanes, _Account(self.rest, self.begin))
