"""What loads side by side in one process is measured one at a time.

A draft and a stage on the same cores would make each other look slow, and what is found is kept
for the job, of widths for all later ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
