"""Copies weights that are mapped from a file into huge pages at the same addresses.

Every token reads all weights once. Mapped from most file systems they lie in pages of 4 KiB, and
the processor has to translate the address of each page again. The copy is invisible to other code:
addresses and bytes stay the same, and llama.cpp unmaps it with the rest. Linux only; elsewhere
nothing happens. Independent of models.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeinfer.errors import BackendError
from pipeinfer.host import free_memory, physical_memory

Mapping = tuple[int, int, int]  #: first address, address after the last, offset in the file

HUGE = 2 << 20  #: bytes of a huge page; a multiple of what other systems have does no harm
_CHUNK = 32 * HUGE  #: bytes that are there twice at a time
_MAPS, _FACTS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_PAGES = Path("/proc/self/pagemap")
GIVEN = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ASKED = ("always", "madvise")
_FIXED, _PRIVATE = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # MAP_FIXED has no name in Python
_MOVE = 1 | 2  # MREMAP_MAYMOVE, MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


def mappings(path: str | os.PathLike[str]) -> list[Mapping]:
    """Return the parts of a file that this process has mapped, in order; none without
    /proc/self/maps.
    """
    name, found = os.path.realpath(path), []
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == name and parts[1].startswith("r-"):
            begin, _, end = parts[0].partition("-")
            found.append((int(begin, 16), int(end, 16), int(parts[2], 16)))
    return found


def huge_already(facts: Path = _FACTS) -> dict[int, int]:
    """Return the bytes of files in huge pages, by the first address of their mapping.

    Some file systems of newer kernels read files into such pages.
    """
    begin, found = 0, {}
    try:
        lines = facts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    for line in lines:
        name, *values = line.split()
        if name.startswith("FilePmdMapped:"):
            found[begin] = 1024 * int(values[0])
        elif "-" in name and not name.endswith(":"):
            begin = int(name.partition("-")[0], 16)
    return found


def setting(file: Path = GIVEN) -> str:
    """Return the system's setting for huge pages: always, madvise or never; "" without one."""
    try:
        words = file.read_text(encoding="ascii").split()
    except OSError:
        return ""
    return next((word[1:-1] for word in words if word.startswith("[")), "")


def into_huge_pages(path: str | os.PathLike[str], beside: Collection[Mapping] = (),
                    reserve: int | None = None, read: Callable[[], object] | None = None,
                    wholes: Collection[tuple[int, int]] = (),
                    progress: Callable[[], object] = lambda: None) -> int:
    """Copy the parts of a file that this process has mapped; return the number of bytes copied.

    The file must not be written to, and its mappings must stay during the call.
    beside: mappings to leave alone. Those of which the system has more than half in huge pages are
        left alone, too
    reserve: bytes of memory to leave free, by default a tenth of all; what does not fit stays as it
        is
    read: reads all that will be read of the mappings; then only that is copied, and the rest, such
        as weights that were repacked into other memory, leaves this process
    wholes: parts of the file, `[begin, end)`, of which `read` reads some if they will be read, such
        as a layer's experts. Then all of such a part is copied
    progress: called before each part of 64 MiB
    Raises BackendError if a part can neither be moved nor mapped again, which leaves a hole.
    """
    if not (wanted := [one for one in mappings(path) if one not in beside]):
        return 0
    if read is not None:
        for begin, end, _ in wanted:
            _libc().madvise(begin, end - begin, mmap.MADV_DONTNEED)  # a later access reads it again
        read()
    if setting() not in _ASKED:
        return 0
    huge = huge_already()
    reserve = physical_memory() // 10 if reserve is None else reserve
    moved = 0
    with open(path, "rb") as file:
        for begin, end, offset in wanted:
            if 2 * huge.get(begin, 0) > end - begin:
                continue  # a copy would cost time and memory, and gain little
            pages = range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE)
            for at, size in _parts(pages if read is None else _read_of(pages, [
                    (begin + one - offset, begin + other - offset) for one, other in wholes])):
                progress()
                if free_memory() < size + reserve \
                        or not _replaced(file.fileno(), at, size, offset + at - begin):
                    return moved
                moved += size
    return moved


def _read_of(pages: range, wholes: Collection[tuple[int, int]]) -> Sequence[int]:
    """Return which huge pages were read; and all of those areas of which any inside was, since
    pages around one that is read may come with it.
    """
    found = {page for page in pages if _is_read(page)}
    for begin, end in wholes:
        own = range(max(pages.start, begin // HUGE * HUGE), min(pages.stop, end), HUGE)
        if len(own) < 4 or not found.isdisjoint(own[1:-1]):
            found.update(own)
    return sorted(found)


def _parts(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield address and size of parts of at most _CHUNK bytes, of huge pages in order."""
    at = size = 0
    for page in (*pages, 0):
        if size and (page != at + size or size >= _CHUNK):
            yield at, size
            at = size = 0
        at, size = at or page, size + HUGE


def _is_read(page: int) -> bool:
    """Return whether this process has any part of a huge page; True where the system does not
    say."""
    small, entry = mmap.PAGESIZE, 8
    try:
        with _PAGES.open("rb", buffering=0) as file:
            file.seek(page // small * entry)
            entries = file.read(HUGE // small * entry)
    except OSError:
        return True
    return not entries or any(byte & 0x80 for byte in entries[7::entry])


def _replaced(file: int, at: int, size: int, offset: int) -> bool:
    """Replace mapped bytes of a file by a copy in huge pages; return whether that succeeded."""
    libc = _libc()
    area = libc.mmap(None, size + HUGE, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
    if area == _FAILED:
        return False
    copy = -(-area // HUGE) * HUGE
    libc.madvise(copy, size, mmap.MADV_HUGEPAGE)
    into = memoryview((ctypes.c_char * size).from_address(copy))
    done = 0
    with contextlib.suppress(OSError):  # the mapping stays; a later access may succeed
        while done < size and (count := os.preadv(file, [into[done:]], offset + done)):
            done += count
    into.release()
    if done < size or libc.mprotect(copy, size, mmap.PROT_READ):
        libc.munmap(area, size + HUGE)
        return False
    there = bool(libc.mremap(copy, size, size, _MOVE, at) == at)
    if not there:
        libc.munmap(copy, size)
        if libc.mmap(at, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, file, offset) != at:
            raise BackendError(f"{size >> 20} MiB of weights could not be moved into huge pages "
                               "nor mapped again: start with --set huge_pages=false")
    for begin, end in ((area, copy), (copy + size, area + size + HUGE)):
        if end > begin:
            libc.munmap(begin, end - begin)
    return there


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("mmap", pointer, (pointer, size, number, number, number, ctypes.c_int64)),
        ("mremap", pointer, (pointer, size, size, number, pointer)),
        ("madvise", number, (pointer, size, number)),
        ("mprotect", number, (pointer, size, number)),
        ("munmap", number, (pointer, size)),
    ):
        function = getattr(libc, name)
        function.restype, function.argtypes = result, arguments
    return libc
