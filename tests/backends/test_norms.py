"""The row of a text's last token before the output head is llama.cpp's embedding of the text."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.base import norms
from pipeinfer.backends.composed import ChainBackend
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard, stage_layers
from tests.kit.cut_check import load
from tests.kit.plain_loop import PlainLoop
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.sample import full

pytestmark = pytest.mark.slow
TEXTS = [[7], list(range(3, 40)), [5, 9] * 30]
SPECS = {"qwen3": RandomSpec(architecture="qwen3", pooling=3),
         "llama": RandomSpec(pooling=3), "gemma3": tiny("gemma3", pooling=3),
         "qwen2-Q8_0": RandomSpec(architecture="qwen2", qtype="Q8_0", tied=True, pooling=3)}


def rows(tokens, start=0, wants_last=True):
    return make_rows([(token, start + i, (0,), wants_last and i == len(tokens) - 1)
                      for i, token in enumerate(tokens)])


def unit(row):
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("n_stages", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", *map(full, ("llama", "gemma3", "qwen2-Q8_0"))])
def test_norms_are_the_embeddings_of_llama_cpp(name, n_stages, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", SPECS[name]))
    cut = stage_layers(model.n_layers, n_stages)
    paths = [model.path] if n_stages == 1 else [
        extract_shard(model, *layers, cache_dir=tmp_path) for layers in cut]
    chain = ChainBackend([load(path, layers, model.n_layers)
                          for path, layers in zip(paths, cut, strict=True)])
    loop = PlainLoop(model.path, embeds=True)
    try:
        for tokens in TEXTS:
            middle = len(tokens) // 2
            if middle:
                chain.decode(rows(tokens[:middle], wants_last=False))
            (found,) = norms(chain, rows(tokens[middle:], middle))
            assert np.abs(unit(found) - loop.embedding(tokens)).max() < 1e-4
            # and the next decode gives logits again
            logits = chain.decode(make_rows([(1, len(tokens), (0,), True)]))
            assert logits.shape == (1, model.n_vocab)
            chain.seq_rm(ALL_SEQS, 0, END)
    finally:
        loop.close()
        chain.close()
