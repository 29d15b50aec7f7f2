"""Slices of further architectures: their sums are the model's, and others are refused by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipeinfer.errors import UnsupportedArchitecture
from pipeinfer.lab.random_architectures import RECIPES
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.architectures import barred
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.slices import cut_of
from tests.models.test_slices import logits_of_slices, logits_of_whole, steps_of
from tests.support.embeddings import extract_embedding
from tests.support.sample import matrix, mostly_full

MIXTURES = ("deepseek2", "deepseek2-lite", "glm4moe", "gpt-oss", "granitemoe", "llama4", "qwen3moe")
SLICED = ("gemma2", "gemma3", "gemma3-no-window", "glm4", "granite", "minicpm", "minicpm-old",
          "mistral3", "smollm3", *MIXTURES)
SAMPLED = [name for name in SLICED if name not in ("deepseek2-lite", "llama4", "qwen3moe")]


def stages_of(model):
    """Two stages, cut as late as can be."""
    n, (bars, _) = model.n_layers, barred(model)
    return next([(0, k), (k, n)] for k in range(n - 1, 0, -1)
                if bars.isdisjoint([(0, k), (k, n)]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "qtype"), [
    *itertools.product(SLICED[:-len(MIXTURES)], ["F32", "Q8_0"]),
    *matrix(MIXTURES, ["F32", "Q8_0", "Q4_0", "MXFP4"])])
def test_one_slice_of_everything_gives_the_bits_of_the_whole(name, qtype, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name, qtype=qtype)))
    steps = steps_of(model)
    got = logits_of_slices(model, cut_of(model, [1.0]), stages_of(model), tmp_path, steps)
    assert np.array_equal(got, logits_of_whole(model, steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_full(SLICED, *SAMPLED))
def test_sums_of_slices_give_the_whole_but_for_rounding(name, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name)))
    steps = steps_of(model)
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    whole = logits_of_whole(model, steps, **options)
    # ggml looks the GELU of gemma models up in a table of halves: rounding may take another entry
    near = 1e-3 if name.startswith("gemma") else 5e-5
    for shares in ((3.0, 1.0), (1.0, 1.0, 1.0)):
        got = logits_of_slices(model, cut_of(model, shares), stages_of(model), tmp_path, steps,
                               **options)
        assert np.abs(got - whole).max() < near * whole.std()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in SLICED])
def test_the_others_are_refused_with_the_reason(name, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name)))
    with pytest.raises(UnsupportedArchitecture, match=r"not sliced.*without --grid") as caught:
        cut_of(model, [1, 1])
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
