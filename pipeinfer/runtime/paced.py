"""A backend that takes as long as another machine would.

Wraps any backend; a decode lasts `seconds(rows)` of wall-clock time, the inner backend's own
compute included. While it waits it asks `should_stop` as a real backend does between layers. It
knows no machine: its caller decides how long a run takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeinfer.backends.base import Backend
from pipeinfer.backends.composed import ComposedBackend
from pipeinfer.backends.llamacpp.eval_callback import PartSum
from pipeinfer.backends.team import Team
from pipeinfer.core.types import END, FloatArray, Rows

_STEP = 1e-3  #: seconds between two questions whether to stop


class PacedBackend(ComposedBackend):
    """A backend that takes a given time; `seconds` maps a number of rows to a duration."""

    def __init__(self, inner: Backend, seconds: Callable[[int], float]) -> None:
        super().__init__([inner])
        self._inner, self._seconds = inner, seconds

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        begin = time.perf_counter()
        end, layer = begin + self._seconds(len(rows)), begin + _STEP
        result = self._inner.decode(rows, hidden, should_stop)
        while result is not None and (left := end - time.perf_counter()) > 0:
            if should_stop is not None and should_stop():
                part = self._inner.capabilities.takes_back
                for seq_id, first in rows.first_positions().items():
                    self._inner.seq_rm(seq_id, first if part else 0, END)
                return None
            time.sleep(min(left, max(layer - time.perf_counter(), 0.0)))
            layer += _STEP
        return result


class PacedTeam:
    """A team whose members compute as long as other machines would: `first` seconds between two
    sums for one row, `further` for each row more. width: elements of a row."""

    def __init__(self, inner: Team, first: float, further: float, width: int) -> None:
        self.shape, self.shares_memory = inner.shape, inner.shares_memory
        self._inner, self._width = inner, width
        self._first, self._further = first, further
        self._since = self._late = 0.0

    @property
    def waited(self) -> float:
        """The seconds that this member has waited for others' partial results."""
        return self._inner.waited

    @property
    def count(self) -> int:
        """The number of sums of this member so far."""
        return self._inner.count

    @property
    def run_id(self) -> int:
        """The run that was begun last; -1 before any."""
        return self._inner.run_id

    def begin(self, run_id: int, *, cancelled: bool) -> bool:
        """Begin a run; return whether to skip it."""
        return self._inner.begin(run_id, cancelled=cancelled)

    def part(self, index: int) -> PartSum:
        """Return the object that sums the partial results of slice `index`, which this member
        holds."""
        part = self._inner.part(index)
        return part if index != self.shape.own[0] else _PacedPart(self, part)

    def arm(self, should_stop: Callable[[], bool] | None) -> None:
        """Set the function by which the leader may stop the decode that follows; None: no stop."""
        self._inner.arm(should_stop)
        self._since = time.perf_counter()

    def gather(self, index: int, logits: FloatArray) -> FloatArray | None:
        """Concatenate the slices' logits after a decode."""
        return self._inner.gather(index, logits)

    def fail(self, index: int) -> None:
        """Notify the other members that slice `index` cannot go on; called by the thread of that
        slice."""
        self._inner.fail(index)

    def check(self) -> None:
        """Raise the reason for which the last decode ended early, unless the leader stopped it."""
        self._inner.check()

    def close(self) -> None:
        """Release shared memory."""
        self._inner.close()

    def pause(self, count: int) -> None:
        """Wait until `count` numbers would have been computed since the last sum."""
        rows = count // self._width
        end = self._since + (self._first + self._further * (rows - 1) if rows else 0.0)
        if (left := end - self._late - time.perf_counter()) > 0:
            time.sleep(left)
        # a sleep that took too long, and work that did, are made up for by the next ones
        self._late = max(0.0, self._late + time.perf_counter() - end)

    def start(self) -> None:
        """A sum is there."""
        self._since = time.perf_counter()


class _PacedPart:
    address: int | None = None

    def __init__(self, team: PacedTeam, inner: PartSum) -> None:
        self._team, self._inner = team, inner

    def add(self, part: FloatArray, place: int) -> bool:
        """Replace `part`, float32[n], by the sum; return False where the decode has to be left."""
        self._team.pause(part.size)
        go_on = self._inner.add(part, place)
        self._team.start()
        return go_on
