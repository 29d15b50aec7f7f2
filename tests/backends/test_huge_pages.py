"""Mapped weights in huge pages: the same bytes at the same addresses, and no more than fit."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeinfer.backends.llamacpp import huge_pages
from pipeinfer.backends.llamacpp.huge_pages import (
    HUGE,
    huge_already,
    into_huge_pages,
    mappings,
    setting,
)
from pipeinfer.core.types import make_rows
from pipeinfer.errors import BackendError
from tests.kit.llama import load
from tests.kit.random_model import tiny, write_random_model

pytestmark = pytest.mark.skipif(setting() not in ("always", "madvise"),
                                reason="this system gives no huge pages")
EMBEDDED = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded" / "target.gguf"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).bytes(5 * HUGE + 12_345))
    return path


@pytest.fixture
def area(file, monkeypatch):
    """The file as it is mapped, in small pages."""
    monkeypatch.setattr(huge_pages, "huge_already", dict)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as found:
        yield found


def length(found):
    return sum(end - begin for begin, end, _ in found)


@pytest.mark.parametrize("chunk", [HUGE, 2 * HUGE, 32 * HUGE])
def test_bytes_stay_and_the_file_is_mapped_no_more(file, area, monkeypatch, chunk):
    monkeypatch.setattr(huge_pages, "_CHUNK", chunk)
    whole = length(mappings(file))
    moved = into_huge_pages(file, reserve=0)
    assert moved in (4 * HUGE, 5 * HUGE)  # as the mapping begins
    assert length(mappings(file)) == whole - moved
    assert area[:] == file.read_bytes()


def test_other_mappings_of_the_file_are_left_alone(file, area):
    before = mappings(file)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as other:
        assert into_huge_pages(file, before, reserve=0) >= 4 * HUGE
        assert set(before) <= set(mappings(file))
        assert other[:] == area[:] == file.read_bytes()


def test_what_does_not_fit_stays_mapped(file, area, monkeypatch):
    before = mappings(file)
    monkeypatch.setattr(huge_pages, "_CHUNK", HUGE)
    assert into_huge_pages(file, reserve=1 << 62) == 0
    assert mappings(file) == before
    left = iter([1 << 40, 1 << 40, HUGE + 9, 0])
    monkeypatch.setattr(huge_pages, "free_memory", lambda: next(left))
    assert into_huge_pages(file, reserve=10) == 2 * HUGE
    assert area[:] == file.read_bytes()


def test_a_file_that_became_shorter_stays_mapped(file, area):
    before, content = mappings(file), file.read_bytes()
    os.truncate(file, HUGE)
    assert into_huge_pages(file, reserve=0) == 0
    assert mappings(file) == before
    file.write_bytes(content)
    assert area[:] == content


def test_what_lies_in_huge_pages_already_is_left_alone(file, area, monkeypatch):
    before = mappings(file)
    begin, end, _ = before[0]
    for part, moves in ((0.6, False), (0.4, True)):
        monkeypatch.setattr(huge_pages, "huge_already",
                            lambda part=part: {begin: int(part * (end - begin))})
        assert (into_huge_pages(file, reserve=0) > 0) == moves
        assert (mappings(file) == before) != moves
    assert area[:] == file.read_bytes()


def test_how_much_lies_in_huge_pages_is_read_for_each_mapping(tmp_path, file, area):
    told = tmp_path / "smaps"
    told.write_text("""7f00-7f80 r--s 00000000 fe:00 11 /models/a b.gguf
Size:               1024 kB
FilePmdMapped:       512 kB
VmFlags: rd mr mw
ab00-ab80 rw-p 00000000 00:00 0
FilePmdMapped:         0 kB
""")
    assert huge_already(told) == {0x7f00: 512 << 10, 0xab00: 0}
    assert huge_already(tmp_path / "nowhere") == {}
    assert set(huge_already()) >= {begin for begin, _, _ in mappings(file)}


@pytest.mark.parametrize(("page", "wholes", "more"), [
    (1, 0, False), (1, 1, True), (0, 1, False)])
def test_only_what_is_read_is_copied_and_the_rest_leaves_the_process(file, area, page, wholes,
                                                                     more):
    """Small pages around one that is read may come with it, up to 64 KiB."""
    assert area[:] == file.read_bytes()  # all of it is there before
    begin = mappings(file)[0][0]
    first = -begin // HUGE * -HUGE - begin  # of the huge pages that lie in the mapping whole
    at = first + page * HUGE + 5

    def read():
        assert area[at] == file.read_bytes()[at]

    moved = into_huge_pages(file, reserve=0, read=read, wholes=[(0, file.stat().st_size)] * wholes)
    assert (moved >= 4 * HUGE) if more else (moved == HUGE)
    there = [huge_pages._is_read(begin + first + k * HUGE) for k in range(4)]
    assert there == [more or k == page for k in range(4)]
    assert area[:] == file.read_bytes()


def test_where_the_system_does_not_say_what_was_read_all_is_copied(file, area, monkeypatch,
                                                                   tmp_path):
    monkeypatch.setattr(huge_pages, "_PAGES", tmp_path / "nowhere")
    assert into_huge_pages(file, reserve=0, read=lambda: area[0]) in (4 * HUGE, 5 * HUGE)
    assert area[:] == file.read_bytes()


class Refusing:
    """The C library, of which some functions fail."""

    def __init__(self, **fail):
        self.own, self.fail = huge_pages._libc(), fail

    def __getattr__(self, name):
        own, fail = getattr(self.own, name), self.fail.get(name, lambda *args: None)

        def called(*args):
            answer = fail(*args)
            return own(*args) if answer is None else answer
        return called


@pytest.mark.parametrize("fail", [
    {"mmap": lambda *args: huge_pages._FAILED}, {"mprotect": lambda *args: -1},
    {"mremap": lambda *args: huge_pages._FAILED}], ids=lambda fail: next(iter(fail)))
def test_what_cannot_be_moved_stays_mapped(file, area, monkeypatch, fail):
    before, refusing = length(mappings(file)), Refusing(**fail)
    monkeypatch.setattr(huge_pages, "_libc", lambda: refusing)
    assert into_huge_pages(file, reserve=0) == 0
    assert length(mappings(file)) == before
    assert area[:] == file.read_bytes()


def test_a_hole_is_told(file, area, monkeypatch):
    refusing = Refusing(mremap=lambda *args: huge_pages._FAILED,
                        mmap=lambda *args: huge_pages._FAILED if args[0] else None)
    monkeypatch.setattr(huge_pages, "_libc", lambda: refusing)
    with pytest.raises(BackendError, match="--set huge_pages=false"):
        into_huge_pages(file, reserve=0)


@pytest.mark.parametrize(("said", "means"), [
    ("[always] madvise never\n", "always"), ("always [madvise] never\n", "madvise"),
    ("always madvise [never]\n", "never"), ("", ""), (None, "")])
def test_systems_that_give_none_are_not_asked(said, means, tmp_path, file, area, monkeypatch):
    told = tmp_path / "enabled"
    if said is not None:
        told.write_text(said)
    assert setting(told) == means
    monkeypatch.setattr(huge_pages, "setting", lambda: means)
    before = mappings(file)
    moved = into_huge_pages(file, reserve=0)
    assert (moved > 0) == (means in ("always", "madvise"))
    assert (mappings(file) == before) == (moved == 0)


@pytest.mark.skipif(not EMBEDDED.exists(), reason="the embedded models are not built")
def test_weights_of_a_model_are_moved_and_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(huge_pages, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(huge_pages, "huge_already", dict)
    rows = make_rows([(token, position, (0,), True) for position, token in enumerate((5, 9, 3))])
    mapped, logits = [], []
    for options in ({"huge_pages": False}, {}, {"use_mlock": True}):
        backend = load(EMBEDDED, n_ctx=256, n_seq_max=1, **options)
        mapped.append(length(mappings(EMBEDDED)))
        logits.append(backend.decode(rows).copy())
        backend.close()
        assert mappings(EMBEDDED) == []
    assert mapped[1] < 2 * HUGE < mapped[0] == mapped[2]
    assert all((found == logits[0]).all() for found in logits)


@pytest.mark.parametrize(("qtype", "columns"), [("F16", 4096), ("Q4_0", 16384)])  # repacked
def test_weights_of_experts_are_in_memory_once(monkeypatch, tmp_path, qtype, columns):
    path = write_random_model(tmp_path / "m.gguf", tiny(
        "qwen3moe", qtype=qtype, n_layer=2, expert_ff=columns))
    monkeypatch.setattr(huge_pages, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(huge_pages, "huge_already", dict)
    gc.collect()  # what others have freed, and the allocator keeps, would be used without growing
    ctypes.CDLL(None).malloc_trim(0)
    before = psutil.Process().memory_info()
    backend = load(path, n_ctx=256, n_seq_max=1)
    own = [one.rss - one.shared for one in (before, psutil.Process().memory_info())]
    assert 0.8 < (own[1] - own[0]) / path.stat().st_size < 1.5
    backend.close()
