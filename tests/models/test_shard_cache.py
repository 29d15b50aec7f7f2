"""The shard cache: what is damaged is found and made again, and nobody else may write there."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time

import pytest

from pipeinfer.backends import exact_width
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.errors import ModelError
from pipeinfer.models import shard_cache
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from pipeinfer.models.shard_cache import cache_directory, recall, remember
from tests.cluster.test_shard_transfer import Bytes, pattern, transfer
from tests.kit.random_model import RandomSpec, write_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "m.gguf"
    return ModelFile(write_random_model(path, RandomSpec(n_layer=3)))


def flip(path, at):
    """Change one byte in place, and leave the size and the time of the change as they were."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_one_changed_byte_is_found_and_the_shard_made_again(model, tmp_path, caplog):
    path = extract_shard(model, 1, 3, cache_dir=tmp_path)
    good = path.read_bytes()
    flip(path, len(good) - 5)
    with caplog.at_level(logging.WARNING):
        assert extract_shard(model, 1, 3, cache_dir=tmp_path).read_bytes() == good
    assert [r.getMessage().count("is damaged") for r in caplog.records] == [1]
    caplog.clear()
    extract_shard(model, 1, 3, cache_dir=tmp_path)
    assert not caplog.records


def test_what_dead_writers_left_is_deleted_and_what_is_being_written_not(model, tmp_path):
    for name, age in (("dead", 100), ("alive", 100), ("just made", 5), ("forgotten", 90_000)):
        path = tmp_path / f"{name}.gguf.x.tmp"
        path.write_bytes(b"half a shard")
        os.utime(path, times=(0, time.time() - age))
    with (tmp_path / "alive.gguf.x.tmp").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        extract_shard(model, 1, 3, cache_dir=tmp_path)
    left = {path.name.split(".")[0] for path in tmp_path.glob("*.tmp")}
    assert left == {"alive", "just made"}


def test_a_shard_is_locked_while_it_is_written(model, tmp_path):
    locked = []

    def look(done, total):
        for path in tmp_path.glob("*.tmp"):
            with path.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked.append(done)

    extract_shard(model, 1, 3, cache_dir=tmp_path, progress=look)
    assert locked


def test_bytes_are_read_again_only_when_the_file_may_have_changed(model, tmp_path, monkeypatch):
    path = extract_shard(model, 1, 3, cache_dir=tmp_path)
    read = []
    monkeypatch.setattr(shard_cache, "digest_of", lambda p: read.append(p) or DIGEST(p))
    extract_shard(model, 1, 3, cache_dir=tmp_path)
    assert not read
    os.utime(path, (1, 1))  # touched, and still the same bytes
    extract_shard(model, 1, 3, cache_dir=tmp_path)
    extract_shard(model, 1, 3, cache_dir=tmp_path)
    assert read == [path]
    monkeypatch.setenv("PIPEINFER_VERIFY", "always")
    extract_shard(model, 1, 3, cache_dir=tmp_path)
    assert read == [path, path]


DIGEST = shard_cache.digest_of


CURVE = tuple(1.0 + 0.5 * k for k in range(len(CURVE_ROWS)))


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"blake2b": 5}', b"\xff" * 9, b"[" * 100_000,
                                  b'{"blake2b": "00", "file": []}'])
def test_without_a_good_checksum_nothing_is_used(model, tmp_path, note):
    path = extract_shard(model, 1, 3, cache_dir=tmp_path)
    good, before = path.read_bytes(), path.stat().st_ino
    path.with_name(path.name + ".sum").write_bytes(note)
    path.write_bytes(good)
    assert extract_shard(model, 1, 3, cache_dir=tmp_path).read_bytes() == good
    assert path.stat().st_ino != before


def test_a_damaged_shard_is_received_again(tmp_path):
    source = Bytes(pattern(300_000))
    transfer({1: tmp_path}, {1: source})
    path = tmp_path / "shard.gguf"
    flip(path, 123_456)
    outcome, sender = transfer({1: tmp_path}, {1: source})
    assert outcome[1][0].read_bytes() == source.content
    assert sender.sent_bytes == source.total
    outcome, sender = transfer({1: tmp_path}, {1: source})
    assert sender.sent_bytes == 0


def test_files_are_the_users_own(model, tmp_path):
    path = extract_shard(model, 0, 2, cache_dir=tmp_path / "a")
    (tmp_path / "b").mkdir(mode=0o700)
    transfer({1: tmp_path / "b"}, {1: Bytes(b"x" * 999)})
    remember(tmp_path / "a" / "note", [1])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "c"
    directory.mkdir(mode=0o700)
    (directory / "shard.gguf.part").symlink_to(victim)
    outcome, _ = transfer({1: directory}, {1: Bytes(b"x" * 999)}, timeout=2.0)
    assert isinstance(outcome[1], ModelError)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, mode):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ModelError, match=r"others may write.*chmod go-w"):
        cache_directory(directory)
    directory.chmod(0o755)
    assert cache_directory(directory) == directory


def test_a_directory_or_link_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ModelError, match="belongs to user"):
        cache_directory(tmp_path)


def test_a_foreign_link_to_ones_own_directory_is_refused(tmp_path, monkeypatch):
    real, own = os.stat, tmp_path / "own"
    own.mkdir()
    link = tmp_path / "link"
    link.symlink_to(own)
    assert cache_directory(link) == link

    def foreign(path, *args, follow_symlinks=True, **kwargs):
        found = real(path, *args, follow_symlinks=follow_symlinks, **kwargs)
        if follow_symlinks:
            return found
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])

    monkeypatch.setattr(shard_cache.os, "stat", foreign)
    with pytest.raises(ModelError, match="belongs to user"):
        cache_directory(link)


# --- notes ----------------------------------------------------------------------------------------


def test_notes_come_back_and_damaged_ones_do_not(tmp_path):
    path = tmp_path / "note"
    assert recall(path) is None
    value = {"a": [1, 2.5, "é"], "b": None}
    remember(path, value)
    assert recall(path) == value
    good = path.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 4
        path.write_bytes(bad)
        assert recall(path) is None
    for junk in (b"", b"\n\n", b"\xff\n\xfe", b"[" * 100_000 + b"\n" + b"x"):
        path.write_bytes(junk)
        assert recall(path) is None


def test_a_full_disk_loses_a_note_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_cache.os, "replace", full)
    remember(tmp_path / "note", [1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("note", [
    None, [], [4], [16, "4", *CURVE], [4, 99, *CURVE], [16, 4, *CURVE[:-1], float("nan")],
    [16, 4, *CURVE[:-1], -1], {"a": 1}, [16, 4, *CURVE[:-1], 1e300], [16, 4, *CURVE, 1], [0, 0]])
def test_widths_that_cannot_be_are_measured_again(note):
    assert exact_width._note_from(note) is None
    assert exact_width._note_from([16, 4, *CURVE]) == (16, 4, CURVE)
    assert exact_width._note_from([16, 4]) == (16, 4, ())
