"""Wide stages of mixtures of experts: the tokens of a plain loop over the same slices."""

from __future__ import annotations

import itertools
import json

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.planning.wide import shares_of
from tests.models.test_slices_of_architectures import MIXTURES, stages_of
from tests.mpi.test_jobs import PIPEINFER, check, one_of_each, run_matrix
from tests.rig import launch
from tests.rig.sliced_loop import SlicedLoop
from tests.support.references import seeded
from tests.support.sample import FULL

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
#: members of each stage, slices, how parts travel
GRIDS = {
    "1x2": ((2,), "", "auto"),
    "2x2": ((2, 2), "", "messages"),
    "1x3 unequal": ((3,), "3:2:1", "auto"),
    "2,1": ((2, 1), "2,2", "auto"),
}
SAMPLED = ("gpt-oss", "MXFP4", "1x3 unequal")
#: every architecture on every grid, with types in turns
CASES = [(name, ("Q8_0", "MXFP4", "Q4_0", "Q8_0")[k % 4], grid)
         for k, (name, grid) in enumerate(itertools.product(MIXTURES, GRIDS))
         if name != "deepseek2-lite"]  # is as deepseek2 is, with 27 layers


@pytest.mark.parametrize(("name", "qtype", "grid"), [
    SAMPLED, *(pytest.param(*one, marks=FULL) for one in CASES if one != SAMPLED)])
def test_every_policy_gives_the_tokens_of_a_plain_loop_over_the_slices(tmp_path, name, qtype, grid):
    compare(tmp_path, GRIDS[grid], tiny(name, qtype=qtype, expert_ff=192, n_ff=192, n_head=8,
                                        n_head_kv=4))


@pytest.mark.parametrize(("columns", "widths", "slices"), [
    (512, (1,), "4"), pytest.param(768, (4,), "", marks=FULL),
    pytest.param(512, (4,), "", marks=FULL), pytest.param(256, (2, 1), "2,2", marks=FULL)])
def test_members_may_have_some_of_the_experts(tmp_path, columns, widths, slices):
    """Of k-quants, whose blocks are 256 columns."""
    compare(tmp_path, (widths, slices, "auto"), tiny(
        "qwen3moe", qtype="Q4_K_M", n_layer=2, n_embd=1024, n_head=16, n_head_kv=4,
        expert_ff=columns))


@pytest.mark.full("a member of a mixture whose layers keep a state killed in "
                  "tests/mpi/test_wide_states.py")
@pytest.mark.parametrize(("name", "columns"), [
    pytest.param("gpt-oss", 128, marks=FULL), pytest.param("qwen3moe", 32, marks=FULL)])
def test_a_spare_takes_the_experts_of_a_lost_member(tmp_path, name, columns):
    """Also where members have some of them each."""
    path = write_random_model(tmp_path / "m.gguf", tiny(name, qtype="Q8_0", expert_ff=columns))
    loop = SlicedLoop(path, (4,), [(1.0, 1.0)], n_ctx=256, cache_dir=tmp_path)
    tokenizer = open_tokenizer(path)
    expected = loop.generate(tokenizer.encode("the rain in"), 40, seeded(3))
    loop.close()
    tokenizer.close()
    done = launch.run(4, [
        *PIPEINFER, "generate", "-m", str(path), "-md", str(path), "-p", "the rain in", "-n", "40",
        "-c", "256", "-t", "1", "--temp", "0.8", "--seed", "3", "--ignore-eos", "--json", "--grid",
        "1x2", "--spares", "1", "--hook", "fault=kill@2:decode=9", "--set", "turns=off"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == expected
    assert answer["stats"]["recovered"]


def compare(folder, grid, spec):
    """Every policy over a grid of a model with a plain loop over the same slices."""
    widths, slices, way = grid
    path = write_random_model(folder / "m.gguf", spec)
    model, todo = ModelFile(path), one_of_each()
    layers = [stop - start for start, stop in (
        stages_of(model) if len(widths) > 1 else [(0, model.n_layers)])]
    loop = SlicedLoop(path, layers, [own or (1.0,) for own in shares_of(slices, widths)],
                      cache_dir=folder)
    tokenizer = open_tokenizer(path)
    expected = {}
    for one in todo:
        key = one["prompt"], json.dumps(one["params"])
        if key not in expected:
            expected[key] = loop.generate(tokenizer.encode(one["prompt"]), one["count"],
                                          SamplingParams(**one["params"]))
    loop.close()
    tokenizer.close()
    answer = run_matrix(folder, sum(widths), {
        "model": str(path), "draft_model": str(path), "head_stage": True, "slices": slices,
        "grid": ",".join(map(str, widths)), "layers": ",".join(map(str, layers)),
        "sum_path": way}, todo)
    check(answer, todo, expected)
    # only single rows are exact in deepseek2, so these policies guess nothing
    assert answer["exact_width"] > 1 or model.architecture == "deepseek2"
    assert sum(one["accepted_speculative"] for one in answer["results"]) > 0 or (
        answer["exact_width"] == 1)
