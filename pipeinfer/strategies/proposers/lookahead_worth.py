"""The choice of lookahead's candidates and window by their gain and their cost on this machine.

The gain of a candidate can be computed whether it was verified or not: the text that follows is
compared with the n-grams that the pool had. Independent of lanes, pools and clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from pipeinfer.strategies.proposers.base import common_prefix

Tail: TypeAlias = tuple[int, ...]

_ENOUGH = 16  #: steps with the window after which its gain is known
_RATE = 1 / 32  #: weight of a new step in the running mean
_EVERY, _PROBE = 96, 16  #: of every 96 steps, 16 run the window, to measure its gain
_LOSS, _SHARE = 3.0, 1 / 32  #: tokens that this may cost: so many, and this share of the steps


class WindowChoice(Struct, frozen=True):
    """What a step does.

    candidates: how many to verify
    window: whether the run includes the window
    """

    candidates: int
    window: bool


@dataclass(slots=True)
class Worth:
    """Decides for one proposer, over all its texts.

    cost: time of a run of so many rows, relative to one row
    ngram, most: N and G
    window_rows: most rows of the window
    fixed_candidates, fixed_window: whether the user has set them
    """

    cost: Callable[[int], float]
    ngram: int
    most: int
    window_rows: int
    fixed_candidates: bool = False
    fixed_window: bool = False
    _steps: int = 0
    _seen: int = 0
    _windows: int = 0  # steps with the window
    _spent: float = 0.0  # tokens that plain decoding would have made meanwhile
    #: tokens per step that the first g candidates gain, by g: of the text's own n-grams alone, and
    #: of those of windows, too
    _gains: tuple[list[float], list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self._gains = ([0.0] * (self.most + 1), [0.0] * (self.most + 1))

    def learn(self, named: tuple[Sequence[Tail], Sequence[Tail]], came: Tail) -> None:
        """Update the gains at one place of a text.

        named: the candidates that the pool had, the newest first: from the text's own n-grams, and
            all
        came: the tokens that followed
        """
        self._seen += 1
        weight = max(_RATE, 1 / self._seen)
        for gains, tails in zip(self._gains, named, strict=True):
            longest = 0
            for g in range(1, self.most + 1):
                if g <= len(tails):
                    longest = max(longest, common_prefix(tails[g - 1], came))
                gains[g] += weight * (longest - gains[g])

    def choose(self) -> WindowChoice:
        """Return what the next step does."""
        self._steps += 1
        can = self.window_rows > 0
        best = self._best({can} if self.fixed_window else {can, False})
        if best.window == can or not (self._windows < _ENOUGH or self._steps % _EVERY < _PROBE):
            self._windows += best.window
            return best
        trial = self._best({True})
        loss = self.cost(self._rows(trial)) - self._tokens(trial)
        if self._spent + loss > _LOSS + _SHARE * self._steps:
            return best
        self._spent += max(loss, 0.0)
        self._windows += 1
        return trial

    def _best(self, windows: Collection[bool]) -> WindowChoice:
        counts = [self.most] if self.fixed_candidates else range(self.most + 1)
        return max((WindowChoice(g, w) for g in counts for w in sorted(windows)), key=self._speed)

    def _speed(self, choice: WindowChoice) -> float:
        return self._tokens(choice) / self.cost(self._rows(choice))

    def _tokens(self, choice: WindowChoice) -> float:
        return 1 + self._gains[choice.window][choice.candidates]

    def _rows(self, choice: WindowChoice) -> int:
        return 1 + choice.candidates * (self.ngram - 1) + choice.window * self.window_rows
