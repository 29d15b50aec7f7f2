"""Conditions for valid time measurements.

What loads at the same time in one process is measured one at a time: a draft and a stage on the
same cores would slow each other down, and the results are used for the whole job, those of widths
also for later jobs. The kernel's statistics show whether other processes used the cores meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISTURBED = 0.1  #: seconds of waiting for a core, per second, that spoil a measurement
_PATIENCE = 10.0  #: seconds after which two measurements at once are better than waiting
_turn = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Exclude other measurements of this process; after _PATIENCE seconds, proceed anyway."""
    mine = _turn.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if mine:
            _turn.release()


def waited() -> float:
    """Return the seconds for which threads of this process were ready to run and had no core, so
    far.

    The number of preemptions would not distinguish a competing process from one that polls for
    messages now and then. 0 where the system does not report the times.
    """
    found = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # threads end meanwhile
            found += int(path.read_text(encoding="ascii").split()[1])
    return found / 1e9


def watch() -> Callable[[], float]:
    """Start a measurement of waiting times.

    Returns a function that returns the time that threads have waited for cores since then, in
    seconds per second.
    """
    before, began = waited(), time.perf_counter()
    return lambda: (waited() - before) / max(time.perf_counter() - began, 1e-9)
