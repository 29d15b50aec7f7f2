"""Importing without Python's cycle collector, and finding optional C parts.

What modules make stays, so among it the collector looks for garbage again and again and finds none:
a tenth of the time that a rank takes to import, a quarter for torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path


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


def c_part(name: str, folder: Path) -> str | None:
    """The file of an optional C part in this folder, None where it was not compiled."""
    spec = PathFinder.find_spec(name, [str(folder)])
    return None if spec is None else spec.origin
