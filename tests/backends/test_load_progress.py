"""What llama.cpp reports while it loads a file."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from pipeinfer.backends.llamacpp import context
from pipeinfer.models.locate import EMBEDDED
from tests.kit.llama import load

TARGET = EMBEDDED / "target.gguf"


def test_shares_rise_to_the_whole(monkeypatch):
    monkeypatch.setattr(context, "_REPORT", 0.0)
    seen = []
    load(TARGET, progress=lambda phase, share: phase == "loading" and seen.append(share)).close()
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0, abs=0.05)


def test_reports_are_few():
    seen = []
    load(TARGET, progress=lambda *report: seen.append(report)).close()
    assert 1 <= len(seen) <= 9  # some a second, on a slow disk, too


def test_an_error_ends_the_loading_and_is_raised(monkeypatch):
    """As the begin of another epoch does, or a lost head."""
    monkeypatch.setattr(context, "_REPORT", 0.0)
    seen = []

    def progress(phase, share):
        if phase == "loading":
            seen.append(share)
        if phase == "loading" and share > 0.3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load(TARGET, progress=progress)
    assert max(seen) < 0.9
    load(TARGET).close()


def in_memory(file):
    """Which pages of an open file the system's cache holds. No page is read for it, as by a probe
    that a fast disk answers at once."""
    size = os.fstat(file).st_size
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    with mmap.mmap(file, size, flags=mmap.MAP_PRIVATE) as area:
        first = ctypes.c_char.from_buffer(area)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return [page & 1 for page in pages]


def test_a_file_that_is_not_in_memory_is_read_first(tmp_path, monkeypatch):
    """The system may leave any of the pages that it is asked to drop."""
    path = tmp_path / "file"
    path.write_bytes(bytes(20 << 20))
    monkeypatch.setattr(context, "_is_cached", lambda file, *places: all(
        in_memory(file)[at // mmap.PAGESIZE] for at in places))
    seen = []
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = not any(in_memory(file.fileno()))
        found = context.read_ahead([path, path], lambda *report: seen.append(report))
        if dropped:
            assert 0 < found <= 20 << 20  # the system reads more than it is asked for
            assert [phase for phase, _ in seen] == ["reading"] * len(seen)
            assert 0 < seen[0][1] <= seen[-1][1] <= 0.5
            assert all(in_memory(file.fileno()))
    monkeypatch.undo()
    assert context.read_ahead([path], lambda *report: seen.append(report)) == 0


def test_a_file_that_memory_cannot_hold_is_not_read_ahead(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(context, "free_memory", lambda: 1 << 19)
    monkeypatch.setattr(context, "_is_cached", lambda *_: False)
    assert context.read_ahead([path], lambda *_: None) == 0
    monkeypatch.setattr(context, "free_memory", lambda: 1 << 30)
    assert context.read_ahead([path], lambda *_: None) == 1 << 20
