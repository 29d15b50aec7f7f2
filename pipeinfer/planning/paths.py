"""Best ways through the layers: which range each rank takes, in a fixed order of ranks.

A step is float64[n + 1, n + 1]: [start, stop] -> what it costs the next rank to take layers
`[start, stop)`, inf where it cannot; [i, i] leaves it out. Dynamic programming over (ranks,
layers), each step one operation on a matrix. Pure; it knows no seconds and no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def least_sum(steps: Sequence[Matrix]) -> float:
    """The least sum of costs with which the ranks take all layers, inf if they cannot."""
    return _least(steps, np.add)


def least_maximum(steps: Sequence[Matrix]) -> float:
    """The least possible cost of the dearest step, inf if the ranks cannot take all layers."""
    return _least(steps, np.maximum)


def best_path(keys: Sequence[Sequence[Matrix]], *, same: float = 0.0, later: bool = True
              ) -> list[int]:
    """The boundaries between ranks, `len(steps) + 1` of them: 0, ..., n.

    keys: sequences of steps; the path has the least sum by the first of them, among those that are
    equal there the least by the second, and so on. same: sums that differ by less, relatively, are
    equal. later: of paths that are equal by all keys one whose last boundaries are far back (else
    far in front). There must be a path.
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
