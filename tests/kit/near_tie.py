"""Whether two answers differ by a near-tie: the gap of two scores beside the noise of rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from pipeinfer.core.sampling import candidates
from pipeinfer.core.types import SamplingParams
from tests.kit.plain_loop import PlainLoop
from tests.kit.sliced_loop import SlicedLoop


class Tie(Struct, frozen=True):
    """The choice at one position of a plain answer.

    at: the position, in tokens of the answer
    best: the two tokens with the best perturbed scores
    gap: between these two scores, in logits
    noise: the largest difference between logits of single rows and of wider runs
    """

    at: int
    best: list[int]
    gap: float
    noise: float

    @property
    def near(self) -> bool:
        """Whether rounding alone can have changed the choice."""
        return self.gap <= 2 * self.noise


def tie_where(loop: PlainLoop | SlicedLoop, prompt: Sequence[int], params: SamplingParams,
              reference: Sequence[int], got: Sequence[int], widths: Sequence[int]) -> Tie:
    """Feed `loop` the reference up to where `got` first differs, row by row and in `widths` rows.

    Raises StopIteration if the shorter answer is a prefix of the other.
    """
    at = next(i for i, (a, b) in enumerate(zip(got, reference, strict=False)) if a != b)
    single = list(loop.logits_after(prompt, reference[:at]))[-1]
    noise = 0.0
    for width in widths:
        loop.reset()
        for start in range(0, len(prompt), 64):
            other = loop.decode(prompt[start : start + 64], start)
        for start in range(0, at, width):
            other = loop.decode(reference[start : min(start + width, at)], len(prompt) + start)
        noise = max(noise, float(np.abs(other - single).max()))
    path = [*prompt, *reference[:at]]
    ids, scores = candidates(single, params, np.array(path, np.int32), len(path) - 1).ranked(2)
    gap = float(scores[0] - scores[1]) * (params.temperature or 1.0)
    return Tie(at, [int(i) for i in ids], gap, noise)
