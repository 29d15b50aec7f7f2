"""The recent and the best time of each stage for a run, which show a stage that has become slow.

Runs of several rows are scaled to one row by the cost of rows (`exact_width.Widths.curve`). A
stage's time is the mean of its last runs without the few slowest; time in which it waited for a
core of another stage (`own_time`), or its leader for other members, is excluded. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from pipeinfer.core.messages import Spans
from pipeinfer.planning.own_time import Interval, Share, own_seconds

WINDOW = 64  #: runs whose mean is the time of a stage
_FEW = 16  #: least number of runs for a time
_OTHERS = 2  #: stored runs that are too wide for the curve (prompts), relative to the others


class StagePace:
    """The times of stages 1 to `n_stages`.

    curve: (rows, time relative to one row), rows ascending.
    shares, cores: which stages share which cores, see `own_seconds`; without them none do.
    """

    def __init__(self, n_stages: int, curve: Sequence[tuple[int, float]],
                 shares: Sequence[Share] = (), cores: Mapping[str, float] | None = None) -> None:
        self._runs: deque[tuple[int, Spans]] = deque(maxlen=WINDOW)
        self._others: deque[Spans] = deque(maxlen=WINDOW * _OTHERS)
        self._n = n_stages
        self._shares = shares or [Share(str(stage)) for stage in range(n_stages)]
        self._cores = cores or {}
        self._best = [float("inf")] * n_stages
        self._lately: list[float] = [0.0] * n_stages
        self._counted = self._seen = 0
        self._rows, self._costs = zip(*((1, 1.0), *curve), strict=True)

    def saw(self, rows: int, spans: Spans) -> None:
        """Record a run of `rows` rows that has passed all stages. spans: as in
        `messages.Decode`."""
        if len(spans) != self._n:
            return
        if rows > self._rows[-1]:
            self._others.append(spans)  # too wide to scale, but takes cores from other runs
            return
        self._runs.append((rows, spans))
        self._seen += 1
        if self._seen % _FEW == 0:
            self._best = [min(pair) for pair in zip(self._best, self.seconds, strict=True)]

    @property
    def known(self) -> bool:
        """Whether there have been enough runs."""
        return self._seen >= _FEW

    @property
    def settled(self) -> bool:
        """Whether the times rest on a full window of runs over the present stages."""
        return self._seen >= WINDOW

    @property
    def seconds(self) -> list[float]:
        """The recent seconds of each stage for a run of one row; zeros until known."""
        if not self.known:
            return [0.0] * self._n
        if self._counted != self._seen:
            self._counted, self._lately = self._seen, self._figures()
        return self._lately

    def _figures(self) -> list[float]:
        every = [spans for _, spans in self._runs] + list(self._others)
        own = own_seconds(
            [Interval(stage, start, seconds) for spans in every
             for stage, (start, seconds) in enumerate(_computed(spans))],
            self._shares, self._cores)
        costs = np.interp([rows for rows, _ in self._runs], self._rows, self._costs).tolist()
        found = []
        for stage in range(self._n):
            last = sorted(own[k * self._n + stage] / cost for k, cost in enumerate(costs))
            found.append(statistics.fmean(last[:max(1, len(last) - len(last) // _FEW)]))
        return found

    @property
    def slowdown(self) -> list[float]:
        """The time of each stage relative to its best; 1 until known."""
        return [now / best if 0 < best < float("inf") else 1.0
                for now, best in zip(self.seconds, self._best, strict=True)]


def _computed(spans: Spans) -> list[tuple[float, float]]:
    """Return start and seconds of each stage, without its waits for other members."""
    return [(start, seconds - waited) for start, seconds, waited in spans]
