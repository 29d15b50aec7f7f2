"""Importing without Python's cycle collector; finding plug-ins and optional C parts.

Objects that modules create are never freed, so the collector searches them repeatedly without
result: a tenth of the time that a rank takes to import, a quarter for torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

#: where the development tools are
LAB = "it is in the package pipeinfer-lab: in a checkout, pip install ./benchmarks/lab"


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


def plug_ins(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, of this package and of others."""
    return tuple(_installed().select(group=group))


@cache
def _installed() -> Any:
    return entry_points()  # once for all groups, as it reads a file of every installed package


def c_part(name: str, folder: Path) -> str | None:
    """Return the path of an optional C part in this folder, None if it was not compiled."""
    spec = PathFinder.find_spec(name, [str(folder)])
    return None if spec is None else spec.origin
