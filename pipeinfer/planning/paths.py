"""Shortest paths through the layers: which range each rank takes, in a fixed order of ranks.

A step is float64[n + 1, n + 1]: [start, stop] -> the cost at which the next rank takes layers
`[start, stop)`, inf if it cannot; [i, i] leaves it out. Dynamic programming over (ranks, layers),
each step one matrix operation. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def least_sum(steps: Sequence[Matrix]) -> float:
    """Return the least sum of costs with which the ranks take all layers, inf if they cannot."""
    return _least(steps, np.add)


def least_maximum(steps: Sequence[Matrix]) -> float:
    """Return the least possible cost of the most expensive step, inf if the ranks cannot take
    all layers."""
    return _least(steps, np.maximum)


def best_path(keys: Sequence[Sequence[Matrix]], *, same: float = 0.0, later: bool = True
              ) -> list[int]:
    """Return the boundaries between ranks, `len(steps) + 1` of them: 0, ..., n. A path must
    exist.

    keys: sequences of steps. The path has the least sum by the first of them; among equals, the
        least by the second, and so on.
    same: relative difference below which sums are equal.
    later: among paths that are equal by all keys, whether to choose the one whose last boundaries
        are as late as possible, else as early as possible.
    """
    size = keys[0][0].shape[0] if keys[0] else 1
    sums = [np.full(size, np.inf) for _ in keys]
    for sum_ in sums:
        sum_[0] = 0.0
    columns, starts = np.arange(size), []
    for step in zip(*keys, strict=True):
        candidates = [before[:, None] + costs for before, costs in zip(sums, step, strict=True)]
        chosen = np.isfinite(candidates[0])
        for values in candidates:
            least = np.min(np.where(chosen, values, np.inf), axis=0)
            chosen &= values <= least * (1 + same)
        start = size - 1 - np.argmax(chosen[::-1], axis=0) if later else np.argmax(chosen, axis=0)
        found = chosen.any(axis=0)
        sums = [np.where(found, values[start, columns], np.inf) for values in candidates]
        starts.append(start)
    cuts = [size - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return cuts[::-1]


def _least(steps: Sequence[Matrix], join: np.ufunc) -> float:
    best = np.full(steps[0].shape[0] if steps else 1, np.inf)
    best[0] = 0.0
    for costs in steps:
        best = np.min(join(best[:, None], costs), axis=0)
    return float(best[-1])
