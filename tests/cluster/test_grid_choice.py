"""What --grid auto has chosen holds for the next start, as long as it fits."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.cluster import grid_choice
from pipeinfer.cluster.grid_choice import (
    GridChoice,
    GridPlanner,
    recall_grid,
    teams_asked,
    users_of,
)
from pipeinfer.cluster.notes import lines_of
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.host import Place
from pipeinfer.models.locate import EMBEDDED, open_model
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning.judge import expected
from pipeinfer.planning.partition import Member
from pipeinfer.planning.planner import load_of
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import cut_layers
from tests.kit.random_model import tiny, write_random_model


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A start over three hosts with links that cost nothing; `start(speeds)` gives its plan and its
    notes."""
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    link = {"latency": 1e-7, "bandwidth": 1e11}
    monkeypatch.setattr(grid_choice, "_links", lambda config, place: [
        {"source": k, "dest": k + 1} | link for k in range(3)])
    model = open_model(EMBEDDED / "target.gguf")

    def start(speeds, hosts="abc", memory=1e12, group="", model=model, kernels=("",) * 4,
              load=None, advises=False, **options):
        load = load or load_of(model, 256, 64)
        infos = [RankInfo(rank, name, settings=NodeSettings(group=group and f"{group}{rank}"),
                          kernels=kernels[rank]) for rank, name in enumerate("h" + hosts)]
        members = {rank: Member(f"rank {rank}", 1e-8 / speed, memory=memory)
                   for rank, speed in enumerate(speeds, 1)}
        notes = []
        config = JobConfig.of(**{"grid": "auto"} | options)
        grids = GridPlanner(config, model, load, members, {}, infos, Policy.ITERATIVE,
                            expected(Policy.ITERATIVE, users_of(config)))
        if advises:
            return grids.would_gain(Place(0, 4, object(), 1, 0, 1)), notes
        if options.get("grid"):
            teams = teams_asked(grids.config, list(members), infos)
            return grids.plan(GridChoice(teams)), notes
        return grids.auto(Place(0, 4, object(), 1, 0, 1), notes), notes

    start.model, start.link = model, link
    return start


def test_slices_stay_the_same_while_speeds_change(cluster):
    first, notes = cluster([1.0, 1.0, 1.0])
    assert "remembered for the next start" in notes[0]
    again, notes = cluster([1.0, 1.0, 3.0])
    assert cut_layers(again.held) == cut_layers(first.held)
    assert notes == [note for note in notes if "so that answers stay the same; --set "
                     "remeasure=true chooses again" in note]
    anew, notes = cluster([1.0, 1.0, 3.0], remeasure=True)
    assert cut_layers(anew.held) != cut_layers(first.held)
    assert cluster([1.0, 1.0, 1.0])[0].held == anew.held
    other, notes = cluster([1.0, 1.0, 1.0], hosts="abd")
    assert "as chosen" not in notes[0]
    assert cut_layers(other.held) == cut_layers(first.held)


def test_a_grid_for_many_users_is_a_choice_of_its_own(cluster):
    """Sums of many rows take long on a slow link."""
    cluster.link.update(latency=2e-4, bandwidth=1e8)
    speeds, crowd = [10.0] * 3, {"parallel": 64, "given": frozenset({"parallel"})}
    alone, _ = cluster(speeds)
    assert max(map(len, alone.teams.ranks)) > 1
    together, notes = cluster(speeds, **crowd)
    assert together is None
    assert "as chosen" not in notes[0]
    assert "as chosen" in cluster(speeds, **crowd)[1][0]
    assert cluster(speeds)[0].held == alone.held
    assert cluster(speeds, parallel=64)[0].held == alone.held  # a default, which nobody gave


def test_a_choice_that_does_not_fit_any_more_is_made_anew(cluster):
    first, _ = cluster([1.0, 1.0, 1.0])
    assert max(map(len, first.teams.ranks)) > 1
    plain, notes = cluster([1.0, 1.0, 1.0], group="rack")
    assert plain is None  # one rank to a stage is a choice, too
    assert "as chosen" not in notes[0]
    assert "as chosen" in cluster([1.0, 1.0, 1.0], group="rack")[1][0]
    assert cluster([1.0, 1.0, 1.0])[0].held == first.held
    _, notes = cluster([1.0, 1.0, 1.0], memory=1e3)
    assert "does not fit any more (" in notes[0]


def test_a_damaged_choice_is_none(cluster, tmp_path):
    cluster([1.0, 1.0, 1.0])
    hosts = [RankInfo(rank, name) for rank, name in enumerate("habc")]
    file, = tmp_path.glob("grid-*.json")
    assert recall_grid(cluster.model, hosts, [1, 2, 3])
    file.write_text(file.read_text().replace("h0", "h1"))  # its checksum does not fit
    assert recall_grid(cluster.model, hosts, [1, 2, 3]) is None


def mixture(tmp_path, name="glm4moe"):
    path = tmp_path / f"{name}.gguf"
    return open_model(write_random_model(path, tiny(name, qtype="Q8_0", expert_ff=128)))


@pytest.mark.parametrize(("name", "sizes", "speed", "mark"), [
    ("qwen35moe", {}, 1.0, "d0-1"), ("glm4moe", {"expert_ff": 128}, 3.0, ""),
    ("qwen3moe", {"expert_ff": 32, "n_head": 8, "n_head_kv": 8}, 1.0, ".x")],
    ids=["layers with a state", "a mixture", "members with some experts"])
def test_a_grid_is_chosen_and_remembered(cluster, tmp_path, name, sizes, speed, mark):
    model = open_model(write_random_model(tmp_path / "m.gguf", tiny(name, qtype="Q8_0", **sizes)))
    first, notes = cluster([1.0, 1.0, speed], model=model)
    assert max(map(len, first.teams.ranks)) > 1
    assert mark in first.held[0].cut[0]
    assert "remembered for the next start" in notes[0]
    again, notes = cluster([1.0, 1.0, 1.0], model=model)
    assert again.held == first.held
    assert "so that answers stay the same" in notes[0]


def test_members_of_a_mixture_need_one_build_of_llama_cpp(cluster, tmp_path):
    kernels = ("AVX2", "AVX2", "AVX2 AVX512F", "AVX2")
    plan, notes = cluster([1.0] * 3, model=mixture(tmp_path), kernels=kernels)
    assert plan is None
    assert "no grid is chosen: rank 3 on c runs llama.cpp with kernels for AVX2, rank 2 on b for " \
        "AVX2 AVX512F: members of a stage select experts themselves" in notes[0]
    with pytest.raises(UsageError, match="one build on every host, or a plain pipeline"):
        cluster([1.0] * 3, model=mixture(tmp_path), kernels=kernels, grid="1x2")
    assert cluster([1.0] * 3, kernels=kernels, grid="1x2")[0].held  # others differ in near-ties


@pytest.mark.parametrize(("cut", "words"), [
    ("h0-1q1-2d8-16.f0-256.x64-128.v0-9", "query heads 1-1 of KV head 0, key heads 8-15 of layers "
     "with a state, columns 0-255 of experts 64-127"),
    ("h0-2.f0-96.e32-64.v0-9", "KV heads 0-1, columns 0-95, of each expert 32-63"),
    ("h0-2.f0-96.v0-9", "KV heads 0-1, columns 0-95"),
])
def test_a_start_names_what_members_hold(cut, words):
    line, = lines_of([Holding(1, 0, 4, 0, (cut,), (0,))], lambda _: "a", lambda _: 2e6,
                     lambda _: "sums")
    assert line == f"stage 1: layers 0-3, sums: rank 1 on a ({words}; 2 MB)"


def test_a_compressed_cache_counts_for_every_member(cluster, tmp_path):
    model = mixture(tmp_path, "deepseek2")
    load = load_of(model, 1 << 16, 64)
    cache = sum(load.whole)
    assert cache > 0.5 * load.stage_bytes(0, model.n_layers)
    enough = (load.stage_bytes(0, model.n_layers) + cache) / 2
    assert cluster([1.0] * 3, model=model, load=load, memory=1.01 * enough, grid="1x2")[0].held
    with pytest.raises(PlanError, match="it lacks"):
        cluster([1.0] * 3, model=model, load=load, memory=0.99 * enough, grid="1x2")
    assert load.slices_bytes(0, model.n_layers, 0.5, 1) == pytest.approx(enough)


def test_what_tokens_depend_on_is_which_layers_are_cut_how(cluster):
    first, _ = cluster([1.0, 1.0, 1.0])
    cut = first.held[0].cut
    split = [structs.replace(one, start=a, stop=b) for a, b in ((0, 5), (5, 12))
             for one in first.held]
    assert cut_layers(split) == [(0, 12, cut)]  # how many stages there are changes no bit
    other = [structs.replace(one, cut=cut[::-1]) if one.start else one for one in split]
    assert cut_layers(other) == [(0, 5, cut), (5, 12, cut[::-1])]


def test_ranks_that_died_are_named_where_a_grid_lacks_members():
    ranks = [RankInfo(0, "a"), RankInfo(1, "b"), RankInfo(2, "a dead host", dead=True)]
    with pytest.raises(UsageError, match=r"only 1 ranks .*; rank 2 died while the job started$"):
        teams_asked(JobConfig.of(grid="1x2"), [1, 2], ranks)
    with pytest.raises(UsageError, match=r"smaller grid$"):
        teams_asked(JobConfig.of(grid="1x2"), [1], ranks[:2])


def test_no_grid_is_recommended_to_layers_on_gpus(cluster):
    """Their sums would travel over the processor, which nobody has measured."""
    (advice,), _ = cluster([1.0, 1.0, 1.0], advises=True)
    assert advice.startswith("--grid ")
    assert cluster([1.0, 1.0, 1.0], advises=True, gpu_layers=9)[0] == []


@pytest.mark.parametrize(("slow", "grid"), [(0.05, "1,1,1"), (0.05, "2,1"), (0.1, "2,1")])
def test_an_estimate_leaves_out_no_team_that_was_given(cluster, slow, grid):
    plan, _ = cluster([1.0, 1.0, slow], grid=grid, slices="")
    assert {one.rank for one in plan.held} == {1, 2, 3}
    assert not plan.left_out
