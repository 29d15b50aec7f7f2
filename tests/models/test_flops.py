"""The estimate of arithmetic, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

from pipeinfer.cli.summary import flops_of
from pipeinfer.models.flops import row_flops
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.scheduler.events import LaneStats
from tests.kit.gguf_files import altered
from tests.kit.random_model import tiny, write_random_model


def test_a_row_is_multiplied_with_every_matrix_once():
    """The embedded target's output matrix is its embedding."""
    model = ModelFile(EMBEDDED / "target.gguf")
    row, cell = row_flops(model)
    matrices = [t for t in model.tensors.values() if len(t.shape) == 2]
    assert row == 2 * sum(math.prod(t.shape) for t in matrices)
    assert 10e6 < row / 2 < 11e6  # all but some norms of 10.5 M parameters
    assert cell == 4 * 256 * 12
    assert flops_of(LaneStats(rows=3, attended=30), (row, cell)) == 3 * row + 30 * cell


class Mixture:
    """Two layers, of which the second only guesses; 8 experts, of which 2 are drawn."""

    n_layers, n_embd = 1, 4

    def __init__(self):
        self.tensors = {name: SimpleNamespace(layer=layer, shape=shape) for name, layer, shape in (
            ("token_embd.weight", None, (4, 9)), ("output.weight", None, (4, 9)),
            ("blk.0.attn_q.weight", 0, (4, 4)), ("blk.0.attn_norm.weight", 0, (4,)),
            ("blk.0.ffn_up_exps.weight", 0, (4, 6, 8)), ("blk.1.attn_q.weight", 1, (4, 4)))}

    def arch_get(self, key):
        return {"expert_count": 8, "expert_used_count": 2, "attention.head_count": 2,
                "attention.key_length": 3}.get(key)


def test_of_a_mixture_the_experts_that_are_drawn_count():
    assert row_flops(Mixture()) == (2 * (36 + 16 + 4 * 6 * 2), 4 * 6)


def test_a_mixture_may_draw_other_numbers_in_each_layer(tmp_path):
    path = write_random_model(tmp_path / "m.gguf", tiny("qwen3moe", n_layer=2))
    model = ModelFile(altered(path, tmp_path / "n.gguf",
                              numbers={"qwen3moe.expert_used_count": [1, 4]}))
    assert model.layer_reads[0] < model.layer_reads[1] == model.layer_bytes[1]
    experts = sum(math.prod(one.shape) for one in model.tensors.values() if "_exps" in one.name)
    every = sum(math.prod(one.shape) for name, one in model.tensors.items()
                if len(one.shape) > 1 and name != "token_embd.weight")
    assert row_flops(model)[0] == 2 * (every - experts / 2 * (1 - 1 / 4))
