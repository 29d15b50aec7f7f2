"""The sign of life of a rank's main thread, for its watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable

_LATE = 2.0  #: times its length: a pause that took longer shows that the machine is busy
_BUSY_SECONDS = 30.0  #: for which it is taken to stay busy


class Pulse:
    """Records when the main thread was last active, and with what.

    deadline: seconds without a `beat` after which it counts as hanging; before the first `beat` it
        never does.
    loading: whether libraries are being loaded, which may block all Python threads for a while.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.loading = True
        self.on_settled: Callable[[], None] = lambda: None  #: called when patience ends
        self._last: tuple[float, str] | None = None
        self._busy_until = self._late_until = self._worst = 0.0

    @property
    def patient(self) -> bool:
        """Whether this rank may be silent for longer: it loads, or its machine is busy."""
        return self.loading or time.monotonic() < self._busy_until

    def slept(self, wanted: float, took: float) -> None:
        """Record a pause of the thread that sends signs of life, in seconds. A late one shows that
        threads of this rank wait for a core."""
        now, late = time.monotonic(), took - wanted
        if took > _LATE * wanted:
            self._busy_until = now + _BUSY_SECONDS
        if late >= self._worst or now > self._late_until:
            self._worst, self._late_until = late, now + _BUSY_SECONDS

    @property
    def late(self) -> float:
        """By how many seconds a pause of this rank was late at worst lately. Others may be as late
        with each of their signs of life."""
        return max(self._worst, 0.0) if time.monotonic() < self._late_until else 0.0

    def beat(self, doing: str) -> None:
        """Record that the main thread is active. `doing` completes a sentence such as "rank 3
        ..."."""
        self._last = (time.monotonic(), doing)

    def settle(self) -> None:
        """End the patience once libraries are loaded, and call `on_settled` at once."""
        self.loading = False
        self.on_settled()

    @property
    def hangs(self) -> str:
        """What the main thread has been doing for longer than the deadline; empty if it is not
        hanging."""
        if self._last is None or time.monotonic() - self._last[0] <= self.deadline:
            return ""
        return self._last[1]
