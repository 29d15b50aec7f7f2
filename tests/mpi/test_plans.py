"""Plans over real ranks: unequal stages, ranks that are left out, measured plans."""

from __future__ import annotations

import json

import pytest

from tests.kit import launch
from tests.kit.launch import PIPEINFER
from tests.kit.own_caches import own_caches
from tests.kit.references import alone, seeded
from tests.kit.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.skipif(
    launch.mpirun_path() is None, reason="no mpirun")]
ASK = ["-p", "Once upon a time", "-n", "24", "--seed", "5"]


def generate(np, *args, **env):
    return launch.answered(np, *ASK, *args, **env)


@pytest.fixture(scope="module")
def tokens():
    return alone("Once upon a time", 24, seeded(5), ignore_eos=False)


@pytest.mark.parametrize(("np", "layers", "ranks"), [
    (4, "7,0,5", [1, 3]), full(4, "1,10,1", [1, 2, 3]), full(3, "0,12", [2]),
])
def test_a_split_from_the_command_line(np, layers, ranks, tokens):
    found = generate(np, "--layers", layers)
    assert found["tokens"] == tokens
    stages = [found["stats"]["stages"][str(i + 1)] for i in range(len(ranks))]
    assert [stage["rank"] for stage in stages] == ranks
    counts = [stage["layers"][1] - stage["layers"][0] for stage in stages]
    assert counts == [int(count) for count in layers.split(",") if count != "0"]
    assert any(note.startswith("plan: layers") for note in found["stats"]["notes"])


def test_a_rank_remembers_its_figures_and_plans_the_same_again(tmp_path, tokens):
    env = {"PIPEINFER_CACHE": str(tmp_path)}
    with own_caches(tmp_path):
        first = generate(3, **env)
        remembered = list(tmp_path.glob("speed-*.json"))
        assert len(remembered) == 1  # one host, ranks alike: one of them measures
        text = remembered[0].read_text()
        second = generate(3, **env)
    assert remembered[0].read_text() == text
    assert first["tokens"] == second["tokens"] == tokens
    assert [stage["layers"] for stage in first["stats"]["stages"].values()] == [
        stage["layers"] for stage in second["stats"]["stages"].values()]
    assert not list(tmp_path.glob("layer-*"))
    generate(3, "--set", "remeasure=true", "-n", "1", **env)
    assert remembered[0].read_text() != text


def test_a_model_that_fits_nowhere_is_refused_before_ranks_measure(tmp_path):
    (tmp_path / "hosts.toml").write_text('[defaults]\nmemory = "8MiB"\n')
    done = launch.run(3, [*PIPEINFER, "generate", *ASK, "--nodes", str(tmp_path / "hosts.toml"),
                          "-m", "smollm2"], timeout=60, PIPEINFER_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 4
    assert "but all ranks together have" in done.stderr or "together for weights" in done.stderr
    assert not list((tmp_path / "cache").glob("speed-*"))


def test_a_split_that_does_not_add_up_is_one_line():
    launch.refused(3, "generate", *ASK, "--layers", "6,5", code=4, lines=1,
                   says="pipeinfer: error: --layers adds up to 11; the model has 12 layers")


def test_a_host_of_the_nodes_file_may_be_spare(tmp_path, tokens):
    nodes = tmp_path / "nodes.toml"
    nodes.write_text("layers = [8, 0, 4]\n")
    found = generate(4, "--nodes", str(nodes))
    assert found["tokens"] == tokens
    assert [stage["rank"] for stage in found["stats"]["stages"].values()] == [1, 3]


def test_the_plan_command_measures_ranks_and_links():
    done = launch.run(3, [*PIPEINFER, "plan", "--json"], timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [stage["rank"] for stage in found["stages"]] == [1, 2]
    assert set(found["tokens_per_second"]) == {"iterative", "speculative", "pipeinfer"}
    assert all(speed > 0 for speed in found["tokens_per_second"].values())


def test_rank_0_may_take_long_for_a_plan_of_one_stage(tmp_path):
    """The other rank has left meanwhile, and is not taken for one that died at its start."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '0':\n"
        "    from pipeinfer.cli import plan\n"
        "    report = plan.report_of\n"
        "    plan.report_of = lambda *given: (time.sleep(6), report(*given))[1]\n")
    done = launch.run(1, [*PIPEINFER, "run", "-np", "2", "--", "plan", "--json"], timeout=120,
                      PYTHONPATH=f"{tmp_path}:{launch.ROOT}")
    assert done.returncode == 0, done.stderr
    assert "were they killed" not in done.stderr
    assert [stage["rank"] for stage in json.loads(done.stdout)["stages"]] == [1]
