"""Importing without Python's cycle collector.

What modules make stays, so among it the collector looks for garbage again and again and finds none:
a tenth of the time that a rank takes to import, a quarter for torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Modules are imported here; what they have made is not looked through later, either."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
