"""The BoNBoN objective and the pairs it learns from (paper section 4, stage 2).

Does not know: where responses and scores come from, optimizers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALPHA = 0.005


def constant(samples: int) -> float:
    """What the log-ratio of best over worst gains against the initial model, (n - 1) H_{n-1}: the
    value for exact best-of-n sampling, in nats with summed log-probabilities."""
    if samples < 2:
        raise ValueError("best and worst need at least two samples")
    return (samples - 1) * math.fsum(1 / k for k in range(1, samples))


def loss(
    best: Tensor, worst: Tensor, initial: Tensor, samples: int, alpha: float = ALPHA
) -> Tensor:
    """Mean BoNBoN loss of a batch [batch]: ``best`` and ``worst`` are summed log-probabilities
    under the model in training, ``initial`` is their difference under the initial one."""
    gained = best - worst - initial
    return (-alpha * best + (1 - alpha) * (gained - constant(samples)) ** 2).mean()


@dataclass(frozen=True, slots=True)
class Round:
    """One round of stage 2. weight: of quality against speed (the paper's lambda). term: of
    efficiency, one of `TERMS`. alpha: of the better answer's own likelihood. rate: highest learning
    rate, which falls linearly to 0."""

    weight: float = 2.0
    term: str = "speedup"
    steps: int = 60
    batch: int = 6
    rate: float = 1e-4
    alpha: float = ALPHA
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """One sampled response: ``speedup`` over the sequential baseline, ``quality``, and its own
    tokens per step, ``parallelism``."""

    tokens: tuple[int, ...]
    speedup: float
    quality: float
    parallelism: float = 1.0

    def score(self, weight: float, term: str = "speedup") -> float:
        """``efficiency + weight * quality``; an infinite weight asks for quality alone. ``term``:
        of efficiency, one of `TERMS`."""
        if math.isinf(weight):
            return self.quality
        return TERMS[term](self.speedup, self.parallelism) + weight * self.quality


#: terms of efficiency, of a response's speed-up and parallelism (paper section 6.3)
TERMS: Mapping[str, Callable[[float, float], float]] = {
    "speedup": lambda speedup, _: speedup,
    "harmonic": lambda *both: statistics.harmonic_mean(both),
    "arithmetic": lambda *both: statistics.fmean(both),
    "parallelism": lambda _, parallelism: parallelism,
}


def pair(samples: Sequence[Scored], weight: float, term: str = "speedup"
         ) -> tuple[Scored, Scored] | None:
    """Best and worst by score, the first of equals; None where all score the same."""
    best = max(samples, key=lambda sample: sample.score(weight, term))
    worst = min(samples, key=lambda sample: sample.score(weight, term))
    same = best.score(weight, term) == worst.score(weight, term)
    return None if same else (best, worst)


def win_ratio(verdicts: Sequence[tuple[bool, float]], limit: float = 10.0) -> float:
    """Quality by a judge: confidence in wins over confidence in losses, clipped to
    [1 / limit, limit] since a response without losses would count as infinitely good."""
    won = math.fsum(confidence for win, confidence in verdicts if win)
    lost = math.fsum(confidence for win, confidence in verdicts if not win)
    if won == lost == 0:
        return 1.0
    return min(limit, max(1 / limit, won / lost if lost else limit))
