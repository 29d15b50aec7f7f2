"""Arrangements under the load that is there: three stages on two cores, and what they become."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from pipeinfer.core.policy import Policy
from pipeinfer.planning.judge import (
    Arrangement,
    Judge,
    LoadMix,
    Seat,
    StageTime,
    expected,
    granted,
    overlapping,
    relative,
    score,
    tokens_per_second,
)
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.partition import Load, Member, measure, partition
from pipeinfer.planning.planner import with_head
from pipeinfer.planning.replan import Holding, rebalance, replan

ONE = LoadMix()
EIGHT = LoadMix(streams=8)
CURVE = ((2, 1.6), (4, 2.8), (8, 5.2), (16, 10.0))


def stages(*seconds, pool="", threads=1, **given):
    return tuple(StageTime(one, CURVE, pool=pool, threads=threads, **given) for one in seconds)


THREE = Arrangement(stages(4e-3, 4e-3, 4e-3, pool="h"), cores={"h": 2})
FOLDED = Arrangement(stages(11.8e-3, pool="h"), cores={"h": 2})
FOLDED_ON_BOTH = Arrangement(stages(6.3e-3, pool="h", threads=2), cores={"h": 2})


def test_one_user_gains_a_little_by_folding_and_eight_lose_much():
    """What was measured: -32 % with 8 clients, +5 to +12 % for one stream, half the speed of a
    long prompt."""
    one, eight = (tokens_per_second(FOLDED, mix) / tokens_per_second(THREE, mix)
                  for mix in (ONE, EIGHT))
    assert 1.0 < one < 1.15
    assert eight < 0.7
    assert THREE.slot(64) / FOLDED.slot(64) == pytest.approx(0.5, abs=0.05)


def test_a_long_prompt_tips_the_balance_for_one_user_too():
    prompts = LoadMix(prompt_rows=1500 / 50)
    assert tokens_per_second(FOLDED, prompts) < tokens_per_second(THREE, prompts)


def test_folding_onto_both_threads_is_another_matter():
    """One user is served twice as fast, eight about as fast: the cores are as busy."""
    assert tokens_per_second(FOLDED_ON_BOTH, ONE) > 1.8 * tokens_per_second(THREE, ONE)
    ratio = tokens_per_second(FOLDED_ON_BOTH, EIGHT) / tokens_per_second(THREE, EIGHT)
    assert 0.9 < ratio < 1.3


def test_stages_on_cores_of_their_own_are_not_held_up():
    apart = Arrangement(stages(4e-3, 4e-3, 4e-3))
    assert apart.slot() == 4e-3
    assert THREE.slot() == pytest.approx(6e-3)
    assert tokens_per_second(apart, EIGHT) > tokens_per_second(THREE, EIGHT)


@pytest.mark.parametrize("policy", list(Policy))
def test_more_of_anything_never_makes_it_slower(policy):
    """More streams, faster stages, more cores, more acceptance: each at least as many tokens."""
    for streams, acceptance in itertools.product((1, 2, 3, 8, 17), (0.0, 0.4, 0.9)):
        mix = LoadMix(policy, streams, 1.0, acceptance)
        base = tokens_per_second(THREE, mix)
        more = LoadMix(policy, streams + 1, 1.0, acceptance)
        surer = LoadMix(policy, streams, 1.0, acceptance + 0.05)
        assert tokens_per_second(THREE, more) >= base * 0.93  # groups have whole sizes
        assert tokens_per_second(THREE, surer) >= base * (1 - 1e-9)
        wider = Arrangement(THREE.stages, cores={"h": 3})
        assert tokens_per_second(wider, mix) >= base
        quick = Arrangement(stages(3e-3, 3e-3, 3e-3, pool="h"), cores={"h": 2})
        assert tokens_per_second(quick, mix) > base


def test_by_hand():
    arrangement = Arrangement(stages(3e-3, 1e-3, sums=1e-3, row_sums=5e-4), 0.5e-3)
    assert arrangement.way() == pytest.approx(3e-3 + 1e-3 + 2 * 1e-3 + 3 * 0.5e-3)
    assert arrangement.way(2) == pytest.approx(1.6 * 4e-3 + 2 * 1.5e-3 + 3 * 0.5e-3)
    assert arrangement.slot() == pytest.approx(4e-3)
    assert tokens_per_second(arrangement, ONE) == pytest.approx(1 / arrangement.way())
    guessing = LoadMix(Policy.PIPEINFER, acceptance=0.75)
    assert overlapping(arrangement, 0.75, 1) == pytest.approx(
        4 / (arrangement.way() + 3 * 4e-3), rel=1e-3)
    assert tokens_per_second(arrangement, guessing) > 4 / (arrangement.way() + 3 * 4e-3)
    slow_draft = Arrangement(arrangement.stages, 0.5e-3, draft=0.1)
    assert tokens_per_second(slow_draft, guessing) == tokens_per_second(slow_draft, ONE)
    assert relative(CURVE, 3) == pytest.approx(2.2)
    assert relative(CURVE, 32) == pytest.approx(19.6)
    assert relative((), 5) == 1.0


def test_guesses_of_several_requests_get_no_more_slots_than_there_are():
    mix = LoadMix(Policy.PIPEINFER, 50, acceptance=0.9)
    flat = Arrangement(tuple(StageTime(4e-3) for _ in range(3)))
    assert tokens_per_second(flat, mix) == pytest.approx(
        tokens_per_second(flat, LoadMix(streams=50)), rel=0.15)


def judge(*mixes, cores=2, grows=False, ranks=3):
    seats = {rank: Seat("h", 1) for rank in range(1, ranks + 1)}
    return Judge(seats, {"h": cores}, mixes, CURVE, grows=grows)


def test_ranks_left_out_give_their_threads_to_those_that_stay():
    seats = {1: Seat("a", 2), 2: Seat("a", 2), 3: Seat("b", 4)}
    assert granted(seats, {"a": 4, "b": 4}, [1, 2, 3]) == {1: 2, 2: 2, 3: 4}
    assert granted(seats, {"a": 4, "b": 4}, [2, 3]) == {2: 4, 3: 4}
    assert granted(seats, {"a": 1, "b": 4}, [1, 2]) == {1: 2, 2: 2}
    assert judge(ONE, grows=True).faster(1, [1]) == pytest.approx(2**-0.9)
    assert judge(ONE, grows=True).faster(1, None) == 1.0
    assert judge(ONE).faster(1, [1]) == 1.0


def test_a_split_is_judged_with_the_cores_that_its_ranks_share():
    load = Load((1.0,) * 12, (1.0,) * 12)
    who = [Member(str(rank), 1e-3) for rank in (1, 2, 3)]
    even, folded = partition(load, who), measure(load, who, [12, 0, 0])
    assert judge(EIGHT)(folded, [1, 2, 3]) < 0.7 * judge(EIGHT)(even, [1, 2, 3])
    assert judge(ONE)(folded, [1, 2, 3]) > judge(ONE)(even, [1, 2, 3])
    both = judge(ONE, EIGHT)(even, [1, 2, 3])
    assert both == pytest.approx(score(
        judge(ONE).arrangement(even.seconds, [[1], [2], [3]]), (ONE, EIGHT)))


def test_before_there_is_load_one_user_and_a_full_house_count():
    assert [mix.streams for mix in expected(Policy.PIPEINFER, 8)] == [1, 8]
    assert [mix.streams for mix in expected(Policy.ITERATIVE, 1)] == [1]


# --- the scenario: 30 layers at 0.32 ms, an output matrix of as many bytes as 28 of them, 2.3 ms --

BY_BYTES = Load((1.0,) * 30, (1.0,) * 30, last_cost=28.0, last_bytes=28.0)
SEEN = [Figures(1e9, 1, {1: 0.32e-3, 2: 0.5e-3, 4: 0.9e-3}, head=2.3e-3)] * 3
REAL = with_head(BY_BYTES, SEEN)
RANKS = {rank: Member(str(rank), 0.32e-3) for rank in (1, 2, 3)}


def counts(held):
    return [holding.stop - holding.start for holding in held]


def test_the_start_does_not_take_an_output_matrix_for_28_layers():
    who = list(RANKS.values())
    assert partition(BY_BYTES, who).counts == (15, 14, 1)
    assert partition(REAL, who).counts == (13, 12, 5)
    assert with_head(BY_BYTES, [Figures(1e9, 1, {1: 1.0, 2: 1.0, 4: 1.0})]) == BY_BYTES


def test_nor_does_what_follows_a_loss():
    held = [Holding(1, 0, 15), Holding(3, 29, 30)]
    lost = [Holding(2, 15, 29)]
    assert counts(replan(BY_BYTES, RANKS, held, [], lost)) == [29, 1]
    assert counts(replan(REAL, RANKS, held, [], lost)) == [19, 11]


def test_after_a_loss_more_layers_move_where_that_is_much_faster():
    held = [Holding(1, 0, 2), Holding(2, 2, 28)]
    lost = [Holding(3, 28, 30)]
    plain = replan(Load((1.0,) * 30, (1.0,) * 30), RANKS, held, [], lost)
    assert counts(plain) == [2, 28]
    busy = judge(EIGHT, cores=8)
    assert counts(replan(Load((1.0,) * 30, (1.0,) * 30), RANKS, held, [], lost, busy)) == [15, 15]


def moved(*mixes, seconds=(4.8e-3, 4.5e-3, 2.6e-3), held=((1, 0, 15), (2, 15, 29), (3, 29, 30)),
          load=REAL, **given):
    arrangement = [Holding(*one) for one in held]
    keys = {"cores", "grows"}
    return rebalance(load, RANKS, arrangement, seconds, given.pop("spares", ()),
                     judge(*mixes, **{k: given.pop(k) for k in keys & set(given)}), **given)


@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize("policy", [Policy.ITERATIVE, Policy.PIPEINFER])
def test_a_healthy_job_with_several_users_is_not_folded(streams, policy):
    found = moved(LoadMix(policy, streams, 2.0))
    assert len(found.held) == 3
    assert found.gain < 1.3


def test_for_one_user_folding_promises_what_it_brings():
    """Not the half more that was promised, but the hops that it saves; and with both threads more.
    """
    found = moved(LoadMix(prompt_rows=0.0))
    assert found.gain < 1.15
    assert moved(LoadMix(), grows=True).gain > 1.5
    assert len(moved(LoadMix(), grows=True).held) == 1


def test_with_long_prompts_one_user_keeps_three_stages():
    assert len(moved(LoadMix(prompt_rows=30.0)).held) == 3


def test_there_is_a_way_back():
    """Eight users come after a job was folded for one."""
    folded = ((1, 0, 30),)
    found = moved(EIGHT, seconds=[11.9e-3], held=folded, spares=(2, 3), returning=(2, 3))
    assert len(found.held) > 1
    assert found.gain > 1.4
    alone = moved(EIGHT, seconds=[11.9e-3], held=folded)
    assert (len(alone.held), alone.gain) == (1, 1.0)


def test_a_stage_of_one_layer_is_not_taken_for_a_slow_rank():
    """A tiny model, 0.3 ms for whatever a stage does and 0.1 ms per layer."""
    held = ((1, 0, 1), (2, 1, 2), (3, 2, 12))
    load = Load((1.0,) * 12, (1.0,) * 12)
    found = moved(LoadMix(streams=2), cores=4, load=load, held=held,
                  seconds=(0.4e-3, 0.41e-3, 1.3e-3))
    assert counts(found.held) == [4, 4, 4]


def test_a_stage_with_all_threads_is_not_moved_to_another_idle_rank_of_its_host():
    """What it takes was measured with the threads that the other one would get, too."""
    grown = structs.replace(judge(ONE, grows=True), using={1: 2})
    found = rebalance(REAL, RANKS, [Holding(1, 0, 30)], [6.3e-3], (2, 3), grown,
                      {2: 0.0, 3: 0.0})
    assert (found.held, found.gain) == ((Holding(1, 0, 30),), 1.0)
