"""Wide stages of layers with a state: the tokens of a plain loop over the same slices."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeinfer.lab.random_model import RandomSpec, tiny, write_random_model
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.planning.wide import shares_of
from tests.rig import launch
from tests.rig.served import serve
from tests.rig.sliced_loop import SlicedLoop
from tests.support.references import GREEDY, seeded
from tests.support.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
#: slices of "-32" have some of the experts each
NAMES = ("qwen35", "qwen35moe", "qwen3next", "qwen35moe-32", "nemotron_h-groups")
PROMPT = "the rain in the then the rain in the"
GENERATE = [sys.executable, "-m", "pipeinfer", "generate", "-p", PROMPT, "-n", "40", "-c",
            "256", "-t", "1", "--temp", "0", "--ignore-eos", "--json", "--set", "turns=off",
            "--hook", "pace=10"]  # so that guesses come in time on busy machines
#: members, slices, layers of each stage
GRIDS = {"1x2": ((2,), "", (12,)), "2x2": ((2, 2), "", (8, 4)), "2,1": ((2, 1), "2,2", (4, 8)),
         "1x2 unequal": ((2,), "3:1", (12,))}
#: further ranks, and options
CASES = {
    "draft": (0, ["--set", "alternatives=3", "--set", "path_min=0.0001", "--set", "adapt=false"]),
    "sampled": (0, ["--temp", "0.9", "--seed", "7", "--set", "sum_path=messages"]),
    "iterative": (0, ["--policy", "iterative"]),
    "killed": (1, ["--hook", "fault=kill@2:decode=12", "--temp", "0.8", "--seed", "3",
                   "--spares", "1"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return {name: write_random_model(folder / f"{name}.gguf", spec) for name, spec in {
        **{name: tiny(name.removesuffix("-32"), qtype="Q8_0", n_layer=12,
                      expert_ff=32 if name.endswith("-32") else 64) for name in NAMES},
        "draft": RandomSpec(n_layer=1)}.items()}


def grid_of(name, grid):
    """Stages begin behind layers with attention: every third layer of a nemotron_h has it."""
    widths, slices, layers = GRIDS[grid]
    if name.startswith("nemotron"):
        layers = tuple({8: 9, 4: 3}.get(count, count) for count in layers)
    return widths, slices, layers


def expected(path, grid, sampling, folder):
    widths, slices, layers = grid
    tokenizer = open_tokenizer(path)
    loop = SlicedLoop(path, layers, [own or (1.0,) for own in shares_of(slices, widths)],
                      n_ctx=256, cache_dir=folder)
    found = loop.generate(tokenizer.encode(PROMPT), 40, sampling)
    loop.close()
    tokenizer.close()
    return found


@pytest.mark.parametrize(("name", "grid", "case"), [
    (name, grid, case) if (name, grid, case) in (
        ("qwen35", "2,1", "draft"), ("qwen35moe", "1x2", "killed")) else full(name, grid, case)
    for name in NAMES for grid in GRIDS for case in CASES])
def test_no_circumstance_changes_a_token(files, tmp_path, name, grid, case):
    (widths, slices, layers), (further, more) = grid_of(name, grid), CASES[case]
    params = dict(zip(more[::2], more[1::2], strict=False))
    sampling = seeded(int(params["--seed"]), float(params["--temp"])) if "--temp" in params \
        else GREEDY
    done = launch.run(1 + sum(widths) + further, [
        *GENERATE, "-m", str(files[name]), "-md", str(files["draft"]), "--grid",
        ",".join(map(str, widths)), "--layers", ",".join(map(str, layers)),
        *(["--slices", slices] if slices else []), *more])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == expected(
        files[name], grid_of(name, grid), sampling, tmp_path)
    assert answer["stats"]["speculative_runs"] > 0 or case == "iterative"
    assert bool(answer["stats"]["recovered"]) == any(
        word.startswith("fault=") for word in more)


def test_several_users_get_the_same_answer_at_once(files):
    body = {"prompt": "the rain in", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with serve(3, "-m", str(files["qwen35"]), "-c", "256", "-t", "1", "--grid", "1x2") as server, \
            ThreadPoolExecutor(4) as pool:
        server.wait_until_ready()
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(4)))
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
