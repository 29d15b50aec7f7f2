"""A backend that takes as long as another machine would.

Wraps any backend; a decode lasts `seconds(rows)` of wall-clock time, the inner backend's own
compute included. While it waits it asks `should_stop` as a real backend does between layers.
`computing` makes the wait a busy one that never enters MPI, as a real computation is. It knows
no machine: whoever makes it knows how long a run takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeinfer.backends.base import Backend, apply
from pipeinfer.core.types import FloatArray, Rows, SeqJoin

_STEP = 1e-3


class PacedBackend:
    """See the module docstring; `seconds` maps a number of rows to a duration.

    layers: how often a decode asks `should_stop` (0: every millisecond).
    """

    def __init__(self, inner: Backend, seconds: Callable[[int], float], *,
                 computing: bool = False, layers: int = 0) -> None:
        self.info, self.capabilities = inner.info, inner.capabilities
        self._inner, self._seconds, self._computing = inner, seconds, computing
        self._layers = layers

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """See `Backend.decode`."""
        seconds = self._seconds(len(rows))
        step = seconds / self._layers if self._layers else _STEP
        end = time.perf_counter() + seconds
        layer = end - seconds + step
        result = self._inner.decode(rows, hidden, should_stop)
        while result is not None and (left := end - time.perf_counter()) > 0:
            if should_stop is not None and should_stop():
                for seq_id, first in rows.first_positions().items():
                    self._inner.seq_rm(seq_id, first, int(rows.positions.max()) + 1)
                return None
            if self._computing:
                _burn(min(left, step))
            else:
                time.sleep(min(left, max(layer - time.perf_counter(), 0.0)))
                layer += step
        return result

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """See `Backend.seq_rm`."""
        self._inner.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """See `Backend.seq_cp`."""
        self._inner.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """See `Backend.seq_keep`."""
        self._inner.seq_keep(seq_id)

    def seq_join(self, src: int, dst: int) -> None:
        """See `core.SeqJoin`. Raises BackendError where the inner backend cannot."""
        apply(self._inner, SeqJoin(src, dst))

    def close(self) -> None:
        """See `Backend.close`."""
        self._inner.close()


def _burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
