"""The ledger of worth: whether a way to speculate gains more tokens than its time costs.

An account holds the tokens that one way has gained, minus those that plain decoding would have made
in the time it took. An overdrawn account rests, each time for longer, and is then tried again,
because the text may have changed. `Rules` are all that differs between the questions:

    "query the draft's models?"  `MODELS`, with known costs in tokens (`Speculation`)
    "speculate at all?"          `TURNS` or `OVERLAP`, by measured times (`Trial`)

Where draft and target take turns, time and tokens of a step are known as soon as the step is back,
so a few tokens of plain decoding are enough to compare with. Where they overlap on shared cores,
results of a full pipeline come in bursts, so longer samples are taken, and ever less often.
Independent of clocks: the caller passes times in seconds.
"""

from __future__ import annotations

import math

from msgspec import Struct, field

_MUCH = 1.25  #: times the speed of plain decoding: a gain so large that no new sample is needed
_PAST = 0.5  #: weight of plain decoding's earlier samples


class Rules(Struct, frozen=True):
    """How an account is kept.

    memory: weight of the balance's past at each job or step
    loss: tokens that a trial may cost
    known: jobs or tokens without a rest after which the next rest is a short one again
    most: upper bound of the balance, because the text may change
    begin: tokens with speculation before plain decoding is measured
    sample: tokens of such a measurement
    stale: tokens after which plain decoding is measured again, unless speculation gains much: at
        first, and at most
    rests: the shortest and the longest rest, in jobs or tokens
    settle: tokens of each request after a change that do not count: the pipeline drains or fills
    together: whether tokens of all requests are added; otherwise those of each count, on average
    """

    memory: float
    loss: float
    known: float
    most: float = math.inf
    begin: int = 0
    sample: int = 0
    stale: tuple[int, int] = (0, 0)
    rests: tuple[int, int] = (24, 384)
    settle: int = 0
    together: bool = False


MODELS = Rules(memory=0.97, loss=1.0, known=24)
TURNS = Rules(memory=0.98, loss=4.0, known=48, most=3.0, begin=12, sample=4, stale=(64, 64),
              settle=1)
OVERLAP = Rules(memory=0.995, loss=3.0, known=96, most=8.0, begin=24, sample=24, stale=(96, 768),
                rests=(72, 1152), settle=4, together=True)


class Backoff(Struct):
    """Lengths that double from the first to the longest."""

    first: int
    longest: int
    _next: int = 0

    def take(self) -> int:
        """Return the next length."""
        length = self._next or self.first
        self._next = min(2 * length, self.longest)
        return length

    def reset(self) -> None:
        """Begin with the first length again."""
        self._next = 0


class Account(Struct):
    """One account of the ledger, in tokens.

    balance: gains minus costs; the past fades
    rest: jobs or tokens to go without speculation
    begin: as in `Rules`
    plain: speed of plain decoding, in tokens per second; 0 while unknown
    """

    rules: Rules
    rest: float = 0.0
    begin: int = 0
    balance: float = 0.0
    plain: float = 0.0
    _rests: Backoff = field(default_factory=lambda: Backoff(0, 0))
    _stale: Backoff = field(default_factory=lambda: Backoff(0, 0))
    _since: float = 0.0  # jobs or tokens since the last rest
    _fresh: float = 0.0  # tokens until a new sample of plain decoding is due
    _sample: tuple[float, float] = (0.0, 0.0)  # tokens and seconds of the present sample
    _early: tuple[float, float] = (0.0, 0.0)  # the same with speculation before the first sample

    def __post_init__(self) -> None:
        self._rests, self._stale = Backoff(*self.rules.rests), Backoff(*self.rules.stale)

    def add(self, gain: float) -> None:
        """Record a gain; a cost is negative."""
        self.balance = min(self.balance + gain, self.rules.most)

    def went(self, gain: float, count: float = 1.0) -> None:
        """Record the gain of `count` jobs or tokens with speculation; the past fades."""
        self.balance *= self.rules.memory
        self.add(gain)
        self._since += count
        if self._since >= self.rules.known:
            self._rests.reset()

    def overdrawn(self) -> bool:
        """Return whether the balance is too low. If so, a rest begins."""
        if self.balance > -self.rules.loss:
            return False
        self.rest, self.balance, self._since = self._rests.take(), 0.0, 0.0
        self._stale.reset()
        return True

    def ask(self) -> bool:
        """Return whether to speculate in the next job, which counts towards a rest."""
        if self.rest > 0.0:
            self.rest -= 1.0
            return False
        return not self.overdrawn()

    def decoded(self, tokens: float, seconds: float, *, speculating: bool) -> None:
        """Record tokens of a request and the time that they took."""
        if not speculating:
            self._measure(tokens, seconds)
        elif self.plain:
            gain = tokens - self.plain * seconds
            self.went(gain, tokens)
            if self.overdrawn():
                return
            self._fresh -= tokens if tokens < _MUCH * self.plain * seconds else 0.0
            if self._fresh <= 0.0:
                self.rest = self.rules.sample
        else:
            self._early = self._early[0] + tokens, self._early[1] + seconds
            if self._early[0] >= self.begin:
                self.rest = self.rules.sample

    def _measure(self, tokens: float, seconds: float) -> None:
        made, took = self._sample = self._sample[0] + tokens, self._sample[1] + seconds
        self.rest -= tokens
        if self.rest > 0.0:
            return
        speed = made / max(took, 1e-9)
        self.plain = _PAST * self.plain + (1.0 - _PAST) * speed if self.plain else speed
        self._sample, self._fresh = (0.0, 0.0), self._stale.take()
        if self._early[1]:
            early, self._early = self._early, (0.0, 0.0)
            self.decoded(*early, speculating=True)


class Trial(Struct):
    """Decides whether to speculate at all, by the times and tokens of decoding with and without.

    rules: TURNS or OVERLAP
    rest: tokens without speculation at first, where it is not expected to pay
    begin: tokens with speculation before plain decoding is measured; 0: by the rules
    hopeless: whether not even a good draft would pay, so that none is tried
    speculate: the present decision
    """

    rules: Rules
    rest: int = 0
    begin: int = 0
    hopeless: bool = False
    speculate: bool = True
    _accounts: dict[int, Account] = field(default_factory=dict)  # by number of requests
    _key: object = None
    _last: tuple[int, float] | None = None
    _skip: int = 0

    def __post_init__(self) -> None:
        self.speculate = not (self.rest or self.hopeless)

    def tokens(self, total: int, now: float, lanes: int, key: object) -> bool:
        """Record that `total` tokens were generated by `now`; return whether `speculate` has
        changed.

        total: tokens since the start
        now: in seconds
        lanes: number of requests past their prompts; 0: other work would spoil a comparison
        key: a value that changes when a request comes or goes
        """
        before = self.speculate
        if self.hopeless:
            return False
        if not lanes or key != self._key:
            self._key, self._last = key, (total, now) if lanes else None
            self._skip = total + self.rules.settle * lanes
            if lanes:
                self.speculate = self._account(lanes).rest <= 0.0
        elif self._last is None or total < self._skip:
            self._last = (total, now)
        else:
            account = self._account(lanes)
            made = (total - self._last[0]) / (1 if self.rules.together else lanes)
            account.decoded(made, now - self._last[1], speculating=self.speculate)
            self.speculate = account.rest <= 0.0
            self._last = (total, now)
        if self.speculate != before:
            self._skip, self._last = total + self.rules.settle * lanes, None
        return self.speculate != before

    def _account(self, lanes: int) -> Account:
        return self._accounts.setdefault(
            lanes, Account(self.rules, self.rest, self.begin or self.rules.begin))
