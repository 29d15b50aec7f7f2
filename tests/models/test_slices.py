"""Slices of layers: what is in their files, and that llama.cpp computes the same with them."""

from __future__ import annotations

import threading

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pipeinfer.core.types import make_rows
from pipeinfer.errors import ModelError
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.models.shard import ShardSource, extract_shard, shard_bytes
from pipeinfer.models.slice_parts import sizes_of
from pipeinfer.models.slices import slices_of, widths_of
from tests.kit.gguf_files import altered, write_sliceable
from tests.kit.llama import load
from tests.kit.random_model import tiny, write_random_model
from tests.kit.sample import matrix

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")
TARGET = EMBEDDED / "target.gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sliceable(tmp_path_factory.mktemp("slices") / "model.gguf", qtype="Q8_0")


def array(model, name):
    """float32[rows, columns] of a tensor, or float32[n]."""
    tensor = model.tensors[name]
    raw = np.frombuffer(b"".join(model.read_tensor(tensor)), np.uint8)
    kind = GGMLQuantizationType(tensor.type)
    rows = raw.reshape(*tensor.shape[:0:-1], -1)
    return np.asarray(dequantize(rows, kind), np.float32).reshape(tensor.shape[::-1])


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "qtype", "shares"), [
    *matrix(ARCHITECTURES, TYPES, ["equal", "unequal", "most"])])
def test_slices_put_together_are_the_whole(tmp_path, architecture, qtype, shares):
    model = write_sliceable(tmp_path / "m.gguf", architecture=architecture, qtype=qtype)
    cut = slices_of(model, {"equal": [1, 1], "unequal": [3, 1],
                         "most": [1.0] * widths_of(model)[-1]}[shares])
    files = [ModelFile(extract_shard(model, 0, 2, piece=piece, cache_dir=tmp_path))
             for piece in cut]
    head = np.concatenate([array(file, "token_embd.weight") for file in files])
    assert np.array_equal(head, array(model, "output.weight"))
    group, size = model.arch_get("attention.head_count") // 2, sizes_of(model).key
    renamed = {"ffn_norm.weight": "post_attention_norm.weight"} if architecture == "qwen2" else {}
    for tensor in model.tensors.values():
        if tensor.layer is None:
            continue
        kind = tensor.name.split(".", 2)[2]
        name = f"blk.{tensor.layer}.{renamed.get(kind, kind)}"
        parts, whole = [array(file, name) for file in files], array(model, tensor.name)
        assert {file.tensors[name].type for file in files} == {tensor.type}
        if "norm" in kind:
            assert all(np.array_equal(part, whole) for part in parts)
        elif kind.startswith(("attn_k.", "attn_v.")):  # a KV head may be there more than once
            for piece, part in zip(cut, parts, strict=True):
                assert np.array_equal(part, whole[piece.heads[0] * size:piece.heads[1] * size])
        else:
            columns = kind in ("attn_output.weight", "ffn_down.weight")
            assert np.array_equal(np.concatenate(parts, axis=int(columns)), whole)
    for piece, file in zip(cut, files, strict=True):
        low, high = piece.queries or (piece.heads[0] * group, piece.heads[1] * group)
        assert file.arch_get("attention.head_count") == high - low
        assert file.arch_get("attention.head_count_kv") == piece.heads[1] - piece.heads[0]
        assert file.arch_get("feed_forward_length") == piece.ff[1] - piece.ff[0]
        assert file.n_vocab == piece.vocab[1] - piece.vocab[0]
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            assert file.arch_get(key) == size
        assert file.get("pipeinfer.piece") == piece.name
        assert file.get("pipeinfer.vocab_start") == piece.vocab[0]
        assert file.get("pipeinfer.vocab_size") == model.n_vocab
        assert file.arch_get("rope.freq_base") == model.arch_get("rope.freq_base")
        gguf.GGUFReader(file.path)  # others can read it, too


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_the_last_stage_has_the_head_and_none_the_embedding(tmp_path, architecture):
    model = write_sliceable(tmp_path / "m.gguf", architecture=architecture, tied=True)
    piece = slices_of(model, [1, 1])[1]
    first, last = (ModelFile(extract_shard(model, i, i + 1, piece=piece, cache_dir=tmp_path))
                   for i in range(2))
    assert first.n_vocab == 1
    assert not array(first, "token_embd.weight").any()
    low, high = piece.vocab
    assert np.array_equal(array(last, "token_embd.weight"),
                          array(model, "token_embd.weight")[low:high])
    for file, (start, stop) in ((first, (0, 1)), (last, (1, 2))):
        assert sum(t.nbytes for t in file.tensors.values()) == shard_bytes(
            model, start, stop, piece)
    both = sum(shard_bytes(model, 0, 2, part) for part in slices_of(model, [1, 1]))
    assert both < 1.1 * shard_bytes(model, 0, 2)


def test_biases_of_summed_products_are_in_every_slice(tmp_path):
    plain = write_sliceable(tmp_path / "m.gguf").path
    extra = {f"blk.{i}.attn_output.bias": np.full(128, i + 1, np.float32) for i in range(2)}
    extra["output.bias"] = np.arange(320, dtype=np.float32)
    model = ModelFile(altered(plain, tmp_path / "b.gguf", extra))
    for piece in slices_of(model, [2, 1]):
        file = ModelFile(extract_shard(model, 0, 2, piece=piece, cache_dir=tmp_path))
        assert np.array_equal(array(file, "blk.1.attn_output.bias"), np.full(128, 2))
        assert np.array_equal(array(file, "output.bias"), np.arange(*piece.vocab))


@pytest.mark.parametrize("name", ["gpt-oss", "glm4moe", "granitemoe"])
def test_slices_of_every_expert_put_together_are_the_expert(tmp_path, name):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name, qtype="Q8_0")))
    cut = slices_of(model, [2, 1])
    files = [ModelFile(extract_shard(model, 0, 4, piece=piece, cache_dir=tmp_path))
             for piece in cut]
    axes = {"gate_exps.weight": 1, "up_exps.weight": 1, "down_exps.weight": 2,
            "gate_exps.bias": 1, "up_exps.bias": 1, "gate_shexp.weight": 0, "up_shexp.weight": 0,
            "down_shexp.weight": 1}
    for tensor in (one for one in model.tensors if one.startswith("blk.3.ffn_")):
        whole, parts = array(model, tensor), [array(file, tensor) for file in files]
        kind = tensor.removeprefix("blk.3.ffn_")
        if kind in axes:
            assert np.array_equal(np.concatenate(parts, axes[kind]), whole)
        elif kind == "down_exps.bias":  # added before the sum
            assert np.array_equal(parts[0], whole)
            assert not parts[1].any()
        else:  # routers and norms
            assert all(np.array_equal(part, whole) for part in parts)
    for piece, file in zip(cut, files, strict=True):
        low, high = piece.expert_columns
        assert file.arch_get("expert_feed_forward_length") == high - low
        assert file.arch_get("expert_count") == model.arch_get("expert_count")
        gguf.GGUFReader(file.path)


def test_slices_of_a_delta_net_have_the_value_heads_of_their_key_heads(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny("qwen35", qtype="Q8_0")))
    keys, values, size = 2, 4, 64
    files = [ModelFile(extract_shard(model, 0, 12, piece=piece, cache_dir=tmp_path))
             for piece in slices_of(model, [1, 1])]
    for head, file in enumerate(files):
        own = np.arange(head, values, keys)  # value heads of this key head
        rows = (size * own[:, None] + np.arange(size)).ravel()
        key = np.arange(size * head, size * (head + 1))
        mixed = np.concatenate([key, keys * size + key, 2 * keys * size + rows])
        for name, taken in (("attn_qkv.weight", mixed), ("ssm_conv1d.weight", mixed),
                            ("attn_gate.weight", rows), ("ssm_alpha.weight", own),
                            ("ssm_beta.weight", own), ("ssm_dt.bias", own), ("ssm_a", own)):
            assert np.array_equal(array(file, f"blk.0.{name}"),
                                  array(model, f"blk.0.{name}")[taken]), name
        assert np.array_equal(array(file, "blk.0.ssm_out.weight"),
                              array(model, "blk.0.ssm_out.weight")[:, rows])
        assert np.array_equal(array(file, "blk.3.attn_q.weight"),  # with gates
                              array(model, "blk.3.attn_q.weight")[256 * head:256 * (head + 1)])
        assert [file.arch_get(f"ssm.{key}") for key in (
            "group_count", "time_step_rank", "inner_size")] == [1, 2, 128]


def test_the_bytes_of_a_slice_are_those_that_are_sent(model, tmp_path):
    for start, stop in ((0, 1), (1, 2), (0, 2)):
        for piece in slices_of(model, [1, 1, 1]):
            source = ShardSource(model, start, stop, piece)
            path = extract_shard(model, start, stop, piece=piece, cache_dir=tmp_path)
            assert path.name == source.name
            assert path.read_bytes() == b"".join(source.blocks())
            assert path.stat().st_size == source.total


def test_files_of_different_slices_never_collide(model, tmp_path):
    cuts = [piece for n in widths_of(model) for piece in slices_of(model, [1.0] * n)]
    names = {(start, stop, piece): ShardSource(model, start, stop, piece).name
             for start, stop in ((0, 1), (1, 2), (0, 2)) for piece in (*cuts, None)}
    assert len(set(names.values())) == 3 * len({*cuts, None})
    assert ShardSource(model, 0, 2, cuts[0]).name != ShardSource(model, 0, 2).name  # a cut of one


def test_a_source_that_shrinks_is_an_error(model, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.path.read_bytes())
    short = ModelFile(copy)
    piece = slices_of(short, [1, 1])[0]
    _ = short.fingerprint
    copy.write_bytes(copy.read_bytes()[:len(copy.read_bytes()) // 2])
    with pytest.raises(ModelError, match="was truncated while it was being read"):
        extract_shard(short, 0, 2, piece=piece, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- llama.cpp --------------------------------------------------------------------------------


class Meeting:
    """Adds up the parts of slices that compute in threads of this process."""

    def __init__(self, n):
        self.barrier, self.parts, self.places = threading.Barrier(n, timeout=60), [None] * n, []

    def of(self, index):
        meeting = self

        class Sums:
            address = None

            def add(self, part, place):
                meeting.parts[index] = part.copy()
                meeting.barrier.wait()
                total = sum(meeting.parts[1:], start=meeting.parts[0])
                if meeting.barrier.wait() == 0:
                    meeting.places.append(place)
                part[:] = total
                return True

        return Sums()


def decode_together(members, rows, hidden):
    results = [None] * len(members)

    def one(i):
        results[i] = members[i].decode(rows, hidden)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def logits_of_slices(model, cut, stages, cache, steps, **options):
    """Logits of the rows of each step from slices that are summed up."""
    chain = []
    for start, stop in stages:
        members = [load(extract_shard(model, start, stop, piece=piece, cache_dir=cache),
                        (start, stop), model.n_layers, first=False, **options) for piece in cut]
        meeting = Meeting(len(cut))
        for i, member in enumerate(members):
            member.sum_with(meeting.of(i) if len(cut) > 1 else None)
        chain.append(members)
    table, found = EmbeddingTable.open(model), []
    for step in steps:
        hidden = table.rows(step.tokens)
        for members in chain:
            results = decode_together(members, step, hidden)
            hidden = results[0]
            if not members[0].info.last:
                assert all(np.array_equal(hidden, other) for other in results)
        found.append(np.concatenate(results, axis=1))
    for members in chain:
        for member in members:
            member.close()
    return np.concatenate(found)


def logits_of_whole(model, steps, **options):
    whole = load(model.path, **options)
    found = np.concatenate([whole.decode(step) for step in steps])
    whole.close()
    return found


def steps_of(model):
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, 16).tolist()
    rows = [(token, i, (0,), True) for i, token in enumerate(tokens)]
    return [make_rows(rows[:12]), *(make_rows([row]) for row in rows[12:])]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "qtype"), matrix(ARCHITECTURES, TYPES))
def test_one_slice_of_everything_gives_the_bits_of_the_whole(tmp_path, architecture, qtype):
    """Also where the slice is written under another architecture."""
    model = write_sliceable(tmp_path / "m.gguf", architecture=architecture, qtype=qtype)
    steps = steps_of(model)
    got = logits_of_slices(model, slices_of(model, [1.0]), [(0, 1), (1, 2)], tmp_path, steps)
    assert np.array_equal(got, logits_of_whole(model, steps))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "shares"), matrix(
    ARCHITECTURES, [(1.0, 1.0), (3.0, 1.0), (1.0, 1.0, 1.0)]))
def test_sums_of_slices_give_the_whole_but_for_rounding(tmp_path, architecture, shares):
    """In floats throughout, where rounding is not blown up by quantising what it changed."""
    model = write_sliceable(tmp_path / "m.gguf", architecture=architecture)
    steps = steps_of(model)
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    got = logits_of_slices(model, slices_of(model, shares), [(0, 1), (1, 2)], tmp_path, steps,
                           **options)
    whole = logits_of_whole(model, steps, **options)
    assert whole.std() > 0.5
    assert np.abs(got - whole).max() < 2e-5 * whole.std()


@pytest.mark.slow
def test_slices_of_the_embedded_target_choose_its_tokens(tmp_path):
    model = ModelFile(TARGET)
    steps = steps_of(model)
    got = logits_of_slices(model, slices_of(model, [2, 1]), [(0, 5), (5, 12)], tmp_path, steps)
    whole = logits_of_whole(model, steps)
    assert np.abs(got - whole).max() < 0.2 * whole.std()
    assert np.mean(got.argmax(1) == whole.argmax(1)) > 0.9
