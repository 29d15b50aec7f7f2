"""The main thread's sign of life."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """What the main thread does: `beat` whenever it comes around. deadline: seconds after which a
    main thread that has not is taken to hang; none for one that never beats. patient: libraries are
    being loaded, which may hold up every thread of Python's for a while."""

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.patient = True
        self.told: Callable[[], None] = lambda: None  #: called when patience ends
        self._last: tuple[float, str] | None = None

    def beat(self, doing: str) -> None:
        """The main thread is alive; `doing` is what "rank 3" does if it should hang now."""
        self._last = (time.monotonic(), doing)

    def settle(self) -> None:
        """Libraries are loaded: patience ends, and who watches hears so at once."""
        self.patient = False
        self.told()

    @property
    def hangs(self) -> str:
        """What the main thread has been at for too long; empty while all is well."""
        if self._last is None or time.monotonic() - self._last[0] <= self.deadline:
            return ""
        return self._last[1]
