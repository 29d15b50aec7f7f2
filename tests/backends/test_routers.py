"""A row of a mixture draws its experts alone: with others in its decode it has its own bits."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.llamacpp import eval_callback
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.models.gguf import ModelFile
from tests.kit.cut_check import load
from tests.kit.plain_loop import PlainLoop
from tests.kit.random_model import tiny, write_random_model
from tests.kit.sample import full

TRIALS = 12


@pytest.fixture(scope="module", params=["qwen2moe", full("gpt-oss"), full("deepseek2")])
def mixture(request, tmp_path_factory):
    """qwen2moe has a gate of its shared expert, too."""
    path = tmp_path_factory.mktemp("mixture") / "m.gguf"
    return ModelFile(write_random_model(path, tiny(request.param, qtype="Q8_0")))


def rows_of(tokens, start=0):
    return make_rows([(int(token), start + i, (0,), True) for i, token in enumerate(tokens)])


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_of_one_decode_have_single_rows_bits(mixture, monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(eval_callback, "compiled_filter", lambda: None)
    elif eval_callback.compiled_filter() is None:
        pytest.skip("layer_filter.c was not compiled here")
    backend = load(mixture.path, (0, mixture.n_layers), mixture.n_layers)
    assert backend.exact_limit == eval_callback.MOST_ROWS
    rng = np.random.default_rng(3)
    for _ in range(TRIALS):
        tokens = rng.integers(0, backend.info.n_vocab, rng.integers(2, eval_callback.MOST_ROWS + 1))
        alone = [backend.decode(rows_of([token], i)) for i, token in enumerate(tokens)]
        backend.seq_rm(ALL_SEQS, 0, END)
        together = backend.decode(rows_of(tokens))
        backend.seq_rm(ALL_SEQS, 0, END)
        assert together.tobytes() == np.concatenate(alone).tobytes()
    backend.close()


def test_they_are_the_bits_of_a_plain_loop(mixture):
    """Which knows nothing of routers, and decodes one row at a time."""
    backend = load(mixture.path, (0, mixture.n_layers), mixture.n_layers)
    loop = PlainLoop(mixture.path, n_ctx=backend.info.n_ctx)
    tokens = np.random.default_rng(5).integers(0, backend.info.n_vocab, 24)
    whole = backend.decode(rows_of(tokens[:20]))  # a long chunk: as llama.cpp computes it
    assert whole[-1].tobytes() == loop.decode(tokens[:20].tolist(), 0).tobytes()
    for i, row in enumerate(backend.decode(rows_of(tokens[20:], 20))):
        assert row.tobytes() == loop.decode([int(tokens[20 + i])], 20 + i).tobytes()
    backend.close()
    loop.close()


def test_a_router_of_other_numbers_keeps_its_rows_apart(mixture, monkeypatch):
    monkeypatch.setattr(eval_callback, "of_floats", lambda path: False)
    backend = load(mixture.path, (0, mixture.n_layers), mixture.n_layers)
    assert backend.exact_limit == 1
    backend.close()
