"""Importing without Python's cycle collector, and finding optional C parts.

Objects that modules create are never freed, so the collector searches them repeatedly without
result: a tenth of the time that a rank takes to import, a quarter for torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules in this context: the collector is off, and later ignores the objects made
    in it."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()


def c_part(name: str, folder: Path) -> str | None:
    """Return the path of an optional C part in this folder, None if it was not compiled."""
    spec = PathFinder.find_spec(name, [str(folder)])
    return None if spec is None else spec.origin
