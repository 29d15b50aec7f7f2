"""Where models may be cut into slices, what a slice is called, and what cannot be cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.errors import ModelError, PlanError, ProtocolError, UnsupportedArchitecture
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.models.shard import ShardSource, extract_shard
from pipeinfer.models.slice_parts import Slice, check_fits, sizes_of
from pipeinfer.models.slices import slices_of, widths_of
from tests.kit.gguf_files import altered, write_sliceable
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.sample import examples

TARGET = EMBEDDED / "target.gguf"

# --- names ------------------------------------------------------------------------------------

ranges = st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)).map(lambda p: (p[0], p[0] + p[1]))


some = st.none() | ranges


@given(st.builds(Slice, ranges, ranges, ranges, some, some, some, some, some))
def test_a_name_tells_the_slice(piece):
    assert Slice.parse(piece.name) == piece
    assert "/" not in piece.name
    assert not set(piece.name) - set("0123456789-.hqdfesvx")


def test_how_a_name_looks():
    assert Slice((0, 2), (0, 768), (0, 24576)).name == "h0-2.f0-768.v0-24576"
    assert Slice((1, 2), (0, 8), (0, 9), (6, 8)).name == "h1-2q6-8.f0-8.v0-9"


@pytest.mark.parametrize("text", [
    "", "x", "h0-2.f0-768", "h2-2.f0-768.v0-9", "h2-1.f0-768.v0-9", "h00-2.f0-768.v0-9",
    "h0-2.f0-768.v0-9 ", "h0-2.f0-768.v0-9\n", "h0-2q3-3.f0-768.v0-9", "h0-2.f-1-768.v0-9",
    "h0-2.f0-768.v0-9999999999", "../h0-2.f0-768.v0-9", "h0-2.f0-768.v0-\u0669",
])
def test_other_texts_name_none(text):
    with pytest.raises(ProtocolError, match="is no name of a slice"):
        Slice.parse(text)


# --- cuts -------------------------------------------------------------------------------------


@examples(60)
@given(data=st.data())
def test_a_cut_covers_the_model_at_blocks_and_near_its_shares(tmp_path_factory, data):
    qtype = data.draw(st.sampled_from(("F32", "F16", "Q8_0", "Q4_K_M")))
    block = {"Q8_0": 32, "Q4_K_M": 256}.get(qtype, 1)
    kv, group = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.integers(1, 4))
    head = data.draw(st.sampled_from((16, 32, 64)))
    width = kv * group * head
    unit = np.lcm(block, width)
    spec = RandomSpec(
        n_layer=1, n_head=kv * group * int(unit // width), n_head_kv=kv * int(unit // width),
        n_embd=int(unit), n_ff=data.draw(st.integers(1, 5)) * max(block, 24), qtype=qtype,
        n_vocab=data.draw(st.integers(300, 400)))
    model = ModelFile(write_random_model(tmp_path_factory.mktemp("c") / "m.gguf", spec))
    sizes, widths = sizes_of(model), widths_of(model)
    assert widths == tuple(range(1, len(widths) + 1))
    n = data.draw(st.integers(1, min(len(widths), 12)))
    shares = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    cut = slices_of(model, shares)
    assert cut == slices_of(model, [7.5 * share for share in shares])  # any unit
    assert len(cut) == n
    for piece in cut:
        check_fits(model, piece)
        assert (piece.queries is None) or piece.heads[1] - piece.heads[0] == 1
    queries = [sizes.queries(piece) for piece in cut]
    for ranges_, size in ((queries, sizes.heads), ([p.ff for p in cut], sizes.ff),
                          ([p.vocab for p in cut], sizes.vocab)):
        assert ranges_[0][0] == 0
        assert ranges_[-1][1] == size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges_))
    if sizes.vocab // 32 >= n:
        assert all(p.vocab[0] % 32 == 0 for p in cut)
    step = int(np.lcm(block, 32))
    if sizes.ff // step >= n:
        assert all(low % step == 0 for low, _ in (p.ff for p in cut))
        ideal = [sizes.ff * share / sum(shares) for share in shares]
        if min(ideal) >= step:
            assert all(abs(p.ff[1] - p.ff[0] - x) <= 2 * step
                       for p, x in zip(cut, ideal, strict=True))


def test_unequal_shares():
    model = ModelFile(TARGET)  # 2 KV heads, 768 FFN columns, 4096 words
    assert [p.name for p in slices_of(model, [1.0])] == ["h0-2.f0-768.v0-4096"]
    assert [p.name for p in slices_of(model, [1, 1])] == [
        "h0-1.f0-384.v0-2048", "h1-2.f384-768.v2048-4096"]
    assert [p.name for p in slices_of(model, [3, 1])] == [
        "h0-1.f0-576.v0-3072", "h1-2.f576-768.v3072-4096"]
    assert [p.name for p in slices_of(model, [1, 100])] == [
        "h0-1.f0-32.v0-32", "h1-2.f32-768.v32-4096"]


def test_kv_heads_are_repeated_where_there_are_more_slices():
    model = ModelFile(TARGET)  # 2 query heads for each of 2 KV heads
    assert widths_of(model) == (1, 2, 3, 4)
    assert [(p.heads, p.queries) for p in slices_of(model, [1, 1, 1, 1])] == [
        ((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 3)), ((1, 2), (3, 4))]
    assert [(p.heads, p.queries) for p in slices_of(model, [1, 1, 2])] == [
        ((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), None)]


def test_columns_are_cut_where_every_layer_can_be(tmp_path):
    """Types may differ from layer to layer, as in Q4_K_M."""
    plain = write_sliceable(tmp_path / "m.gguf", n_head=8, n_head_kv=8).path
    assert len(widths_of(ModelFile(plain))) == 8  # 16 columns each
    kind = GGMLQuantizationType.Q8_0
    blocks = quantize(np.ones((128, 128), np.float32), kind)
    model = ModelFile(altered(plain, tmp_path / "b.gguf",
                              {"blk.1.attn_output.weight": (blocks, kind)}))
    assert GGML_QUANT_SIZES[kind][0] == 32
    assert widths_of(model) == (1, 2, 3, 4)
    assert [p.heads for p in slices_of(model, [1] * 3)] == [(0, 4), (4, 6), (6, 8)]


# --- refusals ---------------------------------------------------------------------------------


def test_too_many_slices(tmp_path):
    with pytest.raises(PlanError, match=r"target.gguf cannot be cut into 5 slices: possible are "
                       r"1, 2, 3, 4 slices \(2 KV heads of 2 query heads of 64 elements in blocks "
                       r"of 32 columns\); lower --slices and use more stages$"):
        slices_of(ModelFile(TARGET), [1] * 5)
    k_quants = write_sliceable(tmp_path / "k.gguf", qtype="Q4_K_M", n_embd=256, n_head=4)
    with pytest.raises(PlanError, match=r"only 1 is possible .* or a file of the model in Q8_0"):
        slices_of(k_quants, [1, 1])
    narrow = write_sliceable(tmp_path / "n.gguf", qtype="Q8_0", n_ff=64)
    with pytest.raises(PlanError, match=r"1, 2 slices \(64 FFN columns in blocks of 32\)"):
        slices_of(narrow, [1, 1, 1])
    with pytest.raises(PlanError, match=r"possible are 1, 2, 3, ... 16 slices"):
        slices_of(write_sliceable(tmp_path / "w.gguf", n_head=16, n_embd=256), [1] * 17)


def test_experts_limit_the_slices(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny("glm4moe", qtype="Q8_0")))
    assert [piece.name for piece in slices_of(model, [3, 1])] == [
        "h0-1.f0-96.e0-32.v0-256", "h1-2.f96-128.e32-64.v256-320"]
    with pytest.raises(PlanError, match=r"1, 2 slices \(64 columns of each expert in blocks of 32"):
        slices_of(model, [1, 1, 1])


@pytest.mark.parametrize(("columns", "slices", "expected"), [
    (512, [1] * 4, ["f0-256.x0-2", "f256-512.x0-2", "f0-256.x2-4", "f256-512.x2-4"]),
    (768, [1] * 4, ["f0-512.x0-2", "f512-768.x0-2", "f0-512.x2-4", "f512-768.x2-4"]),
    (768, [1] * 3, ["f0-256", "f256-512", "f512-768"]),
    (256, [3, 1], ["f0-256.x0-2", "f0-256.x2-4"]),  # a row draws two, so each has two
])
def test_with_more_slices_than_blocks_the_experts_are_divided(tmp_path, columns, slices, expected):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(
        "qwen3moe", qtype="Q4_K_M", n_layer=1, n_embd=1024, n_head=16, n_head_kv=4,
        expert_ff=columns)))
    assert widths_of(model) == {512: (1, 2, 4), 768: (1, 2, 3, 4), 256: (1, 2)}[columns]
    cut = slices_of(model, slices)
    assert [piece.name.partition(".")[2].rpartition(".v")[0] for piece in cut] == expected
    for piece in cut:
        check_fits(model, piece)
    odd = structs.replace(cut[-1], among=(3, 4))
    with pytest.raises(PlanError, match="its experts cannot be divided so"):
        check_fits(model, odd)


def test_the_slices_of_the_first_experts_have_the_shared_one(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(
        "granitemoe", qtype="Q8_0", n_ff=64, n_head=4, n_head_kv=4)))
    cut = slices_of(model, [1] * 4)
    assert [(piece.among, piece.shared) for piece in cut] == [
        ((0, 2), (0, 64)), ((0, 2), (64, 96)), ((2, 4), None), ((2, 4), None)]
    for piece in cut:
        check_fits(model, piece)
    file = ModelFile(extract_shard(model, 0, 4, piece=cut[3], cache_dir=tmp_path))
    assert file.arch_get("expert_shared_feed_forward_length") == 32
    assert not any(b"".join(file.read_tensor(file.tensors["blk.0.ffn_down_shexp.weight"])))


def test_groups_of_heads_of_a_scan_limit_the_slices(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny("nemotron_h")))
    with pytest.raises(PlanError, match=r"only 1 is possible \(1 key heads or groups of heads of "):
        slices_of(model, [1, 1])
    model = ModelFile(write_random_model(tmp_path / "g.gguf", tiny("nemotron_h-groups")))
    file = ModelFile(extract_shard(model, 0, 7, piece=slices_of(model, [1, 1])[1],
                                   cache_dir=tmp_path))
    assert file.arch_get("attention.head_count_kv") == [0, 0, 1, 0, 0, 1, 0]
    assert file.arch_get("feed_forward_length") == [0, 64, 0, 0, 64, 0, 0]
    assert file.arch_get("ssm.group_count") == 2


@pytest.mark.parametrize("shares", [[], [1, 0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_impossible_shares(shares):
    with pytest.raises(PlanError, match="give each slice a number above 0"):
        slices_of(ModelFile(TARGET), shares)


def test_models_that_cannot_be_sliced(tmp_path):
    piece = Slice((0, 1), (0, 32), (0, 32))
    for name, said, refused in (
        ("width", "wants its heads to add up to its width", ModelFile(write_random_model(
            tmp_path / "e.gguf", tiny("qwen2moe")))),
        ("gaps", "rewritten for gaps", GapModel(ModelFile(TARGET))),
        ("unknown", "'blk.0.attn_odd.weight', and it is not known how to slice",
         ModelFile(altered(TARGET, tmp_path / "u.gguf",
                           {"blk.0.attn_odd.weight": np.zeros((256, 256), np.float32)}))),
        ("bias", "has a bias in its output head", ModelFile(altered(
            write_sliceable(tmp_path / "q.gguf", architecture="qwen2").path, tmp_path / "o.gguf",
            {"output.bias": np.zeros(320, np.float32)}))),
    ):
        for attempt in (lambda m=refused: slices_of(m, [1, 1]), lambda m=refused: widths_of(m),
                        lambda m=refused: extract_shard(m, 0, 1, piece=piece, cache_dir=tmp_path)):
            with pytest.raises(UnsupportedArchitecture, match=said) as caught:
                attempt()
            assert "run it as a plain pipeline, without --grid" in str(caught.value), name


def test_a_damaged_model(tmp_path):
    wrong = altered(TARGET, tmp_path / "d.gguf", numbers={"llama.feed_forward_length": 704})
    with pytest.raises(ModelError, match=r"'blk.0.ffn_\w+.weight' has shape .* expected"):
        widths_of(ModelFile(wrong))
    short = altered(write_sliceable(tmp_path / "s.gguf").path, tmp_path / "o.gguf",
                    {"output.weight": np.zeros((64, 128), np.float32)})
    with pytest.raises(ModelError, match=r"'output.weight' has shape \[128, 64\], \[128, 320\]"):
        widths_of(ModelFile(short))
    odd = altered(TARGET, tmp_path / "h.gguf", numbers={"llama.attention.head_count_kv": 3})
    with pytest.raises(ModelError, match="4 heads cannot share 3 KV heads evenly"):
        widths_of(ModelFile(odd))


@pytest.mark.parametrize(("name", "key", "value"), [
    ("qwen35", "ssm.group_count", 0), ("qwen35", "ssm.group_count", 3),
    ("qwen35", "ssm.state_size", 0), ("nemotron_h-groups", "ssm.time_step_rank", 7),
    ("gemma4", "attention.key_length", 0), ("glm4moe", "expert_count", 7),
    ("qwen3moe", "expert_feed_forward_length", 0), ("qwen3moe", "expert_used_count", 0),
])
def test_damaged_sizes_of_layers_are_an_error_or_change_nothing(tmp_path, name, key, value):
    path = write_random_model(tmp_path / "m.gguf", tiny(name))
    full = f"{name.partition('-')[0]}.{key}"
    model = ModelFile(altered(path, tmp_path / "d.gguf", numbers={full: value}))
    if key in ("expert_feed_forward_length", "expert_used_count"):  # read from the tensors
        assert widths_of(model)
        return
    with pytest.raises((ModelError, UnsupportedArchitecture)):
        widths_of(model)


@pytest.mark.parametrize(("name", "said"), [
    ("h0-3.f0-768.v0-4096", "heads 0 to 3 are not among its 2"),
    ("h0-1.f0-800.v0-4096", "ff 0 to 800 are not among its 768"),
    ("h0-1.f0-768.v0-4097", "vocab 0 to 4097 are not among"),
    ("h0-1q1-3.f0-768.v0-4096", "query heads 1 to 3 do not belong to these KV heads"),
    ("h0-1.f0-100.v0-4096", "ff 0 to 100 are not among its 768, in steps of 32"),
    ("h0-1.f0-96.e0-32.v0-4096", "experts 0 to 32 are not among its 0"),
    ("h0-1d0-1.f0-96.v0-4096", "delta 0 to 1 are not among its 0"),
])
def test_slices_of_another_model_are_refused(tmp_path, name, said):
    with pytest.raises(PlanError, match=said):
        extract_shard(ModelFile(TARGET), 0, 2, piece=Slice.parse(name), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_attention_columns_within_a_block_are_refused(tmp_path):
    model = write_sliceable(tmp_path / "k.gguf", qtype="Q4_K_M", n_embd=256, n_head=4)
    with pytest.raises(PlanError, match="its attention columns are quantised in blocks of 256"):
        ShardSource(model, 0, 1, Slice((0, 1), (0, 256), (0, 32)))
