"""Sending shards to stages without the model file: resuming, damage, several at once."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.cluster import shard_transfer
from pipeinfer.cluster.shard_transfer import (
    CHUNK,
    WINDOW,
    Sender,
    receive,
    source_of,
    stage_shard,
)
from pipeinfer.config import ClusterConfig
from pipeinfer.core.control import PortName, Setup, ShardOffer, ShardWanted
from pipeinfer.core.messages import ShardChunk, ShardEnd, ShardHave, Tag
from pipeinfer.errors import ModelError, PlanError, ProtocolError, TransportTimeout
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import ShardSource, extract_shard
from pipeinfer.models.slices import slices_of
from pipeinfer.transport.inproc import local_ports
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import examples


class Bytes:
    """A source without a model: `blocks` in any sizes."""

    def __init__(self, content: bytes, block: int = 70_001) -> None:
        self.content, self.block = content, block
        self.total, self.name = len(content), "shard.gguf"

    def blocks(self):
        for start in range(0, len(self.content), self.block):
            yield self.content[start : start + self.block]


def pattern(size, seed=0):
    return bytes((i * 2654435761 + seed) >> 16 & 255 for i in range(4093)) * (size // 4093 + 1)


def transfer(directories, sources, *, corrupt=None, timeout=10.0):
    """Receive every source in a thread of its own; (results or errors by node, the sender)."""
    ports = local_ports(len(sources) + 1)
    outcome = {}

    def stage(node):
        try:
            name, total = shard_transfer._ask(ports[node], PortName(node), node, node + 1, timeout)
            outcome[node] = receive(ports[node], directories[node], name, total, timeout,
                                    lambda *_: None)
        except Exception as error:
            outcome[node] = error

    threads = [threading.Thread(target=stage, args=(node,)) for node in sources]
    for thread in threads:
        thread.start()
    sender = Sender(ports[0], lambda start, stop, piece: sources[start])
    attend(sender, ports[0], threads)
    return outcome, sender


def attend(sender, port, threads):
    """What a head does until all of these threads have their shards."""
    while any(thread.is_alive() for thread in threads):
        more = sender.pump()
        for out in sender._outgoing.values():
            assert out.offset <= max(out.answered + WINDOW, out.have)
        envelope = port.take(Tag.RESULT)
        if envelope is not None and isinstance(envelope.message, ShardWanted):
            wanted = envelope.message
            sender.offer(wanted.port.stage, wanted.start, wanted.stop, wanted.piece)
        elif envelope is not None:
            sender.hear(envelope.message)
        elif not more:
            port.wait(0.01)


@examples(25)
@given(have=st.integers(0, 3 * CHUNK + 9), damage=st.booleans(), block=st.integers(1000, 2**21))
def test_any_beginning_is_taken_up(tmp_path_factory, have, damage, block):
    directory = tmp_path_factory.mktemp("d")
    content = pattern(2 * CHUNK + 777)[: 2 * CHUNK + 777]
    part = (content * 2)[:have]
    if damage and part:
        part = bytes([part[0] ^ 1]) + part[1:]
    (directory / "shard.gguf.part").write_bytes(part)
    outcome, sender = transfer({1: directory}, {1: Bytes(content, block)})
    path, arrived = outcome[1]
    assert path.read_bytes() == content
    usable = 0 if damage or have > len(content) else have
    assert arrived == sender.sent_bytes == len(content) - usable
    assert {p.name for p in directory.iterdir()} == {"shard.gguf", "shard.gguf.sum"}


def test_several_stages_at_once_and_once_only(tmp_path):
    sources = {node: Bytes(pattern(9 * CHUNK + node, node)[: 9 * CHUNK + node]) for node in
               (1, 2, 3)}
    directories = {node: tmp_path / str(node) for node in sources}
    for directory in directories.values():
        directory.mkdir()
    outcome, sender = transfer(directories, sources)
    for node, source in sources.items():
        assert outcome[node][0].read_bytes() == source.content
    assert sender.sent_bytes == sum(s.total for s in sources.values())
    outcome, sender = transfer(directories, sources)
    assert sender.sent_bytes == 0
    assert all(result[1] == 0 for result in outcome.values())


def test_a_silent_stage_gets_no_more_than_the_window():
    ports = local_ports(2)
    sender = Sender(ports[0], lambda start, stop, piece: Bytes(pattern(3 * WINDOW)))
    with pytest.raises(ProtocolError, match="belongs to another node"):
        sender.hear(ShardHave(1, 0, shard_transfer.new_hash().digest()))
    sender.offer(1, 0, 1)
    sender.hear(ShardHave(1, 0, shard_transfer.new_hash().digest()))
    for _ in range(100):
        sender.pump()
    assert not sender.pump()
    assert sender.sent_bytes == WINDOW
    sender.hear(ShardHave(1, 2 * CHUNK))
    while sender.pump():
        pass
    assert sender.sent_bytes == WINDOW + 2 * CHUNK


def test_a_stage_that_asks_for_other_layers_gets_no_more_of_the_first():
    ports = local_ports(2)
    sources = [Bytes(pattern(2 * CHUNK)), Bytes(b"other")]
    sender = Sender(ports[0], lambda start, stop, piece: sources[start])
    sender.offer(1, 0, 1)
    sender.hear(ShardHave(1, 0, shard_transfer.new_hash().digest()))
    sender.pump()
    sender.offer(1, 1, 2)
    assert not sender.pump()
    sender.hear(ShardHave(1, 0, shard_transfer.new_hash().digest()))
    while sender.pump():
        pass
    kinds = []
    while (envelope := ports[1].take(Tag.TRANSACTION)) is not None:
        kinds.append(type(envelope.message).__name__)
    assert kinds == ["ShardOffer", "ShardChunk", "ShardOffer", "ShardChunk", "ShardEnd"]


@pytest.mark.parametrize("answer", [
    ShardOffer("../elsewhere", 5),
    ShardOffer("a.gguf", -1),
    ShardWanted(PortName(1), 0, 1),
    ShardEnd(b""),
])
def test_an_answer_that_names_no_shard_is_refused(answer):
    ports = local_ports(2)
    ports[0].send(1, Tag.TRANSACTION, answer)
    with pytest.raises(ProtocolError, match="a request for layers was answered with"):
        shard_transfer._ask(ports[1], PortName(1), 0, 1, 5.0)


def test_a_head_that_answers_no_request_for_a_shard():
    with pytest.raises(TransportTimeout, match="ShardOffer from rank 0"):
        shard_transfer._ask(local_ports(2)[1], PortName(1), 0, 1, 0.2)


def test_old_beginnings_are_forgotten(tmp_path):
    for name, age in (("old.gguf.part", 8), ("new.gguf.part", 1), ("old.gguf", 9)):
        (tmp_path / name).write_bytes(b"x")
        then = time.time() - age * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    outcome, _ = transfer({1: tmp_path}, {1: Bytes(pattern(5000))})
    assert outcome[1][1] == len(pattern(5000))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "new.gguf.part", "old.gguf", "shard.gguf", "shard.gguf.sum"]


@pytest.mark.parametrize("kind", ["end", "bytes"])
def test_damage_on_the_way_is_found(tmp_path, kind):
    ports = local_ports(2)
    content = pattern(1000)[:1000]
    wrong = shard_transfer.new_hash()
    wrong.update(content if kind == "bytes" else b"other")
    ports[0].send(1, Tag.TRANSACTION, ShardChunk(0, content if kind == "end" else b"\0" * 1000))
    ports[0].send(1, Tag.TRANSACTION, ShardEnd(wrong.digest()))
    with pytest.raises(ModelError, match="damaged on the way"):
        receive(ports[1], tmp_path, "s", 1000, 5.0, lambda *_: None)
    assert not (tmp_path / "s").exists()
    assert (tmp_path / "s.part").stat().st_size == 0


def test_a_silent_head_ends_the_transfer(tmp_path):
    ports = local_ports(2)
    start = time.monotonic()
    with pytest.raises(TransportTimeout, match="ShardChunk from rank 0"):
        receive(ports[1], tmp_path, "s", 1000, 0.2, lambda *_: None)
    assert time.monotonic() - start < 20


def test_another_job_and_a_full_disk(tmp_path, monkeypatch):
    ports = local_ports(2)
    with (tmp_path / "s.part").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"another job on .* is receiving this shard"):
            receive(ports[1], tmp_path, "s", 1000, 1.0, lambda *_: None)
    with pytest.raises(ModelError, match="free some space, or set PIPEINFER_CACHE"):
        receive(ports[1], tmp_path, "s", 1 << 60, 1.0, lambda *_: None)
    with pytest.raises(ModelError, match="cannot store a shard"):
        receive(ports[1], tmp_path / "none", "s", 1000, 1.0, lambda *_: None)


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 4), (1, 3), (0, 4)])
def test_the_bytes_are_those_of_a_cut_shard(tmp_path, start, stop):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=4)))
    source = ShardSource(model, start, stop)
    content = b"".join(source.blocks())
    assert len(content) == source.total
    if (start, stop) != (0, 4):
        cut = extract_shard(model, start, stop, cache_dir=tmp_path)
        assert cut.name == source.name
        assert cut.read_bytes() == content
        return
    (tmp_path / "whole.gguf").write_bytes(content)
    again = ModelFile(tmp_path / "whole.gguf")
    assert again.tensors.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        assert b"".join(again.read_tensor(again.tensors[name])) == b"".join(
            model.read_tensor(tensor))


def setup_of(model, start, stop, piece, path=None):
    return Setup(PortName(1), 1, str(path or model.path), model.fingerprint, model.n_layers, start,
                 stop, n_ctx=1, n_seq_max=1, n_batch=1, prompt_id=0, gaps=False, settings={},
                 piece=piece)


def staged(setup, model, timeout=10.0):
    """What `stage_shard` gives a stage whose head has `model`."""
    ports, outcome = local_ports(2), []

    def stage():
        try:
            outcome.append(stage_shard(ClusterConfig(distribute=True, timeout=timeout), ports[1],
                                       setup, lambda *_: None))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    try:
        attend(Sender(ports[0], partial(source_of, model)), ports[0], [thread])
    finally:
        thread.join()
    return outcome[0]


def test_a_host_gets_its_slice_and_the_embedding_only_where_it_is_asked_for(tmp_path, monkeypatch):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=2)))
    elsewhere = tmp_path / "elsewhere.gguf"
    for number, piece in enumerate((*(p.name for p in slices_of(model, [1, 1])), "embedding")):
        received, cut = tmp_path / f"received{number}", tmp_path / f"cut{number}"
        monkeypatch.setenv("PIPEINFER_CACHE", str(received))
        path, n_bytes = staged(setup_of(model, 0, 2, piece, elsewhere), model)
        assert path.stat().st_size == n_bytes < model.nbytes
        assert staged(setup_of(model, 0, 2, piece, elsewhere), model) == (path, 0)
        assert {p.name for p in received.iterdir()} == {path.name, f"{path.name}.sum"}
        monkeypatch.setenv("PIPEINFER_CACHE", str(cut))  # a host with the model cuts its own
        own, n_bytes = staged(setup_of(model, 0, 2, piece), model)
        assert n_bytes == 0
        if piece == "embedding":
            assert own == model.path
            tokens = np.arange(9, dtype=np.int32)
            rows = [EmbeddingTable.open(ModelFile(p)).rows(tokens) for p in (own, path)]
            assert np.array_equal(*rows)
        else:
            assert own.name == path.name
            assert own.read_bytes() == path.read_bytes()


def test_a_piece_that_is_none_is_refused_by_both_sides(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=2)))
    with pytest.raises(ProtocolError, match="is no name of a slice"):
        raise staged(setup_of(model, 0, 2, "h0-x"), model)
    sender = Sender(local_ports(2)[0], partial(source_of, model))
    with pytest.raises(ProtocolError, match="is no name of a slice"):
        sender.offer(1, 0, 2, "../h0-1")
    with pytest.raises(PlanError, match="cannot be cut into the slice"):
        sender.offer(1, 0, 2, "h0-9.f0-32.v0-32")


def test_without_the_file_and_without_permission(tmp_path):
    setup = Setup(PortName(1), 1, str(tmp_path / "none.gguf"), "x", 1, 0, 1, n_ctx=1, n_seq_max=1,
                  n_batch=1, prompt_id=0, gaps=False, settings={})
    with pytest.raises(ModelError, match=r"none.gguf does not exist on .*--distribute"):
        stage_shard(ClusterConfig(), local_ports(2)[1], setup, lambda *_: None)
