"""Caches of their own for hosts of a job, as far as shards and plans go: how many rows are decoded
exactly together is measured once in a session of tests, not once in each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipeinfer.files import write_atomically
from pipeinfer.models.shard_cache import cache_directory


@contextlib.contextmanager
def own_caches(*folders: Path) -> Iterator[None]:
    """`folders` begin with the widths that the session's cache has, and that one gets theirs."""
    shared = cache_directory()
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _hand_on(shared, folder)
    yield
    for folder in folders:
        _hand_on(folder, shared)


def _hand_on(source: Path, target: Path) -> None:
    for path in source.glob("widths-*"):
        if path.suffix or (target / path.name).exists():
            continue
        write_atomically(target / path.name, path.read_text())  # others may look there meanwhile
