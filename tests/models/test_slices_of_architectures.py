"""Slices of further architectures: their sums are the model's, and others are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.llamacpp.eval_callback import Routers
from pipeinfer.errors import ModelError, UnsupportedArchitecture
from pipeinfer.models import slice_parts
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import barred
from pipeinfer.models.shard import extract_shard
from pipeinfer.models.slices import slices_of, widths_of
from tests.kit.embeddings import extract_embedding
from tests.kit.random_architectures import RECIPES, STATEFUL
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.sample import FULL, matrix, mostly_full
from tests.models.test_slices import logits_of_slices, logits_of_whole, steps_of

MIXTURES = ("deepseek2", "deepseek2-lite", "gemma4", "glm4moe", "gpt-oss", "granitemoe", "llama4",
            "qwen3moe")
SLICED = ("gemma2", "gemma3", "gemma3-no-window", "gemma4-dense", "glm4", "granite", "minicpm",
          "minicpm-old", "mistral3", "smollm3", *MIXTURES)
STATES = ("qwen35", "qwen35moe", "qwen35-tied", "qwen3next", "nemotron_h-groups")
SAMPLED = [name for name in SLICED if name not in ("deepseek2-lite", "llama4", "qwen3moe")]


def stages_of(model):
    """Two stages, cut as late as can be."""
    n, (bars, _) = model.n_layers, barred(model)
    return next([(0, k), (k, n)] for k in range(n - 1, 0, -1)
                if bars.isdisjoint([(0, k), (k, n)]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "qtype"), [
    *matrix(SLICED[:-len(MIXTURES)], ["F32", "Q8_0"]),
    *matrix((*MIXTURES, *STATES), ["F32", "Q8_0", "Q4_0", "MXFP4"])])
def test_one_slice_of_everything_gives_the_bits_of_the_whole(name, qtype, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name, qtype=qtype)))
    steps = steps_of(model)
    got = logits_of_slices(model, slices_of(model, [1.0]), stages_of(model), tmp_path, steps)
    assert np.array_equal(got, logits_of_whole(model, steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*mostly_full(SLICED, *SAMPLED), *mostly_full(STATES, "qwen35")])
def test_sums_of_slices_give_the_whole_but_for_rounding(name, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name)))
    steps = steps_of(model)
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    whole = logits_of_whole(model, steps, **options)
    # ggml looks the GELU of gemma models up in a table of halves: rounding may take another entry
    near = {"gemma4": 4e-3, "gemma4-dense": 4e-3}.get(
        name, 1e-3 if name.startswith("gemma") else 5e-5)
    for shares in ((3.0, 1.0), (1.0, 1.0, 1.0)):
        if len(shares) not in widths_of(model):
            continue
        got = logits_of_slices(model, slices_of(model, shares), stages_of(model), tmp_path, steps,
                               **options)
        assert np.abs(got - whole).max() < near * whole.std()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "qtype", "columns", "shares"), [
    ("qwen3moe", "F32", 2, (1.0,) * 4),
    *(pytest.param(*one, marks=FULL) for one in (
        ("qwen3moe", "Q8_0", 32, (1.0, 1.0)), ("gpt-oss", "F32", 1, (3.0, 1.0)),
        ("llama-experts", "F32", 1, (1.0, 1.0)), ("qwen3next", "F32", 1, (1.0, 1.0)))),
    ("qwen35moe", "F32", 1, (1.0, 1.0)),
    ("gpt-oss", "MXFP4", 32, (1.0, 1.0))])
def test_slices_of_some_experts_add_up_to_all(name, qtype, columns, shares, tmp_path):
    spec = RandomSpec("llama", n_embd=256, n_ff=columns, qtype=qtype, n_expert=4) \
        if name == "llama-experts" else tiny(name, qtype=qtype, expert_ff=columns)
    model = ModelFile(write_random_model(tmp_path / "m.gguf", spec))
    steps, cut = steps_of(model), slices_of(model, shares)
    assert all(piece.among is not None for piece in cut)
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    whole = logits_of_whole(model, steps, **options)
    got = logits_of_slices(model, cut, stages_of(model), tmp_path, steps, **options)
    assert np.abs(got - whole).max() < (5e-5 if qtype == "F32" else 0.2) * whole.std()
    assert (got.argmax(1) == whole.argmax(1)).all()


def test_a_slice_without_its_routers_is_refused(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny("qwen3moe", expert_ff=1)))
    path = extract_shard(model, 0, 4, piece=slices_of(model, [1, 1])[1], cache_dir=tmp_path)
    assert Routers(path).own == (2, 2)
    arrays = [weights for weights, _ in slice_parts.read_routers(ModelFile(path))]
    assert np.array_equal(arrays[3], np.frombuffer(b"".join(model.read_tensor(
        model.tensors["blk.3.ffn_gate_inp.weight"])), np.float32))
    path.write_bytes(path.read_bytes()[:-32])
    with pytest.raises(ModelError, match=r"routers cannot be read .* remove the file"):
        Routers(path)


@pytest.mark.parametrize("name", [name for name in RECIPES | STATEFUL
                                  if name not in (*SLICED, *STATES, "nemotron_h")])
def test_the_others_are_refused_with_the_reason(name, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name)))
    with pytest.raises(UnsupportedArchitecture, match=r"not sliced.*without --grid") as caught:
        slices_of(model, [1, 1])
    assert "not known" not in str(caught.value)


@pytest.mark.parametrize("name", ["gemma3", "granite", "minicpm-old"])
def test_rows_of_the_embedding_are_scaled_as_llama_cpp_scales_tokens(name, tmp_path):
    """Also by the file that is sent to hosts without the model."""
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name)))
    sent = ModelFile(extract_embedding(model, cache_dir=tmp_path))
    tokens = np.arange(5)
    rows = EmbeddingTable.open(model).rows(tokens)
    assert np.array_equal(EmbeddingTable.open(sent).rows(tokens), rows)
    plain = np.frombuffer(b"".join(model.read_tensor(model.tensors["token_embd.weight"])),
                          np.float32).reshape(-1, model.n_embd)[:5]
    factor = np.float32(16 if name == "gemma3" else 12)
    assert np.array_equal(rows, plain * factor)
