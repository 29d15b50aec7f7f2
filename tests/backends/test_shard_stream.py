"""Shards that are read from the model's file: the bytes and bits of files of their own."""

from __future__ import annotations

import random
from contextlib import closing

import numpy as np
import pytest

from pipeinfer.backends.llamacpp import context
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.errors import ModelError
from pipeinfer.llama import stream
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import ShardSource, extract_shard
from pipeinfer.models.slices import slices_of
from tests.kit.llama import load
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.sample import mostly_full

pytestmark = pytest.mark.skipif(not stream.available(), reason="no streams here")
RANGES = ((0, 2), (2, 4), (4, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "m.gguf"
    return ModelFile(write_random_model(path, RandomSpec(
        n_layer=6, n_embd=256, n_ff=512, qtype="Q4_0")))


def decoded(source, layers, model):
    rows = make_rows([(7, 0, (0,), True), (8, 1, (0,), True), (9, 2, (0,), True)])
    hidden = None if layers[0] == 0 else np.random.default_rng(1).standard_normal(
        (3, model.n_embd)).astype(np.float32)
    with closing(load(source, layers, model.n_layers, n_threads=2)) as backend:
        first = backend.decode(rows, hidden).copy()
        backend.seq_rm(ALL_SEQS, 0, END)
        return first.tobytes(), backend.decode(rows, hidden).tobytes(), backend.info.weight_bytes


@pytest.mark.parametrize(("name", "layers", "slices"), [
    *(("", one, 1) for one in RANGES), ("", RANGES[0], 2), ("gemma4-small", (1, 3), 1)])
def test_bytes_are_those_of_the_file(model, name, layers, slices, tmp_path):
    """Also of a slice, which has columns of some tensors, and of columns of a table."""
    if name:
        model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name, qtype="Q8_0")))
    piece = slices_of(model, [1] * slices)[-1] if slices > 1 else None
    source = ShardSource(model, *layers, piece)
    whole = extract_shard(model, *layers, piece=piece, cache_dir=tmp_path).read_bytes()
    with closing(source.opened()) as opened:
        assert opened.total == len(whole)
        rng = random.Random(3)
        for _ in range(300):
            at, size = rng.randrange(len(whole)), rng.choice((1, 7, 4096, 1 << 20))
            into = memoryview(bytearray(min(size, len(whole) - at)))
            count = opened.read_into(at, into)
            assert 1 <= count <= len(into)
            assert bytes(into[:count]) == whole[at:at + count]


@pytest.mark.parametrize("layers", RANGES)
def test_bits_are_those_of_the_file(model, layers, tmp_path):
    path = extract_shard(model, *layers, cache_dir=tmp_path)
    assert decoded(ShardSource(model, *layers), layers, model) == decoded(path, layers, model)


@pytest.mark.parametrize("name", mostly_full(
    ("gemma3", "gpt-oss", "glm4moe", "qwen3moe", "phi3"), "gpt-oss"))
def test_bits_of_other_architectures(name, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name, qtype="Q8_0")))
    middle = model.n_layers // 2
    for layers in ((0, middle), (middle, model.n_layers)):
        path = extract_shard(model, *layers, cache_dir=tmp_path)
        assert decoded(ShardSource(model, *layers), layers, model) == decoded(path, layers, model)


def read_all(opened):
    for at in range(0, opened.total, 1 << 16):
        opened.read_into(at, memoryview(bytearray(1 << 16)))


def test_a_file_that_becomes_shorter_is_named(model, tmp_path):
    path = tmp_path / "short.gguf"
    path.write_bytes(model.path.read_bytes())
    short = ModelFile(path)
    source = ShardSource(short, 4, 6)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with closing(source.opened()) as opened, pytest.raises(ModelError, match="truncated"):
        read_all(opened)
    with pytest.raises(ModelError):
        load(source, (4, 6))


def test_progress_rises_to_the_whole(model, monkeypatch):
    monkeypatch.setattr(context, "_REPORT", 0.0)
    monkeypatch.setattr(stream, "_BUFFER", 1 << 16)
    seen = []
    load(ShardSource(model, 2, 4), (2, 4), 6,
         progress=lambda phase, share: seen.append((phase, share))).close()
    assert {phase for phase, _ in seen} == {"loading"}
    assert seen == sorted(seen)
    assert len(seen) > 5
    assert seen[-1][1] == 1.0


def test_an_error_of_the_progress_ends_the_loading(model, monkeypatch):
    monkeypatch.setattr(context, "_REPORT", 0.0)

    def progress(phase, share):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load(ShardSource(model, 2, 4), (2, 4), 6, progress=progress)
