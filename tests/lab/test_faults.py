"""Faults on purpose: what can be asked for, and that each wrapper does it once and only there."""

from __future__ import annotations

import errno
import resource
import signal
import time

import numpy as np
import pytest

from pipeinfer.backends.llamacpp.saved_cells import CacheCells, SavedCells, to_bytes
from pipeinfer.core.messages import Cancel, LaneClose, Tag
from pipeinfer.core.types import END, make_rows
from pipeinfer.errors import BackendError, UsageError
from pipeinfer.runtime.kv_store import KvStore, _head, pieces_in
from pipeinfer.transport.base import Layout
from pipeinfer.transport.inproc import local_ports
from pipeinfer_lab.faults.faults import (
    Fault,
    Kind,
    faulty_cache,
    faulty_progress,
    faulty_recovery,
    happened_here,
    parse_faults,
)
from pipeinfer_lab.faults.stored import damage_store
from pipeinfer_lab.faults.wrappers import faulty_backend, faulty_port
from tests.kit.toy import ToyBackend, ToySpec


@pytest.fixture(autouse=True)
def _fresh():
    happened_here.clear()
    yield
    happened_here.clear()


class Dead(Exception):
    """The process would have got this signal."""


def die(number):
    raise Dead(signal.Signals(number).name)


@pytest.fixture
def backend():
    made = ToyBackend.load(ToySpec(), 0, 4, n_ctx=128, n_seq_max=4, n_batch=16)
    yield made
    made.close()


def token(pos, output=True):
    return make_rows([(pos % 50 + 1, pos, (0,), output)])


def chunk(pos, count=4):
    return make_rows([(7, pos + i, (0,), False) for i in range(count)])


# --- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "kill@2:decode=30", "stop@3:prefill=2", "error@1:decode=7:layer=3", "memory@2:decode=5",
    "slow-link@2:ms=50", "lose-cancel@3:every=2", "disk-full@2:load", "corrupt-cache@2:load",
    "kv-corrupt@2:every=2", "kv-full@2:after=3", "kv-slow@2:ms=50",
    "kill@4:recovery=1", "kill@2:load=extracting", "error@12:prefill=1:type=backend",
    "clock@1:decode=4:s=-3600", "slow@2:ms=5", "cut-link@2:peer=3:after=40"])
def test_a_fault_is_written_as_it_is_read(text):
    (fault,) = parse_faults(text)
    assert str(fault) == text
    assert parse_faults(str(fault)) == (fault,)


def test_several_and_what_is_left_out():
    found = parse_faults("kill@2, error@1:decode=7,layer=3 ,disk-full@4")
    assert found == (Fault(Kind.KILL, 2, "decode"), Fault(Kind.ERROR, 1, "decode", 7, layer=3),
                     Fault(Kind.DISK_FULL, 4, "load"))
    assert parse_faults(("kill@2", "stop@3:load")) == (
        Fault(Kind.KILL, 2, "decode"), Fault(Kind.STOP, 3, "load"))
    assert parse_faults("") == parse_faults(()) == ()


@pytest.mark.parametrize(("text", "says"), [
    ("burn@2", "kinds are kill, stop"), ("kill", "KIND@RANK"), ("kill@x", "KIND@RANK"),
    ("kill@-1", "KIND@RANK"), ("kill@2:layer=3", "kill accepts load, prefill"),
    ("kill@2:load=lunch", "extracting, receiving"), ("kill@2:decode=0", "of at least 1"),
    ("kill@2:decode=soon", "of at least 1"), ("kill@2:decode=1:prefill=1", "exclude each other"),
    ("slow-link@2:ms=-3", "milliseconds"), ("slow-link@2:ms=inf", "milliseconds"),
    ("cut-link@2", "two ranks"), ("cut-link@2:peer=2", "two ranks"), ("cut-link@0:peer=2", "two"),
    ("cut-link@2:peer=0", "of at least 1"), ("slow@2:ms=x", "milliseconds"),
    ("error@1:type=fatal", "runtime, backend, memory"), ("disk-full@1:decode=3", "accepts load"),
])
def test_nonsense_is_told_what_is_allowed(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse_faults(text)
    assert text in str(caught.value)


# --- nobody else ------------------------------------------------------------------------------


def test_other_ranks_get_back_what_they_gave(backend, tmp_path):
    every = parse_faults("kill@2,stop@2,error@2,memory@2,slow-link@2,lose-cancel@2,disk-full@2,"
                         "corrupt-cache@2,kill@2:load,slow@2,cut-link@2:peer=3")
    (port,) = local_ports(1)
    shard = tmp_path / "a.gguf"
    shard.write_bytes(bytes(100))

    def report(phase, done, total):
        pass

    assert faulty_port(port, every, 1) is port
    assert faulty_backend(backend, every, 1) is backend
    assert faulty_progress(report, every, 1) is report
    faulty_cache(shard, every, 1)
    assert shard.read_bytes() == bytes(100)
    faulty_recovery(every, 1, die)()


# --- the backend ------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "name"), [("kill@2:decode=3", "SIGKILL"),
                                            ("stop@2:decode=3", "SIGSTOP")])
def test_death_comes_before_the_named_token_and_prompts_do_not_count(backend, text, name, capfd):
    faulty = faulty_backend(backend, parse_faults(text), 2, die)
    faulty.decode(chunk(0))
    faulty.decode(token(4))
    faulty.decode(token(5))
    with pytest.raises(Dead, match=name):
        faulty.decode(token(6))
    assert f"pipeinfer: fault: {text}" in capfd.readouterr().err
    assert faulty.decode(token(6)) is not None  # once: the cells of 6 were not made before


def test_tokens_computed_again_before_a_token_belong_to_no_prompt(backend):
    """As where layers keep a state."""
    faulty = faulty_backend(backend, parse_faults("kill@1:decode=3"), 1, die)
    faulty.decode(chunk(0))
    faulty.decode(token(4))
    faulty.seq_rm(0, 4, END)
    again = make_rows([(5, 4, (0,), False), (6, 5, (0,), True)])
    faulty.decode(again)
    faulty.seq_rm(0, 4, END)
    with pytest.raises(Dead):
        faulty.decode(again)


def test_death_in_a_prompt(backend):
    faulty = faulty_backend(backend, parse_faults("kill@1:prefill=2"), 1, die)
    faulty.decode(chunk(0))
    faulty.decode(token(4))
    with pytest.raises(Dead):
        faulty.decode(chunk(5))


def test_a_survivor_that_wraps_its_new_backend_does_not_fail_again(backend):
    once = parse_faults("error@1:decode=1")
    with pytest.raises(RuntimeError, match="injected: error@1:decode=1"):
        faulty_backend(backend, once, 1).decode(token(0))
    assert faulty_backend(backend, once, 1) is backend
    assert once[0] in happened_here


@pytest.mark.parametrize(("more", "error"), [("", RuntimeError), (":type=backend", BackendError),
                                             (":type=memory", MemoryError)])
def test_an_exception_between_layers_leaves_no_cell(backend, more, error):
    asked = []

    def look():
        asked.append(1)
        return False

    faulty = faulty_backend(backend, parse_faults(f"error@1:decode=2:layer=2{more}"), 1)
    faulty.decode(token(0), None, look)
    asked.clear()
    with pytest.raises(error, match="injected"):
        faulty.decode(token(1), None, look)
    assert len(asked) == 1  # after the first layer; after the second it went wrong
    again = faulty.decode(token(1))
    alone = ToyBackend.load(ToySpec(), 0, 4, n_ctx=8, n_seq_max=2, n_batch=4)
    alone.decode(token(0))
    assert np.array_equal(again, alone.decode(token(1)))


def test_a_layer_that_the_shard_does_not_have_is_its_end(backend):
    faulty = faulty_backend(backend, parse_faults("error@1:layer=99"), 1)
    with pytest.raises(RuntimeError, match="injected"):
        faulty.decode(token(0))


def test_a_run_that_is_stopped_before_the_layer_puts_the_fault_off(backend):
    faulty = faulty_backend(backend, parse_faults("error@1:layer=3"), 1)
    assert faulty.decode(token(0), None, lambda: True) is None
    with pytest.raises(RuntimeError, match="injected"):
        faulty.decode(token(0))


def test_memory_really_ends_and_is_given_back(backend):
    before = resource.getrlimit(resource.RLIMIT_AS)
    faulty = faulty_backend(backend, parse_faults("memory@1:decode=1"), 1)
    with pytest.raises(MemoryError):
        faulty.decode(token(0))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(256 << 20)) == 256 << 20


def test_what_a_backend_has_beyond_the_contract_stays_reachable(backend):
    faulty = faulty_backend(backend, parse_faults("kill@1:decode=99"), 1, die)
    faulty.decode(token(0))
    faulty.seq_cp(0, 1, 0, 1)
    faulty.seq_rm(0, 0, 1)
    assert faulty.info == backend.info
    assert getattr(faulty, "seq_join", None) is None
    backend.seq_join = lambda src, dst: (src, dst)
    assert faulty.seq_join(1, 2) == (1, 2)


# --- loading ----------------------------------------------------------------------------------


def test_the_disk_is_full_while_the_shard_is_written():
    seen = []
    faulty = faulty_progress(lambda *news: seen.append(news), parse_faults("disk-full@1"), 1)
    faulty("loading", 0, 1)
    faulty("extracting", 10, 10)  # the cache had it: nothing is written
    with pytest.raises(OSError, match="No space") as caught:
        faulty("extracting", 5, 10)
    assert caught.value.errno == errno.ENOSPC
    faulty("extracting", 6, 10)
    assert len(seen) == 4


def test_death_at_a_phase_of_loading():
    faulty = faulty_progress(lambda *_: None, parse_faults("kill@1:load=measuring"), 1, die)
    faulty("extracting", 1, 2)
    faulty("loading", 0, 1)
    with pytest.raises(Dead, match="SIGKILL"):
        faulty("measuring", 1, 9)
    first = faulty_progress(lambda *_: None, parse_faults("stop@1:load"), 1, die)
    with pytest.raises(Dead, match="SIGSTOP"):
        first("loading", 0, 1)


def test_one_byte_of_the_cached_shard_changes_and_nothing_tells(tmp_path):
    shard = tmp_path / "a.gguf"
    data = bytes(range(250)) * 8
    shard.write_bytes(data)
    before = shard.stat()
    faulty_cache(tmp_path / "none.gguf", parse_faults("corrupt-cache@1"), 1)
    faulty_cache(shard, parse_faults("corrupt-cache@1"), 1)
    after = shard.read_bytes()
    assert [i for i in range(len(data)) if data[i] != after[i]] == [1500]
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    faulty_cache(shard, parse_faults("corrupt-cache@1"), 1)
    assert shard.read_bytes() == after


def test_death_at_the_second_recovery():
    hear = faulty_recovery(parse_faults("kill@3:recovery=2"), 3, die)
    hear()
    with pytest.raises(Dead):
        hear()


# --- the port ---------------------------------------------------------------------------------


def test_every_second_cancellation_is_lost_and_nothing_else():
    head, stage = local_ports(2)
    lossy = faulty_port(stage, parse_faults("lose-cancel@1:every=2"), 1)
    for run in range(6):
        head.send(1, Tag.CANCEL, Cancel((run,)))
        head.send(1, Tag.TRANSACTION, LaneClose(run))
    got, lanes = [], []
    while (envelope := lossy.take(Tag.CANCEL)) is not None:
        got += envelope.message.run_ids
    while (envelope := lossy.take(Tag.TRANSACTION)) is not None:
        lanes.append(envelope.message.lane)
    assert got == [0, 2, 4]
    assert lanes == list(range(6))
    assert lossy.lost == 3
    assert lossy.received[Tag.TRANSACTION] == 6


def test_the_head_does_not_send_what_it_loses():
    head, stage = local_ports(2)
    lossy = faulty_port(head, parse_faults("lose-cancel@0:every=1"), 0)
    lossy.send(1, Tag.CANCEL, Cancel((1,)))
    lossy.send(1, Tag.TRANSACTION, LaneClose(1))
    assert stage.take(Tag.CANCEL) is None
    assert stage.take(Tag.TRANSACTION) is not None


def test_messages_over_a_slow_link_come_late_in_order_and_wake_the_waiter():
    head, stage = local_ports(2)
    slow = faulty_port(stage, parse_faults("slow-link@1:ms=60"), 1)
    for lane in range(3):
        head.send(1, Tag.TRANSACTION, LaneClose(lane))
    start = time.monotonic()
    assert slow.take(Tag.TRANSACTION) is None
    lanes = []
    while len(lanes) < 3:
        assert time.monotonic() - start < 10
        slow.wait(5.0)
        while (envelope := slow.take(Tag.TRANSACTION)) is not None:
            lanes.append(envelope.message.lane)
    assert time.monotonic() - start >= 0.055
    assert lanes == [0, 1, 2]


def test_a_slow_rank_takes_longer_for_every_run(backend):
    slow = faulty_backend(backend, parse_faults("slow@1:ms=30"), 1)
    start = time.monotonic()
    for pos in range(3):
        assert slow.decode(token(pos)) is not None
    assert time.monotonic() - start >= 0.09


class Assignment:
    """A port whose nodes have ranks, as MPI's have."""

    def __init__(self, inner, layout):
        self._inner, self.layout = inner, layout

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("rank", [4, 7])
def test_over_a_cut_link_nothing_gets_to_the_other_end_and_all_to_others(rank, capfd):
    head, one, two = local_ports(3)
    own, other = (one, two) if rank == 4 else (two, one)
    cut = faulty_port(Assignment(own, Layout((0, 4, 7))), parse_faults("cut-link@4:peer=7:after=2"),
                      rank)
    for lane in range(4):
        cut.send(other.node, Tag.TRANSACTION, LaneClose(lane))
        cut.send(0, Tag.TRANSACTION, LaneClose(lane))
    assert [other.take(Tag.TRANSACTION).message.lane for _ in range(2)] == [0, 1]
    assert other.take(Tag.TRANSACTION) is None
    assert [head.take(Tag.TRANSACTION).message.lane for _ in range(4)] == [0, 1, 2, 3]
    assert capfd.readouterr().err.count("pipeinfer: fault: cut-link@4:peer=7:after=2") == 1


@pytest.fixture
def disk(monkeypatch):
    """What `damage_store` replaces comes back."""
    for name in ("_read", "_put"):
        monkeypatch.setattr(KvStore, name, getattr(KvStore, name))


@pytest.mark.usefixtures("disk")
def test_a_store_with_a_faulty_disk_loses_what_is_damaged_alone(tmp_path, capsys):
    store = KvStore(tmp_path / "kv", 1 << 30, 30)
    faults = parse_faults("kv-corrupt@1:every=2,kv-full@1:after=3")
    damage_store(faults, 2)
    assert KvStore._read.__name__ == "_read"  # of another rank
    damage_store(faults, 1)
    cells = SavedCells([CacheCells([0], b"", (0, 0), 0, {0: [(0, 1, 1, memoryview(b"x"))] * 2})])
    for number in range(3):
        data = to_bytes(cells)
        store.accept(f"{number:032x}.0-1", _head(memoryview(data)) + data)
    with pytest.raises(OSError, match="No space left"):
        store._put(f"{3:032x}.0-1", b"")
    found = [store.read(number.to_bytes(16, "big"), (0, 1)) for number in range(3)]
    assert [one is not None for one in found] == [True, False, True]
    assert len(pieces_in(tmp_path / "kv")) == 2  # the damaged one went
    assert capsys.readouterr().err.count("pipeinfer: fault: ") == 2
    store.close()
