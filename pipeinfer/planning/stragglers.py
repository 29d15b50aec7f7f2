"""How long each stage takes for a run, lately and at its best: who has become slow.

Runs of several rows are brought down to one row by what rows cost (`exact.Widths.curve`). The
figure of a stage is the mean of its last runs without the few slowest. Pure; it knows no ranks, no
clock and no plan.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from pipeinfer.core.messages import Spans

WINDOW = 64  #: runs that a figure rests on
_FEW = 16  #: with fewer runs than that there is none


class StagePace:
    """Of stages 1 to `n_stages`. curve: (rows, time relative to one row), rows ascending."""

    def __init__(self, n_stages: int, curve: Sequence[tuple[int, float]]) -> None:
        self._last = [deque[float](maxlen=WINDOW) for _ in range(n_stages)]
        self._best = [float("inf")] * n_stages
        self._seen = 0
        self._rows, self._costs = zip(*((1, 1.0), *curve), strict=True)

    def saw(self, rows: int, spans: Spans) -> None:
        """A run of `rows` rows has passed all stages. spans: as in `protocol.Decode`."""
        if len(spans) != len(self._last) or rows > self._rows[-1]:
            return
        cost = float(np.interp(rows, self._rows, self._costs))
        for last, seconds in zip(self._last, spans[:, 1].tolist(), strict=True):
            last.append(seconds / cost)
        self._seen += 1
        if self._seen % _FEW == 0:
            self._best = [min(pair) for pair in zip(self._best, self.seconds, strict=True)]

    @property
    def known(self) -> bool:
        """Whether there have been enough runs."""
        return self._seen >= _FEW

    @property
    def settled(self) -> bool:
        """Whether the figures rest on runs of this arrangement alone, as many as are looked at."""
        return self._seen >= WINDOW

    @property
    def seconds(self) -> list[float]:
        """Of each stage for a run of one row, lately; zeros until it is known."""
        if not self.known:
            return [0.0] * len(self._last)
        return [statistics.fmean(sorted(last)[:max(1, len(last) - len(last) // _FEW)])
                for last in self._last]

    @property
    def slowdown(self) -> list[float]:
        """How many times as long as at its best each stage takes; 1 until that is known."""
        return [now / best if 0 < best < float("inf") else 1.0
                for now, best in zip(self.seconds, self._best, strict=True)]
