"""The store of cells on a host's disk: what is short, altered, foreign or too much is a miss."""

from __future__ import annotations

import errno
import os
import time

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.backends.llamacpp.saved_cells import CacheCells, CellLayout, SavedCells
from pipeinfer.core.control import Peers
from pipeinfer.core.messages import Piece
from pipeinfer.errors import BackendError
from pipeinfer.runtime import kv_store
from pipeinfer.runtime.kv_peers import StorePeers
from pipeinfer.runtime.kv_store import KvStore, StagePieces
from pipeinfer.scheduler.stored import entry, held_by

KEY, OTHER = bytes(range(16)), bytes(range(1, 17))
ROWS = 64


class Saver:
    """A part of one cache per layer whose rows are numbers of the layer and the position."""

    def __init__(self, start, stop):
        self.layout = CellLayout((start, stop), (tuple(range(start, stop)),))
        self.by_range = True
        self.taken: dict[tuple[int, int], bytes] = {}

    def save(self, seq_id, p0, p1):
        layers = {layer: [(0, ROWS, 1, memoryview(bytes([layer]) * ROWS * (p1 - p0)))] * 2
                  for layer in range(*self.layout.layers)}
        cells = CacheCells(list(range(p0, p1)), b"", (0, 0), 0, layers)
        return np.frombuffer(self.layout.build(SavedCells([cells])), np.uint8)

    def put(self, seq_id, p0, p1, blob):
        self.taken[p0, p1] = bytes(blob)
        return True


@pytest.fixture
def store(tmp_path):
    made = KvStore(tmp_path / "kv", 1 << 30, 30)
    yield made
    made.close()


def pieces(store, *layers):
    return StagePieces(store, [Saver(*one) for one in layers])


def kept(store, key=KEY, layers=((0, 4),), start=0):
    stage = pieces(store, *layers)
    stage.save([Piece(key, 0, start, start + 8)])
    assert store.flush(20)
    return stage


def only_file(tmp_path):
    path, = (tmp_path / "kv").glob("??/*")
    return path


def test_a_piece_comes_back_to_the_same_stage_and_to_other_splits(store, tmp_path):
    kept(store)
    kept(store, OTHER, ((0, 2),))
    kept(store, OTHER, ((2, 3), (3, 4)))  # one stage of two parts
    assert sorted(path.name.partition(".")[2] for path in (tmp_path / "kv").glob("??/*")) == [
        "0-2", "0-4", "2-4"]
    for layers in (((0, 4),), ((0, 1), (1, 4)), ((1, 3),)):
        stage = pieces(store, *layers)
        assert held_by([store.listing()], 4) == {KEY, OTHER}
        assert stage.load([Piece(KEY, 3, 0, 8), Piece(OTHER, 3, 0, 8)]) == 2
        for saver in stage._savers:
            assert saver.taken[0, 8] == saver.save(0, 0, 8).tobytes()


def test_a_stage_without_the_file_or_with_other_layers_misses(store):
    kept(store, layers=((1, 3),))
    assert held_by([store.listing()], 3) == set()
    stage = pieces(store, (1, 3))
    assert stage.load([Piece(KEY, 0, 0, 8), Piece(OTHER, 0, 8, 16), Piece(KEY, 0, 16, 24)]) == 1
    assert (store.counts.read, store.counts.missed) == (1, 1)


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[:20], lambda data: b"", lambda data: data + b"x",
    lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], lambda data: b"GGUF" + data[4:]])
def test_a_damaged_file_is_a_miss_and_goes(store, tmp_path, damage):
    stage = kept(store)
    path = only_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert stage.load([Piece(KEY, 0, 0, 8)]) == 0
    assert not path.exists()
    assert kept(store).load([Piece(KEY, 0, 0, 8)]) == 1


def test_files_and_folder_are_the_owners_alone(store, tmp_path):
    kept(store)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600
    os.chmod(tmp_path / "kv", 0o750)
    with pytest.raises(BackendError, match="chmod 700"):
        KvStore(tmp_path / "kv", 1 << 30, 30)


def test_what_another_split_has_written_is_not_written_again(store, tmp_path):
    kept(store, layers=((0, 2),))
    kept(store, layers=((2, 4),))
    kept(store)
    assert store.counts.written == 2


def test_the_oldest_files_go_where_the_limit_is_reached(tmp_path):
    size = 4 * 2 * ROWS * 8
    store = KvStore(tmp_path / "kv", 12 * size, 30)
    keys = [bytes([k]) * 16 for k in range(16)]
    for age, key in enumerate(keys):
        kept(store, key)
        for path in (tmp_path / "kv").glob(f"??/{key.hex()}*"):
            os.utime(path, (time.time() - 1000 + age,) * 2)
    assert pieces(store, (0, 4)).load([Piece(keys[12], 0, 0, 8)]) == 1
    kept(store, OTHER)
    held = held_by([store.listing()], 4)
    there = [key for key in keys if key in held]
    assert 4 < len(there) < 12
    assert there == keys[-len(there):]
    assert store.counts.held_bytes <= 12 * size
    store.close()


def test_what_was_not_used_for_long_and_what_a_power_cut_left_goes_at_the_start(tmp_path):
    store = KvStore(tmp_path / "kv", 1 << 30, 30)
    kept(store)
    store.close()
    path = only_file(tmp_path)
    left = path.parent / ".partial-abc"
    left.write_bytes(b"half")
    recent = path.parent / ".partial-def"
    recent.write_bytes(b"another rank writes it")
    os.utime(left, (time.time() - 3600,) * 2)
    os.utime(path, (time.time() - 31 * 86400,) * 2)
    KvStore(tmp_path / "kv", 1 << 30, 30).close()
    assert list((tmp_path / "kv").glob("??/.*")) == [recent]
    assert not path.exists()


def test_a_full_disk_ends_the_writing_with_one_note(store, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        kept(store)
        kept(store, OTHER)
    assert store.counts.dropped == 2
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert not list((tmp_path / "kv").glob("??/*"))
    kept(store)
    assert store.counts.written == 1


def test_the_disk_keeps_some_room_for_others(store, capsys, monkeypatch):
    monkeypatch.setattr(kv_store, "_FREE", 1 << 60)
    kept(store)
    assert (store.counts.written, store.counts.dropped) == (0, 1)
    assert "less than 1 GiB is free" in capsys.readouterr().err


def test_a_slow_disk_costs_pieces_and_no_time(store, monkeypatch):
    monkeypatch.setattr(kv_store, "_WAITING", 0)
    kept(store)
    assert (store.counts.written, store.counts.dropped) == (0, 1)


def test_hosts_hold_a_piece_together():
    listing = [entry(KEY, 0, 2) + entry(OTHER, 0, 2), entry(KEY, 2, 5) + entry(OTHER, 3, 5)]
    assert held_by(listing, 5) == {KEY}
    assert held_by([b"", entry(KEY, 0, 5)[:-1]], 5) == set()


@pytest.fixture
def hosts(tmp_path):
    """Three hosts with a stage each; two know the job's key, and the third joins later."""
    stores = [KvStore(tmp_path / f"host{k}", 1 << 30, 30) for k in range(3)]
    peers = [StorePeers(one) for one in stores]
    everyone = Peers("ab" * 32, tuple(
        (f"127.0.0.1:{one.server.server_port}",) for one in peers))
    for number, one in enumerate(peers, 1):
        one.meet(everyone, number)
    yield stores, peers, everyone
    for one in (*peers, *stores):
        one.close()


def test_a_file_is_copied_to_the_next_stage_and_fetched_where_it_is_lacking(hosts):
    stores, peers, _ = hosts
    kept(stores[0], layers=((0, 2),))
    kept(stores[2], layers=((2, 4),))
    assert [held_by([one.listing()], 4) for one in stores] == [{KEY}, set(), set()]
    assert [one.covers(KEY, (0, 2)) for one in stores] == [True, True, False]
    peers[1].close()  # that host is gone, and another one has all layers now
    stage = pieces(stores[2], (0, 4))
    assert stage.load([Piece(KEY, 0, 0, 8)]) == 1
    assert stage._savers[0].taken[0, 8] == stage._savers[0].save(0, 0, 8).tobytes()
    assert stage.load([Piece(OTHER, 0, 8, 16)]) == 0


def test_who_lacks_the_key_gets_and_leaves_nothing(hosts, capsys):
    stores, peers, everyone = hosts
    peers[2].meet(structs.replace(everyone, key="cd" * 32), 3)
    kept(stores[1])
    assert pieces(stores[2], (0, 4)).load([Piece(KEY, 0, 0, 8)]) == 0
    kept(stores[2], OTHER)
    assert not stores[0].covers(OTHER, (0, 4))
    assert "gives and takes no prompts" in capsys.readouterr().err


def test_a_damaged_copy_and_a_name_of_another_folder_are_dropped(hosts, tmp_path):
    stores, peers, _ = hosts
    kept(stores[1])
    (name, data), = stores[1].files_of(KEY, (0, 4))
    peers[0].copy(name, data[:-1])
    peers[0].copy(f"../../{name}", data)
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob(name)}
    assert found == {"host1", "host2"}  # the latter is its buddy
