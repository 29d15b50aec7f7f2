"""The sign of life of a rank's main thread, for its watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """Records when the main thread was last active, and with what.

    deadline: seconds without a `beat` after which it counts as hanging; before the first `beat` it
        never does.
    patient: whether libraries are being loaded, which may block all Python threads for a while.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.patient = True
        self.told: Callable[[], None] = lambda: None  #: called when patience ends
        self._last: tuple[float, str] | None = None

    def beat(self, doing: str) -> None:
        """Record that the main thread is active. `doing` completes a sentence such as "rank 3
        ..."."""
        self._last = (time.monotonic(), doing)

    def settle(self) -> None:
        """End the patience once libraries are loaded, and call `told` at once."""
        self.patient = False
        self.told()

    @property
    def hangs(self) -> str:
        """What the main thread has been doing for longer than the deadline; empty if it is not
        hanging."""
        if self._last is None or time.monotonic() - self._last[0] <= self.deadline:
            return ""
        return self._last[1]
