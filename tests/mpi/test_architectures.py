"""Models of further architectures over several ranks write what one process writes."""

from __future__ import annotations

import json
import sys

import pytest

from pipeinfer.lab.random_architectures import RECIPES, stages_of
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.locate import open_tokenizer
from tests.rig import launch
from tests.rig.sliced_loop import SlicedLoop
from tests.support.sample import fewer, mostly_full

COUNT = fewer(128, 48)
pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def tokens(n_ranks, path, *more):
    done = launch.run(n_ranks, [
        sys.executable, "-m", "pipeinfer", "generate", "-m", str(path), "-p", "the rain in",
        "-n", str(COUNT), "-c", "256", "-t", "1", "--ignore-eos", "--json", *more])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["tokens"]


@pytest.mark.parametrize("name", mostly_full(RECIPES, "qwen3moe"))
def test_stages_write_what_one_process_writes(name, tmp_path):
    path = write_random_model(tmp_path / "model.gguf", tiny(name, qtype="Q8_0"))
    count = stages_of(name)
    whole = tokens(1, path, "--temp", "0")
    assert tokens(count, path, "--temp", "0", "--head-stage") == whole
    chosen = ["--temp", "1", "--seed", "5"]
    whole = tokens(1, path, *chosen)
    assert len(set(whole)) > 10
    assert whole == tokens(count, path, *chosen, "--head-stage", "--proposer", "prompt-lookup",
                           "--policy", "pipeinfer")


@pytest.mark.parametrize("name", mostly_full(["gemma2", "gemma3", "glm4", "granite"], "gemma3"))
def test_grids_write_what_a_plain_loop_over_their_slices_writes(name, tmp_path):
    spec = tiny(name, qtype="Q8_0")
    path = write_random_model(tmp_path / "model.gguf", spec)
    layers = (spec.n_layer - 2, 2)
    loop = SlicedLoop(path, layers, ((1.0, 1.0), (1.0, 1.0)), cache_dir=tmp_path)
    tokenizer = open_tokenizer(path)
    expected = loop.generate(tokenizer.encode("the rain in"), COUNT)
    tokenizer.close()
    loop.close()
    assert len(set(expected)) > 10
    assert expected == tokens(
        5, path, "--temp", "0", "--grid", "2,2", "--layers", ",".join(map(str, layers)),
        "--proposer", "prompt-lookup", "--policy", "pipeinfer")
