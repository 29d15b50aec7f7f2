"""A synthetic pair whose tokens are drawn at a temperature, and SpecInfer's way to verify them.

`shared` is what the runtime does: target and draft perturb their scores with the same noise, and a
guess is right where it is the target's choice (docs/algorithms.md 2). `mss` is SpecInfer's
multi-step speculative sampling, whose guesses are drawn with noise of their own and accepted with
a probability. Both have the target's distribution; under `mss` the token itself depends on what
was guessed, so it exists for comparisons alone. Independent of models and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeinfer.core.sampling import gumbel
from pipeinfer.emulation.scenarios import Built, Experiment
from pipeinfer.emulation.synthetic import N_VOCAB, TAIL, SyntheticPair, mixed
from pipeinfer.errors import UsageError

Floats: TypeAlias = npt.NDArray[np.float64]

SHARED, MSS = "shared", "mss"
OFFERS = 4  #: guesses that a draft draws at a position
_CONTEXTS = 4096  #: by which the draft's distance from the target is set
_SURE, _SPREAD = 4.0, 0.7  #: median of the logits' scale, and of its logarithm the deviation


@dataclass(frozen=True, slots=True)
class Drawing:
    """How an emulated pair's tokens are chosen. temperature: 0 for greedy. verify: see
    `SampledPair`."""

    temperature: float = 0.0
    verify: str = SHARED

    def check(self) -> None:
        """Raise UsageError for a way of verifying that needs a temperature."""
        if self.verify == MSS and not self.temperature:
            raise UsageError("--verify mss needs --temp above 0: greedy tokens are not drawn")

    def applied(self, built: Built, experiment: Experiment) -> Built:
        """Return the scenario with a pair whose tokens are drawn so. Raises UsageError."""
        if not self.temperature:
            return built
        pair = built.scenario.pair
        if pair.by_depth or experiment.claimed is not None:
            raise UsageError("--temp is for pairs of a target and one draft model whose "
                             "confidences are its own: leave it out, or choose another --pair")
        return replace(built, scenario=replace(built.scenario, pair=SampledPair(
            pair.acceptance, seed=pair.seed, temperature=self.temperature, verify=self.verify)))


GREEDY = Drawing()


def multi_step(p: Floats, offers: Sequence[tuple[int, Floats]], draws: Floats) -> tuple[int, int]:
    """Return the token after one row by multi-step speculative sampling (SpecInfer, algorithm 2).

    p: float64[n], the target's probabilities
    offers: tokens, each with the probabilities float64[n] that it was drawn from, independently of
        the others
    draws: float64[len(offers) + 1], uniform in [0, 1)
    Returns the token, which has the distribution `p`, and the index of the offer that was accepted,
    -1 for none.
    """
    left = p
    for index, (token, q) in enumerate(offers):
        if draws[index] * q[token] < left[token]:
            return token, index
        rest = np.maximum(left - q, 0.0)
        if not rest.any():  # both are equal but for rounding
            return token, index
        left = rest / rest.sum()
    steps = np.cumsum(left)
    return int(np.searchsorted(steps, draws[-1] * steps[-1], side="right")), -1


def softmax(scores: Floats) -> Floats:
    """Return the probabilities of scores."""
    shares = np.exp(scores - scores.max())
    found: Floats = shares / shares.sum()
    return found


@dataclass(frozen=True)
class SampledPair(SyntheticPair):
    """Two models with logits; greedily the draft is right in `acceptance` of the positions.

    temperature: above 0
    verify: SHARED or MSS
    Under MSS the draft offers `OFFERS` tokens at a position, though fewer may be issued. The first
    ones are decided as if there were no more, so they are accepted as often.
    """

    temperature: float = 1.0
    verify: str = SHARED

    def token(self, path: tuple[int, ...], pos: int) -> int:
        """The target's token after the row at `pos`, whose path ends with `path`."""
        target, draft = self._scores(path, pos)
        if self.verify == SHARED:
            return int(np.argmax(target + self._noise(pos)))
        q, rng = softmax(draft), self._drawn(path, pos)
        offers = [(token, q) for token in rng.choice(N_VOCAB, OFFERS, p=q).tolist()]
        return multi_step(softmax(target), offers, rng.random(OFFERS + 1))[0]

    def guesses(self, path: tuple[int, ...], pos: int, depth: int = 0
                ) -> tuple[list[int], list[float]]:
        """The draft's tokens there, and the confidences that it claims.

        Of an offer that was drawn this is the probability of the draft's best token, which says how
        sure it is there; of those that follow the same share of what is left.
        """
        del depth
        _, draft = self._scores(path, pos)
        if self.verify == SHARED:
            shares = softmax(draft + self._noise(pos))
            best = np.argsort(-shares, kind="stable")
            return best.tolist(), shares[best].tolist()
        q = softmax(draft)
        offers = list(dict.fromkeys(self._drawn(path, pos).choice(N_VOCAB, OFFERS, p=q).tolist()))
        sure, claims = float(q.max()), [float(q.max())]
        for _ in offers[1:]:
            claims.append(min((1.0 - sum(claims)) * sure, 0.99 * claims[-1]))
        others = [token for token in range(N_VOCAB) if token not in offers]
        rest = min((1.0 - sum(claims)) / len(others), 0.99 * claims[-1])
        return offers + others, claims + [rest] * len(others)

    def _scores(self, path: tuple[int, ...], pos: int) -> tuple[Floats, Floats]:
        target, draft = _logits(self.seed, pos, path[-TAIL:], self.acceptance)
        return target / self.temperature, draft / self.temperature

    def _noise(self, pos: int) -> Floats:
        return gumbel(self.seed, pos, np.arange(N_VOCAB))

    def _drawn(self, path: tuple[int, ...], pos: int) -> np.random.Generator:
        return np.random.default_rng(mixed(self.seed, pos, path, 6))


@lru_cache(maxsize=4096)
def _logits(seed: int, pos: int, path: tuple[int, ...], acceptance: float
            ) -> tuple[Floats, Floats]:
    """The logits of target and draft at a position."""
    rng = np.random.default_rng(mixed(seed, pos, path, 5))
    target, other = rng.standard_normal((2, N_VOCAB))
    scale = _SURE * float(np.exp(_SPREAD * rng.standard_normal()))
    return scale * target, scale * (target + _distance(acceptance) * other)


@lru_cache(maxsize=64)
def _distance(acceptance: float) -> float:
    """How far the draft's logits are from the target's, in the latter's deviation."""
    if acceptance >= 1.0:
        return 0.0
    target, other = np.random.default_rng(0).standard_normal((2, _CONTEXTS, N_VOCAB))
    best, low, high = target.argmax(axis=1), 0.0, 64.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        right = np.mean((target + middle * other).argmax(axis=1) == best)
        low, high = (middle, high) if right > acceptance else (low, middle)
    return high
