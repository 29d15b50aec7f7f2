"""Wide stages in virtual time: times by hand, tokens of plain decoding, tables that add up."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from pipeinfer.cli import main
from pipeinfer.cli.plan import plan_command
from pipeinfer.emulation import scenarios, wide
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer.emulation.sizes import Shape, pieces
from pipeinfer.emulation.virtual import prompt_of
from pipeinfer.emulation.wide import APART, BESIDE, TURNS, WideExperiment
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.forecast import grids
from pipeinfer.planning.judge import LoadMix, tokens_per_second
from pipeinfer.planning.teams import SumCost, Wire
from tests.kit.sample import fewer

PROFILES = load_profiles()
BASE = WideExperiment("c", "dolphin-tinyllama", nodes=8, tokens=96, prompt=32)


def speed(**values):
    return wide.run(PROFILES, dataclasses.replace(BASE, **values))[1].tokens_per_second


def test_a_grid_of_width_one_is_the_plain_pipeline():
    plain = scenarios.run(PROFILES, Experiment("c", "dolphin-tinyllama", nodes=8, tokens=96,
                                               prompt=32))[1]
    assert speed(widths=(1,) * 7) == pytest.approx(plain.tokens_per_second, rel=0.05)


@pytest.mark.parametrize("head", [APART, BESIDE])
@pytest.mark.parametrize("policy", ["iterative", "speculative", "pipeinfer"])
def test_the_tokens_are_those_of_plain_decoding(policy, head):
    built, result = wide.run(PROFILES, dataclasses.replace(
        BASE, widths=(3, 4), policy=policy, head=head))
    assert result.tokens == built.scenario.pair.plain(prompt_of(built.scenario), 96)


@pytest.mark.parametrize("policy", ["speculative", "pipeinfer"])
def test_by_turns_draft_and_target_have_whole_machines_and_never_overlap(policy):
    built, result = wide.run(PROFILES, dataclasses.replace(
        BASE, widths=(8,), policy=policy, head=TURNS))
    assert result.tokens == built.scenario.pair.plain(prompt_of(built.scenario), 96)
    assert result.stats.accepted > 20
    node, draft = PROFILES.node("xeon-gold-6140x2"), PROFILES.model("tinyllama")
    assert built.scenario.draft(1) == draft.stage_seconds(node, draft.n_layers, 1, last=True)
    alone = wide.build(PROFILES, dataclasses.replace(BASE, widths=(8,), policy="iterative"))
    assert built.scenario.stages[0].seconds(2) == alone.scenario.stages[0].seconds(2)
    reading = built.scenario.draft(32)  # of the prompt, beside the target
    assert result.busy[0] + result.draft_busy - reading < result.prompt_seconds + result.seconds


def test_turns_take_one_stage():
    with pytest.raises(UsageError, match=r"2x4.*one stage"):
        wide.build(PROFILES, dataclasses.replace(BASE, widths=(4, 4), head=TURNS))


def test_a_stages_time_by_hand():
    built = wide.build(PROFILES, dataclasses.replace(BASE, widths=(4,), policy="iterative"))
    target, node = PROFILES.model("dolphin-70b"), PROFILES.node("xeon-gold-6140x2")
    for rows in (1, 4):
        computing = node.seconds(80 * target.layer_bytes / 4 + target.output_bytes / 4, "Q3_K_M",
                                 rows)
        wire = Wire(1.5e-6, 11e9)
        sums = 160 * SumCost().seconds(4, rows * 8192, wire) + SumCost().seconds(4, 0, wire)
        assert built.scenario.stages[0].seconds(rows) == pytest.approx(computing + sums, rel=1e-6)


def test_members_share_the_attention_of_a_long_context():
    profiles = load_profiles()
    asked = WideExperiment("c", "dolphin-tinyllama", "iterative", nodes=8, tokens=9, widths=(8,))
    long, short = (wide.run(profiles, dataclasses.replace(asked, context=context))[1]
                   for context in (8001, 1))
    model, node = profiles.model("dolphin-70b"), profiles.node("xeon-gold-6140x2")
    one = scenarios.attention_time(model, [node], 80, dataclasses.replace(asked, context=1))
    added = (long.seconds - short.seconds) / (len(long.times) - 1)
    assert added == pytest.approx(one(8000, 8000) / 8, rel=0.01)


def test_smaller_sums_and_cheaper_exchanges_help_where_they_are_dear():
    slow = {"cluster": "a", "widths": (8,), "policy": "iterative"}
    assert speed(**slow, sum_type="f16") > 1.1 * speed(**slow)
    assert speed(**slow, sum_type="bf16") == speed(**slow, sum_type="f16")
    assert speed(widths=(7,), exchange=10e-6) > speed(widths=(7,), exchange=100e-6)
    with pytest.raises(UsageError, match="sums have no type"):
        speed(sum_type="f8")


def test_a_head_beside_a_member_takes_of_its_machine():
    """The member holds less, head and draft are slower."""
    apart, beside = (wide.build(PROFILES, dataclasses.replace(BASE, widths=widths, head=head,
                                                              part=0.5))
                     for widths, head in (((7,), APART), ((8,), BESIDE)))
    assert beside.scenario.draft(1) > 1.9 * apart.scenario.draft(1)
    grid = wide.plan(PROFILES, dataclasses.replace(BASE, widths=(8,), head=BESIDE, part=0.5))
    assert grid.stages[0].blocks[0] < min(grid.stages[0].blocks[1:])
    assert len(beside.memory) == 8


def test_how_models_can_be_cut():
    dolphin, falcon = (PROFILES.model(name).shape for name in ("dolphin-70b", "falcon-180b"))
    assert pieces(dolphin, "Q3_K_M") == (8, 32, 112)
    assert pieces(falcon, "Q3_K_M") == (2, 0, 232)  # 29 heads of 64 to a group end at no block
    assert pieces(Shape("llama", 1, 2048, 5632, 32, 4, 1), "Q8_0") == (4, 32, 176)
    with pytest.raises(PlanError, match="possible widths are 1, 2"):
        speed(pair="falcon-7b", widths=(4,))


def test_members_of_a_mixture_store_all_experts_and_read_some():
    asked = dataclasses.replace(BASE, pair="mixtral-mistral", widths=(4,), policy="iterative")
    built, target = wide.build(PROFILES, asked), PROFILES.model("mixtral-8x22b")
    stage = built.scenario.stages[0]
    assert sum(built.memory) > target.n_layers * target.layer_bytes
    dense = target.n_layers * target.layer_bytes / 4 / PROFILES.node("xeon-gold-6140x2").bandwidth
    assert stage.seconds(1) < dense  # two of eight experts
    assert stage.seconds(8) > 2 * stage.seconds(1)  # further rows draw further experts


@pytest.mark.parametrize(("cluster", "nodes", "widths"), [
    ("c", 8, (7,)), ("c", 8, (3, 4)), ("c", 8, (1,) * 7), ("a", 8, (7,)), ("a", 9, (2,) * 4),
    ("c", 32, (8, 8, 8, 7)),
])
def test_the_planner_foresees_what_virtual_time_shows(cluster, nodes, widths):
    """The judge's formula against the real scheduler, which also offers second choices."""
    one = dataclasses.replace(BASE, cluster=cluster, nodes=nodes, widths=widths, tokens=256,
                              prompt=128)
    for policy, slack in (("iterative", 0.05), ("pipeinfer", 0.25)):
        asked = dataclasses.replace(one, policy=policy)
        plan, (_, result) = wide.plan(PROFILES, asked), wide.run(PROFILES, asked)
        judged = tokens_per_second(plan.arrangement, plan.cluster.mixes[0])
        assert judged == pytest.approx(plan.tokens)
        assert result.tokens_per_second == pytest.approx(judged, rel=slack)
    assert isinstance(plan.cluster.mixes[0], LoadMix)


def test_a_table_has_the_baselines_and_the_best_grid_in_it():
    table = grids.compare(PROFILES, dataclasses.replace(BASE, nodes=4), most=2)
    plain, alone, *others = table.rows
    assert (plain.what, alone.what) == (grids.PLAIN, grids.ALONE)
    assert plain.grid == "3x1"
    assert alone.asynchronous is None
    assert alone.iterative > 2.5 * plain.iterative
    assert 1 <= len(others) <= 2
    assert table.best.best == max(row.best for row in others)
    assert others[0].over == pytest.approx(others[0].best / plain.iterative)
    text = grids.as_text(table)
    assert "tensor parallel alone" in text
    assert "ms for sums" in text
    assert f"known to 15 points only: {table.safe}" in text


def test_the_command(monkeypatch):
    compare = grids.compare
    monkeypatch.setattr(grids, "compare", lambda profiles, experiment: compare(
        profiles, dataclasses.replace(experiment, tokens=fewer(experiment.tokens, 64))))
    found = CliRunner().invoke(main.main, [
        "plan", "dolphin-70b", "--grids", "--cluster", "a", "--hosts", "2", "--sum-type", "f16",
        "--json"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.output)
    assert (data["sum_type"], data["nodes"], data["pair"]) == ("f16", 2, "dolphin-tinyllama")
    assert data["rows"][0]["what"] == "plain pipeline"


@pytest.mark.parametrize(("args", "words"), [
    (["--grids"], "--grids needs either --cluster"),
    (["tinyllama", "--grids", "--cluster", "c"], "no pair of tinyllama is known"),
    (["--grids", "--cluster", "c", "--pair", "dolfin"], "there is no pair"),
])
def test_what_cannot_be_compared_is_named(args, words):
    found = CliRunner().invoke(plan_command, args)
    assert found.exit_code != 0
    assert words in (found.output + str(found.exception))
