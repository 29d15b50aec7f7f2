"""Grids of a job's own ranks: what the file allows, and what links say."""

from __future__ import annotations

import pytest

from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.slices import slices_of, widths_of
from pipeinfer.planning.judge import LoadMix
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.measured_grid import cut_from, grids_of_ranks, network_of
from pipeinfer.planning.partition import Member
from pipeinfer.planning.planner import load_of
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.teams import Network, SumCost, Wire, busiest, team
from pipeinfer.planning.wide import share_of
from tests.kit.random_model import RandomSpec, tiny, write_random_model

FIGURES = Figures(1e10, 1, {1: 1.0, 2: 1.3, 4: 1.9})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return ModelFile(write_random_model(path, RandomSpec(n_layer=6)))


def test_a_file_has_the_widths_that_its_slices_have(model):
    cut = cut_from(model)
    assert cut.widths(64) == widths_of(model)
    assert 0 < cut.kv < cut.attention < 1


def measured(tmp_path, name, **sizes):
    """A model, how it is cut, and two equal members that have it together."""
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name, qtype="Q8_0", **sizes)))
    cut = cut_from(model, load_of(model, 256, 64))
    return model, cut, team([Member("", 1.0)] * 2, (0, 1), Network(Wire(0.0, 1e9)), cut, 1.0)


def half_of(model):
    """The share of the first of two slices."""
    pieces = [piece.name for piece in slices_of(model, [1, 1])]
    return share_of(Holding(0, 0, 1, 0, tuple(pieces), (0,)))


@pytest.mark.parametrize("name", ["qwen3moe", "glm4moe", "deepseek2"])
def test_members_of_a_mixture_read_what_rows_draw_and_store_all(tmp_path, name):
    model, cut, one = measured(tmp_path, name, expert_ff=512)
    assert cut.widths(64) == widths_of(model)
    heads, whole = cut.stored
    assert 0 < cut.whole < 0.5
    assert heads + whole < cut.attention + cut.whole  # two of four experts are not read
    assert sum(one.shares) == pytest.approx(1 + whole)
    assert one.layer == pytest.approx(0.5 + cut.whole / 2)
    assert half_of(model) == 0.5


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_layers_with_a_state_are_cut_as_attention_is(tmp_path, name):
    model, cut, one = measured(tmp_path, name, n_head=8, n_head_kv=8)
    assert cut.widths(64) == widths_of(model) == (1, 2)  # two key heads
    assert cut.attention > 0.3
    assert one.layer == pytest.approx(0.5 + cut.whole / 2)


def test_members_with_some_experts_wait_for_the_one_that_has_most(tmp_path):
    assert busiest(1, 8) == 1.0
    assert busiest(2, 2) == pytest.approx((2 * 0.5 + 1 * 0.5) / 2)
    assert 0.25 < busiest(4, 8) < 0.5
    model, cut, one = measured(tmp_path, "qwen3moe", expert_ff=32)
    assert cut.widths(64) == widths_of(model) == (1, 2)
    assert one.layer == pytest.approx(
        cut.attention / 2 + 0.75 * (1 - cut.attention - cut.whole) + cut.whole)
    assert sum(one.shares) == pytest.approx(1 + cut.stored[1])
    assert half_of(model) == 0.5
    best, _ = grids_of_ranks(model, load_of(model, 256, 64), [Member("", 1.0)] * 2, [FIGURES] * 2,
                             Network(Wire(1e-6, 1e10)), [LoadMix()], SumCost())
    assert best.widths == (2,)
    assert "of 2 members 1 share the columns of an expert, and the experts are divided into 2 " \
        "groups" in best.why()


def test_ranks_further_apart_are_joined_by_the_worst_link_between():
    links = [{"source": 0, "dest": 1, "latency": 1e-6, "bandwidth": 1e10},
             {"source": 1, "dest": 2, "latency": 5e-5, "bandwidth": 1e8},
             {"source": 2, "dest": 3, "latency": 2e-6, "bandwidth": 2e10}]
    network = network_of([1, 2, 3], links)
    assert network.between(0, 1) == Wire(5e-5, 1e8)
    assert network.between(1, 2) == Wire(2e-6, 2e10)
    assert network.between(0, 2) == Wire(5e-5, 1e8)


@pytest.mark.parametrize(("latency", "wide"), [(1e-6, True), (0.1, False)])
def test_a_grid_is_proposed_where_links_are_fast_enough(model, latency, wide):
    links = [{"source": k, "dest": k + 1, "latency": latency, "bandwidth": 1e10} for k in range(3)]
    members = [Member(f"rank {k}", 1e-6) for k in range(1, 4)]
    best, plain = grids_of_ranks(model, load_of(model, 256, 64), members, [FIGURES] * 3,
                                 network_of([1, 2, 3], links), [LoadMix()], SumCost())
    assert (max(best.widths) > 1) == wide
    assert best.tokens >= plain.tokens * 0.999
    assert plain.widths == (1, 1, 1)
