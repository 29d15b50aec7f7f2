"""Wide stages in real MPI jobs: where slices may be, options and refusals, a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeinfer.cli.generate import generate as generate_command
from pipeinfer_lab.chaos.job import poll
from tests.kit import launch
from tests.kit.own_caches import own_caches
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.references import alone
from tests.kit.refusals import assert_refused
from tests.kit.served import serve
from tests.mpi.test_jobs import PIPEINFER

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_the_draft_takes_turns_with_a_stage_of_which_rank_0_is_a_member():
    grid = ("--grid", "1x2", "--head-stage", "--ignore-eos", "-n", "48")
    plain = alone("def add(a, b):\n", 48, slices=2)
    turns = generate(2, *grid, "--speculation", "on", "--proposer", "draft")
    beside = generate(3, *grid[:2], *grid[3:], "--speculation", "on", "--proposer", "draft",
                      "--hook", "pace=5")
    assert turns["tokens"] == beside["tokens"] == plain
    assert turns["stats"]["accepted"] > 5
    # guesses travel with the token that they follow; beside a stage of others they have own runs
    assert turns["stats"]["speculative_runs"] == 0 < beside["stats"]["speculative_runs"]


def generate(np, *arguments, **env):
    return launch.answered(np, "-p", "def add(a, b):\n", "-n", "24", "--temp", "0", *arguments,
                           **env)


def test_slices_give_the_same_tokens_whatever_ranks_hold_them(tmp_path):
    """Two slices of a random model in one rank, on two, and on two over TCP without the C part."""
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(
        n_layer=4, n_embd=128, n_head=4, n_head_kv=2, n_ff=256, n_vocab=4096, qtype="Q8_0"))
    own = ("-m", str(path), "--policy", "iterative", "--ignore-eos")
    one = generate(1, *own, "--slices", "2")
    drawn = [note for note in one["stats"]["notes"] if "a sum takes" in note]
    assert len(drawn) == 1
    assert "KV heads 0-0, columns 0-127 and KV heads 1-1, columns 128-255" in drawn[0]
    two = generate(3, *own, "--grid", "1x2")
    with own_caches(tmp_path / "cache"):
        other = generate(3, *own, "--grid", "1x2", "--set", "sum_path=messages", "--distribute",
                         PIPEINFER_CACHE=str(tmp_path / "cache"))
    assert one["tokens"] == two["tokens"] == other["tokens"]
    assert [stage["slices"] for stage in two["stats"]["stages"].values()] == [
        [name] for name in one["stats"]["stages"]["1"]["slices"]]


def test_a_pace_says_what_rows_cost_on_a_wide_stage_too():
    def rows_a_run(milliseconds):
        stats = generate(2, "--grid", "1x2", "--head-stage", "--hook",
                         f"pace=4+{milliseconds}", "--policy", "speculative",
                         "--ignore-eos")["stats"]
        return stats["rows"] / stats["runs"]

    assert rows_a_run("0") > 1.3 * rows_a_run("4")


def test_the_best_grid_is_chosen_or_it_is_said_why_none_is():
    found = generate(3, "--grid", "auto")
    assert any("grid" in note for note in found["stats"]["notes"])


@pytest.mark.parametrize(("np", "arguments", "what"), [
    (3, ("--grid", "2x4"), "8 members, but only 2 ranks"),
    (2, ("--grid", "1x2", "--head-stage", "--slices", "64"), "cannot be cut into 64 slices"),
    (1, ("--grid", "x"), "--grid x: give"),
    (2, ("--grid", "1x2", "--head-stage", "--slices", "1"), "every member"),
])
def test_grids_that_cannot_be_are_refused_in_one_line(np, arguments, what):
    words = ["-p", "x", "-n", "2", *arguments]
    if np == 1:
        assert_refused(generate_command, words, 2, what)
        return
    done = launch.run(np, [*PIPEINFER, "generate", *words])
    assert done.returncode in (2, 4), done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(lines) == 1
    assert what in lines[0]


def test_a_server_over_a_grid_answers_several_at_once():
    body = {"prompt": "def f(x):", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with serve(3, "--grid", "1x2", "-np", "3") as server, ThreadPoolExecutor(4) as pool:
        server.wait_until_ready()
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(4)))
        assert {status for status, _ in answers} == {200}
        assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
        stages = server.get("/props")[1]["pipeinfer"]["stages"]
        assert [(one["stage"], one["member"]) for one in stages] == [(1, 0), (1, 1)]
        assert all(0 < one["sum_seconds"] < 1 for one in stages)


        def told(name):
            return sum(line.startswith(f"pipeinfer_{name}{{")
                       for line in server.get("/metrics")[1].splitlines())

        assert poll(lambda: told("member_waiting_seconds") == 2, 20.0)
        assert [told(name) for name in ("stage_seconds", "sum_seconds", "member_seconds")] == [
            1, 2, 2]
