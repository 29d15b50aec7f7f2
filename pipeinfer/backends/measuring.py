"""When what is measured can be believed.

What loads side by side in one process is measured one at a time: a draft and a stage on the same
cores would make each other look slow, and what is found is kept for the job, of widths for all
later ones. Whether other processes took the cores meanwhile, the kernel says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISTURBED = 0.1  #: seconds that threads wait for a core, per second, beyond which it shows
_PATIENCE = 10.0  #: seconds after which measuring beside another is better than waiting
_turn = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Nothing else of this process is measured meanwhile, unless it takes very long."""
    mine = _turn.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if mine:
            _turn.release()


def waited() -> float:
    """Seconds for which threads of this process were ready to run and had no core, so far. How
    often they lost one would not tell a neighbour from what looks for messages now and then. 0
    where the system does not say."""
    found = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # threads end meanwhile
            found += int(path.read_text(encoding="ascii").split()[1])
    return found / 1e9


def watch() -> Callable[[], float]:
    """Begin to watch: what is returned says for how long threads have waited for cores since then,
    in seconds per second."""
    before, began = waited(), time.perf_counter()
    return lambda: (waited() - before) / max(time.perf_counter() - began, 1e-9)
