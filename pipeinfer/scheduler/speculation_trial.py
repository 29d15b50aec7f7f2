"""Whether speculation pays where guessing takes the processor from computing: by trying both.

The controller's model takes the draft for a machine of its own. Where the draft shares cores with
stages, drafting slows the stages down, so the speed of plain decoding cannot be inferred from
speculative runs. So spans of tokens with and without guesses alternate, and the slower kind is
tried less and less often. Spans are compared at the same number of requests. This module knows no
clock: it is told times, in seconds.
"""

from __future__ import annotations

from msgspec import Struct, field

WINDOW = 24  #: tokens of a span that is measured
_SETTLE = 4  #: tokens after a change that do not count: guesses in flight drain, or fill the pipe
_MEMORY = 0.6  #: weight of earlier spans
_FIRST, _MOST = 3, 48  #: spans of the better kind before the other is tried again
_MARGIN = 1.02  #: how much faster plain decoding has to be


class _Kind(Struct):
    """Speeds of both kinds at some number of requests, tokens per second; 0: not tried.

    promising: whether guesses are expected to pay, which counts until both were tried. left: spans
    until the worse one, or the one that promises less, is tried. trying: this is such a span.
    tokens, seconds: what the present span has so far, from requests that were shorter than it.
    """

    guessing: float = 0.0
    plain: float = 0.0
    promising: bool = True
    left: int = 0
    patience: int = _FIRST
    trying: bool = True
    tokens: int = 0
    seconds: float = 0.0

    @property
    def better(self) -> bool:
        """Whether guessing is."""
        return self.plain < _MARGIN * self.guessing

    @property
    def now(self) -> bool:
        """Whether to guess: first both kinds are tried."""
        if not self.guessing or not self.plain:
            believed = self.guessing if self.promising else self.plain
            return self.promising == (self.left > 0 or not believed)
        return self.better != self.trying

    def add(self, guessed: bool, tokens: int, seconds: float) -> None:
        """A part of a span; the span may be whole now."""
        self.tokens += tokens
        self.seconds += seconds
        if self.tokens >= WINDOW and self.seconds > 0.0:
            self._learn(guessed, self.tokens / self.seconds)
            self.tokens, self.seconds = 0, 0.0

    def _learn(self, guessed: bool, speed: float) -> None:
        before = self.better
        old = self.guessing if guessed else self.plain
        new = _MEMORY * old + (1 - _MEMORY) * speed if old else speed
        if guessed:
            self.guessing = new
        else:
            self.plain = new
        if not self.guessing or not self.plain:
            self.left -= 1
            return
        if self.better != before:
            self.patience = _FIRST
        if self.trying:
            self.trying, self.left = False, self.patience
            self.patience = min(2 * self.patience, _MOST)
        else:
            self.left -= 1
            self.trying = self.left <= 0


class SpeculationTrial(Struct):
    """`speculate` says what to do now.

    promising: whether guesses are expected to pay; where they are not, plain decoding begins.
    sure: how many spans go by before the other kind is tried. hopeless: not even good guesses
    would pay, so none are tried.
    """

    promising: bool = True
    sure: int = 0
    hopeless: bool = False
    speculate: bool = True
    _kinds: dict[int, _Kind] = field(default_factory=dict)
    _key: object = None
    _from: tuple[int, float] | None = None
    _last: tuple[int, float, int] | None = None
    _skip_to: int = 0

    def __post_init__(self) -> None:
        self.speculate = self.promising and not self.hopeless

    def tokens(self, total: int, now: float, lanes: int, key: object) -> bool:
        """`total` tokens have come out by `now`; whether `speculate` has changed.

        lanes: how many requests are past their prompts (0: something else is going on, which
        would spoil a comparison). key: changes when a request comes or goes.
        """
        before = self.speculate
        if self.hopeless:
            self.speculate = False
            return before
        if not lanes or key != self._key:
            self._bank()
            self._key = key
            self._settle(total, lanes)
        elif self._from is None:
            if total >= self._skip_to:
                self._from = (total, now)
        else:
            self._last = (total, now, lanes)
            if total - self._from[0] >= WINDOW:
                kind = self._bank()
                self._from = (total, now)
                if kind is not None and kind.now != self.speculate:
                    self._settle(total, lanes)
        return self.speculate != before

    def _bank(self) -> _Kind | None:
        """Put what was measured since `_from` to its kind."""
        if self._from is None or self._last is None:
            return None
        (start, since), (total, until, lanes) = self._from, self._last
        self._last = None
        kind = self._kind(lanes)
        kind.add(self.speculate, total - start, until - since)
        return kind

    def _kind(self, lanes: int) -> _Kind:
        return self._kinds.setdefault(_bucket(lanes), _Kind(promising=self.promising,
                                                            left=self.sure))

    def expect(self, promising: bool) -> None:
        """What is expected of guesses by now."""
        self.promising = promising
        for kind in self._kinds.values():
            kind.promising = promising

    def _settle(self, total: int, lanes: int) -> None:
        """Start over, with the setting that suits this number of requests."""
        if lanes:
            self.speculate = self._kind(lanes).now
        self._from, self._last, self._skip_to = None, None, total + _SETTLE * lanes


def _bucket(lanes: int) -> int:
    """Numbers of requests that are taken for the same: 1, 2, 3 to 4, 5 to 8, ..."""
    return (lanes - 1).bit_length()
