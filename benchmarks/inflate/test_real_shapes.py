"""Files in the shapes of well-known models."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.inflate.inflate import inflate_command
from benchmarks.inflate.real_shapes import SHAPES, parameters
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED


@pytest.mark.parametrize(("name", "billions"), [
    ("llama-8b", 8.03), ("llama-70b", 70.55), ("qwen3-14b", 14.77), ("qwen3-30b-a3b", 30.53),
    ("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83), ("glm-4.5-air", 110.5),
    ("qwen3.5-0.8b", 0.75), ("qwen3.5-35b-a3b", 34.7), ("glm-5.2", 744),
    ("deepseek-v4-flash", 284), ("minimax-m3", 428)])
def test_a_shape_has_as_many_parameters_as_its_model(name, billions):
    """GLM-4.5-Air has 106 B and a layer for multi-token prediction."""
    assert parameters(name) / 1e9 == pytest.approx(billions, abs=0.02 * billions)


def test_every_shape_is_tried():
    assert len(SHAPES) == 12


def test_a_file_of_few_layers_and_another_vocabulary(tmp_path):
    out = tmp_path / "two.gguf"
    done = CliRunner().invoke(inflate_command, [
        "--shape", "qwen3-30b-a3b", "--n-layer", "1", "--type", "Q4_K_M",
        "--vocabulary", str(EMBEDDED / "target.gguf"), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    model = ModelFile(out)
    assert (model.architecture, model.n_layers, model.n_embd) == ("qwen3moe", 1, 2048)
    assert model.tensors["blk.0.ffn_gate_exps.weight"].shape == (2048, 768, 128)
    assert model.n_vocab == ModelFile(EMBEDDED / "target.gguf").n_vocab
    assert json.loads(done.stdout)["n_bytes"] == out.stat().st_size


@pytest.mark.parametrize("args", [[], ["--shape", "llama-8b", str(EMBEDDED / "draft.gguf")]])
def test_a_model_or_a_shape_is_given(args, tmp_path):
    done = CliRunner().invoke(inflate_command, [*args, "-o", str(tmp_path / "x.gguf")])
    assert done.exit_code == 2
    assert "either MODEL or --shape" in done.output
