"""A trial of speculation where draft and target take turns, by an account of gains and losses.

There the time and the tokens of a step with speculation are known as soon as the step is back. So
long spans with and without speculation need not be compared (`speculation_trial`), for which short
answers have too few tokens. The account adds the tokens of each step and subtracts those that plain
decoding would have made in its time. Once it has lost too much, speculation rests, each time for
longer. A few tokens without speculation, now and then, measure the speed of plain decoding.
Independent of clocks: the caller passes times in seconds.
"""

from __future__ import annotations

from msgspec import Struct, field

from pipeinfer.scheduler.rests import Rests

_MEMORY = 0.98  #: weight of the account's past at each token
_LOSS = 4.0  #: tokens of a request that a trial of speculation may cost
_GAIN = 3.0  #: upper bound of the balance, because the text may change
_KNOWN = 48  #: tokens with speculation after which the next rest is a short one again
BEGIN = 12  #: tokens with speculation before plain decoding is measured
_SAMPLE = 4  #: tokens of a measurement of plain decoding
_STALE = 64  #: tokens after which that is measured again, unless speculation gains much
_MUCH = 1.25  #: times the speed of plain decoding: a gain so large that no new sample is needed
_SETTLE = 1  #: tokens after a change that do not count
_PAST = 0.5  #: weight of plain decoding's earlier samples


class _Account(Struct):
    """The account at one number of requests.

    rest: tokens to go without speculation
    begin: tokens with speculation before the first sample of plain decoding
    balance: tokens gained over plain decoding
    plain: speed of plain decoding, in tokens per second; 0 while unknown
    rests: the lengths of successive rests
    fresh: tokens until a new sample of plain decoding is due
    seconds, made: time and tokens of the present sample
    early, waiting: tokens with speculation before the first sample, and their seconds
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
        """Record tokens of a request that came without speculation."""
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
        """Record tokens of a request that came with speculation."""
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
    """The trial; `speculate` is its present decision, as for `SpeculationTrial`.

    rest: tokens without speculation at first, where it is not expected to pay
    begin: tokens with speculation after that, before plain decoding is measured
    hopeless: whether not even a good draft would pay
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
        """Record tokens; arguments and result as for `SpeculationTrial.tokens`."""
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
