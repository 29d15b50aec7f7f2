"""Cutting shards: what is in them, the cache of files, and models that must not be cut."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest

from pipeinfer.errors import ModelError, PlanError, UnsupportedArchitecture
from pipeinfer.models import shard as shard_module
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import entry
from pipeinfer.models.layers import entries
from pipeinfer.models.shard import check_splittable, extract_shard, shard_bytes, stage_layers
from pipeinfer.models.shard_cache import cache_directory
from tests.kit.gguf_files import split
from tests.kit.random_model import RandomSpec, finish, write_random_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("shard") / "model.gguf"
    return write_random_model(target, RandomSpec(n_layer=5, qtype="Q8_0"))


@pytest.fixture(scope="module")
def model(path):
    return ModelFile(path)


def content(model, name):
    return b"".join(model.read_tensor(model.tensors[name]))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (4, 1, [(0, 4)]),
        (5, 2, [(0, 3), (3, 5)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_layers_are_dealt_out_evenly(layers, stages, expected):
    assert stage_layers(layers, stages) == expected


@pytest.mark.parametrize("stages", [0, 6])
def test_impossible_numbers_of_stages(stages):
    with pytest.raises(PlanError, match="stages"):
        stage_layers(5, stages)


@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (3, 5)])
def test_tensors_are_copied_byte_for_byte(model, tmp_path, layers):
    start, stop = layers
    shard = ModelFile(extract_shard(model, start, stop, cache_dir=tmp_path))
    assert shard.n_layers == stop - start
    assert shard.n_embd == model.n_embd
    for tensor in model.tensors.values():
        if tensor.layer is not None and start <= tensor.layer < stop:
            name = f"blk.{tensor.layer - start}." + tensor.name.split(".", 2)[2]
            assert shard.tensors[name].type == tensor.type
            assert shard.tensors[name].shape == tensor.shape
            assert content(shard, name) == content(model, tensor.name)
    if start == 0:
        assert content(shard, "token_embd.weight") == content(model, "token_embd.weight")
    elif stop == 5:  # the head, in the place from which the loader ties it
        assert content(shard, "token_embd.weight") == content(model, "output.weight")
    else:
        assert content(shard, "token_embd.weight") == bytes(4 * model.n_embd)
    assert "output.weight" not in shard.tensors
    assert shard.get("tokenizer.ggml.model") == "none"
    assert shard.get("tokenizer.ggml.tokens") is None
    assert shard.get("pipeinfer.fingerprint") == model.fingerprint
    assert shard.arch_get("rope.freq_base") == model.arch_get("rope.freq_base")
    gguf.GGUFReader(shard.path)  # others can read it, too
    weights = sum(t.nbytes for t in shard.tensors.values())
    assert shard_bytes(model, start, stop) == weights
    assert weights <= shard.nbytes < weights + 10_000


def test_a_tied_model_has_its_embedding_as_head(tmp_path):
    tied = ModelFile(write_random_model(tmp_path / "t.gguf", RandomSpec(tied=True)))
    last = ModelFile(extract_shard(tied, 2, 4, cache_dir=tmp_path))
    assert content(last, "token_embd.weight") == content(tied, "token_embd.weight")


def test_the_whole_model_is_not_copied(model, tmp_path):
    assert extract_shard(model, 0, 5, cache_dir=tmp_path) == model.path
    assert list(tmp_path.iterdir()) == []


def test_a_shard_is_written_once_and_reports_progress(model, tmp_path):
    calls = []
    path = extract_shard(model, 1, 3, cache_dir=tmp_path, progress=lambda *a: calls.append(a))
    assert calls[-1][0] == calls[-1][1] == path.stat().st_size
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)
    before = path.stat().st_mtime_ns
    assert extract_shard(model, 1, 3, cache_dir=tmp_path) == path
    assert path.stat().st_mtime_ns == before
    assert {p.name for p in tmp_path.iterdir()} == {path.name, f"{path.name}.sum"}


def test_another_model_of_the_same_shape_gets_another_shard(model, tmp_path):
    other = ModelFile(
        write_random_model(tmp_path / "o.gguf", RandomSpec(n_layer=5, qtype="Q8_0", seed=7))
    )
    assert extract_shard(model, 0, 2, cache_dir=tmp_path) != extract_shard(
        other, 0, 2, cache_dir=tmp_path
    )


def test_split_models_give_the_same_shards(model, path, tmp_path):
    parts = ModelFile(split(path, tmp_path)[0])
    ours = ModelFile(extract_shard(parts, 1, 4, cache_dir=tmp_path / "a"))
    theirs = ModelFile(extract_shard(model, 1, 4, cache_dir=tmp_path / "b"))
    assert set(ours.tensors) == set(theirs.tensors)
    assert all(content(ours, name) == content(theirs, name) for name in ours.tensors)
    assert ours.get("split.count") is None


def test_a_full_disk_is_one_error_and_leaves_no_file(model, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_module.os, "fsync", full)
    with pytest.raises(ModelError, match=r"disk is full.*PIPEINFER_CACHE"):
        extract_shard(model, 0, 2, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_shrinks_is_an_error_and_leaves_no_file(path, tmp_path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(path.read_bytes())
    model = ModelFile(copy)
    _ = model.fingerprint
    os.truncate(copy, copy.stat().st_size // 2)
    with pytest.raises(ModelError, match="was truncated while it was being read"):
        extract_shard(model, 3, 5, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_extraction_leaves_no_file(model, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_shard(model, 0, 2, cache_dir=tmp_path, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_three_processes_extract_the_same_shard_at_once(model, tmp_path):
    code = (
        "import sys; from pipeinfer.models.gguf import ModelFile; "
        "from pipeinfer.models.shard import extract_shard; "
        "print(extract_shard(ModelFile(sys.argv[1]), 1, 4, cache_dir=sys.argv[2]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(model.path), str(tmp_path / "c")],
                         stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {p.communicate(timeout=120)[0].strip() for p in processes}
    assert [p.returncode for p in processes] == [0, 0, 0]
    assert len(answers) == 1
    reference = extract_shard(model, 1, 4, cache_dir=tmp_path / "r").read_bytes()
    with open(answers.pop(), "rb") as file:
        assert file.read() == reference
    assert {p.suffix for p in (tmp_path / "c").iterdir()} == {".gguf", ".sum"}
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_where_shards_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path / "one"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    monkeypatch.setenv("HOME", str(tmp_path / "three"))
    assert cache_directory() == tmp_path / "one"
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("PIPEINFER_CACHE")
    assert cache_directory() == tmp_path / "two" / "pipeinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / "three" / ".cache" / "pipeinfer"
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ModelError, match="PIPEINFER_CACHE"):
        cache_directory(blocker / "x")


@pytest.mark.parametrize("layers", [(2, 2), (-1, 2), (0, 6), (3, 1)])
def test_impossible_ranges(model, layers):
    with pytest.raises(PlanError):
        extract_shard(model, *layers)


def header_only(path, architecture, extra=(), tensors=("token_embd.weight", "output_norm.weight")):
    """A file with metadata and one-element tensors: enough to decide whether it may be cut."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(8)
    for key, value in extra:
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name in (*tensors, "blk.0.attn_norm.weight", "blk.1.attn_norm.weight"):
        writer.add_tensor(name, np.zeros((2, 8), np.float32))
    finish(writer)
    return ModelFile(path)


@pytest.mark.parametrize("architecture", ["plamo2", "rwkv7", "made-up"])
def test_unproven_architectures_are_refused_by_name(architecture, tmp_path):
    model = header_only(tmp_path / "m.gguf", architecture)
    with pytest.raises(UnsupportedArchitecture, match=architecture) as caught:
        extract_shard(model, 0, 1, cache_dir=tmp_path)
    assert "llama, llama4, mamba" in str(caught.value)
    assert "-np 1" in str(caught.value)
    assert extract_shard(model, 0, 2) == model.path  # whole is always fine


@pytest.mark.parametrize(("architecture", "why"), [
    ("gemma3n", "four streams"), ("kimi-k3", "inputs of earlier ones"),
    ("qwen4exp", "read tokens")])
def test_what_cannot_be_split_is_refused_with_the_reason(architecture, why, tmp_path):
    model = header_only(tmp_path / "m.gguf", architecture)
    with pytest.raises(UnsupportedArchitecture, match=f"'{architecture}'.*{why}.*-np 1"):
        extract_shard(model, 0, 1, cache_dir=tmp_path)
    assert extract_shard(model, 0, 2) == model.path


@pytest.mark.parametrize("key", [
    "attention.sliding_window", "full_attention_interval", "interleave_moe_layer_step"])
def test_what_places_layers_is_refused_where_its_rule_is_not_known(key, tmp_path):
    model = header_only(tmp_path / "m.gguf", "llama", [(f"llama.{key}", 4)])
    with pytest.raises(UnsupportedArchitecture, match=rf"layers differ by llama\.{key} = 4"):
        check_splittable(model)


def test_numbers_of_each_layer_are_those_of_the_parts(tmp_path):
    heads = "llama.attention.head_count_kv"
    model = header_only(tmp_path / "m.gguf", "llama", [(heads, [2, 4]), (
        "llama.leading_dense_block_count", 1), ("llama.embedding_scale", 2.0)])
    check_splittable(model)
    found = entries(model, 1, 2)
    assert found[heads] == entry(heads, [4])
    assert found["llama.leading_dense_block_count"] == entry("llama.leading_dense_block_count", 0)
    assert found["llama.embedding_scale"] == entry("llama.embedding_scale", 0.0)


def test_traps_that_are_switched_off_are_none(tmp_path):
    check_splittable(header_only(tmp_path / "m.gguf", "llama", [
        ("llama.attention.sliding_window", 0), ("llama.expert_count", 0),
        ("llama.interleave_moe_layer_step", 1)
    ]))


def test_unknown_and_missing_tensors_are_refused(tmp_path):
    odd = ("token_embd.weight", "output_norm.weight", "per_layer_embd.weight")
    with pytest.raises(UnsupportedArchitecture, match="per_layer_embd"):
        check_splittable(header_only(tmp_path / "a.gguf", "llama", tensors=odd))
    extra = ("token_embd.weight", "output_norm.weight", "blk.2.attn_norm.weight")
    with pytest.raises(UnsupportedArchitecture, match=r"blk\.2"):
        check_splittable(header_only(tmp_path / "b.gguf", "llama", tensors=extra))
    with pytest.raises(ModelError, match="output_norm"):
        check_splittable(header_only(tmp_path / "c.gguf", "llama", tensors=("token_embd.weight",)))
