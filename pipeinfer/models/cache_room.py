"""The size limit of the shard cache, and what is removed first.

Every plan makes shards of its own, so a directory without a limit only grows. After each new shard,
the shards of its model are cut to MOST_COPIES times the model's size, and all shards to
$PIPEINFER_CACHE_SIZE where that is set. The least recently used go first; files that a process has
mapped, or that were used in the last minutes, stay. A removed shard is made again when it is
needed. Independent of layers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from msgspec import Struct

from pipeinfer.errors import ModelError, UsageError
from pipeinfer.files import parse_bytes
from pipeinfer.models.shard_cache import alone, sum_of

FRESH_SECONDS = 600.0  #: time after its use in which a shard may be about to be mapped
MOST_COPIES = 3.0  #: the space for shards of one model, in times the model's size
LIMIT = "PIPEINFER_CACHE_SIZE"


class KeptFile(Struct, frozen=True):
    """A shard in the cache.

    model: beginning of the names of this model's shards
    size: bytes, its checksum's included
    used: time of the last use, in seconds since the epoch
    """

    path: Path
    model: str
    size: int
    used: float

    def remove(self) -> bool:
        """Delete it and its checksum; return whether this call did, and no other process."""
        try:
            self.path.unlink()
        except OSError:
            return False  # another process was quicker
        with contextlib.suppress(OSError):
            sum_of(self.path).unlink()
        return True


def kept(directory: Path) -> list[KeptFile]:
    """Return the shards in the cache, the least recently used first."""
    found = []
    for path in directory.glob("*.gguf"):
        with contextlib.suppress(OSError):  # another process has removed it
            size = path.stat().st_size
            with contextlib.suppress(OSError):
                size += sum_of(path).stat().st_size
            found.append(KeptFile(path, model_of(path.name), size, used(path)))
    return sorted(found, key=lambda one: one.used)


def used(path: Path) -> float:
    """Return the time of a shard's last use. Raises OSError if it does not exist."""
    when = path.stat().st_mtime
    with contextlib.suppress(OSError):
        when = max(when, sum_of(path).stat().st_mtime)
    return when


def model_of(name: str) -> str:
    """Return the part of a shard's name that all shards of its model share."""
    return name.partition("-")[0]


def make_room(path: Path, model_bytes: int) -> list[Path]:
    """Bring the cache below its limits after the shard `path` was added; return what was removed.

    model_bytes: size of the whole model; 0: unknown, then only $PIPEINFER_CACHE_SIZE counts
    Raises ModelError for a limit that cannot be parsed.
    """
    everything = kept(path.parent)
    own = [one for one in everything if one.model == model_of(path.name)]
    bounds = [(own, int(MOST_COPIES * model_bytes))] if model_bytes else []
    if (most := limit()) is not None:
        bounds.append((everything, most))
    removed: list[Path] = []
    for files, bound in bounds:
        left = [one for one in files if one.path not in removed]
        removed += [one.path for one in shrink(left, bound, (path,), FRESH_SECONDS)]
    return removed


def shrink(files: Iterable[KeptFile], bound: int, keep: Collection[Path] = (), fresh: float = 0.0
           ) -> list[KeptFile]:
    """Remove files, the first ones first, until they take at most `bound` bytes.

    keep: files that stay
    fresh: files used less than so many seconds ago stay, too
    Files that a process has mapped stay. Returns what was removed.
    """
    files = list(files)
    size = sum(one.size for one in files)
    if size <= bound:
        return []
    held, removed = mapped(), []
    for one in files:
        if size <= bound:
            break
        if one.path in keep or in_use(one.path, held):
            continue
        with alone(one.path.parent):  # so that no process starts to use it meanwhile
            gone = _unused(one.path, fresh) and one.remove()
        if gone:
            size -= one.size
            removed.append(one)
    return removed


def _unused(path: Path, seconds: float) -> bool:
    try:
        return used(path) <= time.time() - seconds
    except OSError:
        return False


def limit() -> int | None:
    """Return $PIPEINFER_CACHE_SIZE in bytes; None without it. Raises ModelError."""
    text = os.environ.get(LIMIT, "")
    if not text:
        return None
    try:
        return parse_bytes(text, LIMIT)
    except UsageError as error:
        raise ModelError(str(error)) from None


def mapped() -> set[tuple[str, int]]:
    """Return name and inode of every GGUF file that a process of this user has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError), maps.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if ".gguf" in line:
                    parts = line.split(maxsplit=5)
                    found.add((os.path.basename(parts[5].strip()), int(parts[4])))
    return found


def in_use(path: Path, held: Collection[tuple[str, int]]) -> bool:
    """Return whether the file is among those `held`, which `mapped` returned."""
    with contextlib.suppress(OSError):
        return (path.name, path.stat().st_ino) in held
    return False
