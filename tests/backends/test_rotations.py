"""Models with rotation factors for short and for long texts: the context chooses, not the cache."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest

from pipeinfer.core.types import make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import ShardSource
from tests.kit import launch, random_model
from tests.kit.llama import load
from tests.kit.random_model import tiny, write_random_model

ORIGINAL = 512
TEXT = "hello there world, " * 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """phi3 whose two sets of factors differ, which those of the recipe do not."""
    recipe, drawn = random_model._RECIPES["phi3"], random_model.drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_model._RECIPES, "phi3", dataclasses.replace(
            recipe, keys=lambda s: recipe.keys(s) | {
                "rope.scaling.original_context_length": ORIGINAL}))
        patch.setattr(random_model, "drawn", lambda rng, name, shape: drawn(rng, name, shape) * (
            4 if "factors_long" in name else 1))
        return write_random_model(tmp_path_factory.mktemp("far") / "model.gguf", tiny("phi3"))


def logits(path, cells, text, cut=None):
    model, hidden = ModelFile(path), None
    n = model.n_layers
    rows = make_rows([(i, i, (0,), True) for i in range(40)])
    for start, stop in [(0, n)] if cut is None else [(0, cut), (cut, n)]:
        one = load(ShardSource(model, start, stop), (start, stop), n, n_ctx=cells, n_seq_max=2,
                   huge_pages=False, text=text)
        hidden = one.decode(rows, hidden).copy()
        one.close()
    return hidden


def test_the_text_chooses_whatever_the_cells(path):
    near, far = logits(path, 256, 0), logits(path, 1024, 0)  # llama.cpp's own choice
    assert not np.array_equal(near, far)
    for cells in (256, 512, 1024):
        for cut in (None, 2):
            assert np.array_equal(logits(path, cells, ORIGINAL, cut), near)
            assert np.array_equal(logits(path, cells, ORIGINAL + 1, cut), far)


def test_tokens_do_not_depend_on_how_many_requests_there_may_be(path):
    def tokens(*more):
        done = launch.run(1, [sys.executable, "-m", "pipeinfer", "generate", "-m", path, "-p", TEXT,
                              "-n", "20", "--temp", "0", "--ignore-eos", "--json", *more],
                          timeout=90)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["tokens"]

    short = tokens("-c", str(ORIGINAL))
    assert tokens("-c", str(ORIGINAL), "-np", "4") == short
    assert tokens("-c", str(ORIGINAL + 1)) != short
