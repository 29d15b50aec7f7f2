"""`pipeinfer bench` in virtual time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pipeinfer.cli import main, terminal
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.scenarios import Experiment, synchronous_grid
from pipeinfer.errors import UsageError
from pipeinfer_lab.commands import bench
from tests.kit.sample import mostly_full

FAST = ("--nodes", "4", "--tokens", "32", "--prompt-tokens", "16")


@pytest.fixture(autouse=True)
def stay_alive(monkeypatch):
    """An error ends the process, and here that would be the tests'."""
    monkeypatch.setattr(terminal, "end_job", lambda code: None)


def invoke(*args):
    return CliRunner().invoke(main.main, ["bench", *FAST, *args])


def data(*args):
    done = invoke(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_table_has_every_policy_and_the_gains():
    done = invoke()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "cluster c, dolphin-tinyllama, 1 x 32 tokens after 16, virtual time"
    assert [line.split("  ")[0] for line in lines[3:8]] == list(bench.LABELS.values())
    assert done.stdout.count("equal") == 5
    assert "3 stages, slowest" in done.stdout


def test_a_context_is_named_and_counts_in_the_times_of_stages():
    words = ("--policy", "iterative", "--context", "8192")
    assert "32 tokens after 16 and 8192 cached ones" in invoke(*words).stdout
    run, = data(*words)["policies"][0]["runs"]
    short, = data(*words[:2])["policies"][0]["runs"]
    assert sum(run["stage_seconds"]) == pytest.approx(run["itl_mean"], rel=0.02)
    assert run["draft_seconds"] > 1.1 * short["draft_seconds"]


def test_json_carries_every_run():
    found = data("--seeds", "2")
    assert found["seeds"] == 2
    assert found["experiment"]["tokens"] == 32
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == ["iterative", "speculative-published", "speculative", "published",
                          "pipeinfer"]
    for row in rows.values():
        assert row["tokens_equal"]
        assert len(row["runs"]) == 2
        assert row["tokens_per_second"] == pytest.approx(
            sum(run["tokens_per_second"] for run in row["runs"]) / 2)
        for run in row["runs"]:
            assert run["tokens"] == 32
            assert run["seconds"] == pytest.approx(31 / run["tokens_per_second"])
            assert run["itl_mean"] == pytest.approx(1 / run["tokens_per_second"])
    assert len(rows["iterative"]["runs"][0]["stage_seconds"]) == 4
    assert len(rows["pipeinfer"]["runs"][0]["stage_seconds"]) == 3
    assert rows["iterative"]["spread"] == pytest.approx(0.0)
    assert rows["iterative"]["memory_mean"] < rows["pipeinfer"]["memory_mean"]


def test_synchronous_is_the_best_of_the_grid():
    profiles = load_profiles()
    grid = synchronous_grid(Experiment("c", "dolphin-tinyllama", nodes=4, tokens=32,
                                             prompt=16))
    assert len(grid) == 8
    speeds = [bench.measure(profiles, one)["tokens_per_second"] for one in grid]
    (row,) = data("--policy", "speculative")["policies"]
    assert row["tokens_per_second"] == pytest.approx(max(speeds))
    assert row["setting"] == bench.setting_text(grid[speeds.index(max(speeds))])
    (row,) = data("--policy", "speculative", "--set", "tree_max=2")["policies"]
    assert row["setting"].startswith("tree of 2, ")


def test_options_reach_the_experiment():
    found = data("--policy", "pipeinfer", "--cluster", "a", "--pair", "goliath-xwin7b", "--delay",
                 "25", "--slow", "2:4", "--split", "equal", "--acceptance", "0.4", "--no-adapt",
                 "--set", "draft_max=2", "--set", "join_tip=true", "--ablate", "cancel", "--link",
                 "wan-50ms")["experiment"]
    assert found["delay"] == pytest.approx(0.025)
    assert found["slow"] == [2, 4.0]
    assert found["limits"] == [["draft_max", 2], ["join_tip", True]]
    assert (found["cluster"], found["pair"], found["link"]) == ("a", "goliath-xwin7b", "wan-50ms")
    assert (found["split"], found["adapt"], found["ablate"]) == ("equal", False, ["cancel"])
    assert found["acceptance"] == pytest.approx(0.4)


def test_what_an_ablation_changes_besides_is_said():
    done = invoke("--ablate", "continuous", "--policy", "pipeinfer", "--no-adapt")
    assert "without continuous, not tuned" in done.stdout
    found = data("--ablate", "cancel")["policies"]
    ablated = {row["policy"]: (row["ablated"], row["tuned"]) for row in found}
    assert ablated["pipeinfer"] == (["cancel"], True)
    assert ablated["published"] == (["cancel"], False)
    assert ablated["iterative"] == ([], False)


@pytest.mark.parametrize(("args", "says"), [
    (("--ablate", "multibuffer", "--policy", "pipeinfer"), "names no component of --policy pipe"),
    (("--ablate", "alternatives", "--policy", "published"), "names no component of --policy pub"),
    (("--ablate", "cancel", "--policy", "iterative"), "names no component of --policy iter"),
    (("--ablate", "cancel", "--policy", "speculative"), "choose another policy or component"),
    (("--ablate", "cancel", "--ablate", "multibuffer", "--policy", "pipeinfer"), "multibuffer"),
    (("--ablate", "async"), "add --no-adapt, here and to the run that you compare with"),
    (("--ablate", "continuous", "--policy", "pipeinfer"), "add --no-adapt,"),
    (("--ablate", "continuous", "--nodes", "3"), "add --no-adapt --set join_tip=false,"),
    (("--ablate", "continuous", "--nodes", "2", "--no-adapt"), "add --set join_tip=false,"),
])
def test_an_ablation_that_cannot_be_compared_is_refused(args, says):
    done = invoke(*args)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize("args", [
    ("--ablate", "multibuffer", "--policy", "published"), ("--ablate", "cancel"),
    ("--ablate", "async", "--policy", "published"),
    ("--ablate", "continuous", "--nodes", "3", "--no-adapt", "--set", "join_tip=false"),
])
def test_an_ablation_that_can_be_compared_is_measured(args):
    assert invoke(*args).exit_code == 0


@pytest.mark.parametrize("pair", mostly_full(
    ["dolphin-tinyllama", "dolphin-orca2", "goliath-xwin7b", "goliath-xwin13b", "falcon-7b",
     "falcon-40b"], "dolphin-tinyllama", "falcon-40b"))
def test_the_papers_policy_has_the_papers_gain(pair):
    """PipeInfer over synchronous speculation, both as published, at 8 nodes of cluster C. The paper
    has 1.5 to 2.15; over five texts it is up to 2.22 here."""
    profiles, one = load_profiles(), Experiment("c", pair, nodes=8)
    ours, theirs = (bench.measure(profiles, bench.as_policy(one, policy))
                    for policy in ("published", bench.BASELINE))
    assert ours["tokens_equal"]
    assert 1.5 <= ours["tokens_per_second"] / theirs["tokens_per_second"] <= 2.25


def test_a_slow_node_and_a_delay_show():
    def speed(*args):
        return data("--policy", "iterative", *args)["policies"][0]["tokens_per_second"]

    assert speed("--delay", "50") < 0.8 * speed()
    assert speed("--slow", "1:4", "--split", "equal") < 0.9 * speed("--slow", "1:4")
    assert speed("--slow", "1:4") == pytest.approx(speed(), rel=0.01)  # left out, as by a job


@pytest.mark.parametrize(("args", "says"), [
    (("--cluster", "d"), "there is no cluster profile 'd'"),
    (("--pair", "golath-xwin7b"), "did you mean goliath-xwin7b?"),
    (("--link", "gigabyte"), "did you mean gigabit?"),
    (("--policy", "pipinfer"), "did you mean pipeinfer?"),
    (("--ablate", "cancl"), "did you mean cancel?"),
    (("--set", "draftmax=2"), "did you mean draft_max?"),
    (("--set", "draft_max=two"), "draft_max is a whole number"),
    (("--set", "join_tip=2"), "join_tip is true or false"),
    (("--set", "p_min"), "p_min is a number"),
    (("--set", "p_min=nan"), "must be finite"),
    (("--slow", "4"), "is not NODE:FACTOR"),
    (("--slow", "1:0"), "is not NODE:FACTOR"),
    (("--slow", "4:2"), "there are nodes 0 to 3"),
    (("--acceptance", "1.5"), "not in the range"),
    (("--profiles", "nowhere.toml"), "cannot read profiles nowhere.toml"),
])
def test_impossible_combinations_are_refused_with_the_reason(args, says):
    done = invoke(*args)
    assert done.exit_code == 2
    assert says in done.output


def test_a_model_that_does_not_fit_is_a_plan_error():
    done = CliRunner().invoke(main.main, ["bench", "--cluster", "gpu", "--pair", "mixtral-mistral",
                                         "--policy", "pipeinfer"])
    assert done.exit_code == 4
    assert "it lacks" in done.output


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UsageError, match="start it without mpirun"):
        bench.bench_command.main([*FAST], standalone_mode=False)
