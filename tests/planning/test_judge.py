"""Arrangements under the load that is there: three stages on two cores, and what is left of them."""

from __future__ import annotations

import itertools

import pytest

from pipeinfer.core.policy import Policy
from pipeinfer.planning.judge import (
    Arrangement,
    Judge,
    LoadMix,
    Seat,
    StageTime,
    expected,
    granted,
    relative,
    score,
    tokens_per_second,
)
from pipeinfer.planning.partition import Load, Member, measure, partition

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
    assert tokens_per_second(arrangement, guessing) == pytest.approx(
        4 / (arrangement.way() + 3 * 4e-3))
    slow_draft = Arrangement(arrangement.stages, 0.5e-3, draft=0.1)
    assert tokens_per_second(slow_draft, guessing) == tokens_per_second(slow_draft, ONE)
    assert relative(CURVE, 3) == pytest.approx(2.2)
    assert relative(CURVE, 32) == pytest.approx(19.6)
    assert relative((), 5) == 1.0


def test_guesses_of_several_requests_get_no_more_slots_than_there_are():
    mix = LoadMix(Policy.PIPEINFER, 50, acceptance=0.9)
    flat = Arrangement(tuple(StageTime(4e-3) for _ in range(3)))
    assert tokens_per_second(flat, LoadMix(Policy.PIPEINFER, 3, acceptance=0.9)) <= 1 / flat.slot() * 3
    assert tokens_per_second(flat, mix) == tokens_per_second(flat, LoadMix(streams=50))


def judge(*mixes, cores=2, grows=False, ranks=3):
    seats = {rank: Seat("h", 1) for rank in range(1, ranks + 1)}
    return Judge(seats, {"h": cores}, mixes, CURVE, grows=grows)


def test_ranks_left_out_give_their_threads_to_those_that_stay():
    seats = {1: Seat("a", 2), 2: Seat("a", 2), 3: Seat("b", 4)}
    assert granted(seats, {"a": 4, "b": 4}, [1, 2, 3]) == {1: 2, 2: 2, 3: 4}
    assert granted(seats, {"a": 4, "b": 4}, [2, 3]) == {2: 4, 3: 4}
    assert granted(seats, {"a": 1, "b": 4}, [1, 2]) == {1: 2, 2: 2}
    assert judge(ONE, grows=True).faster(1, [1, 2, 3], [1]) == pytest.approx(2**-0.9)
    assert judge(ONE).faster(1, [1, 2, 3], [1]) == 1.0


def test_a_split_is_judged_with_the_cores_that_its_ranks_share():
    load = Load((1.0,) * 12, (1.0,) * 12)
    who = [Member(str(rank), 1e-3) for rank in (1, 2, 3)]
    even, folded = partition(load, who), measure(load, who, [12, 0, 0])
    assert judge(EIGHT)(folded, [1, 2, 3]) < 0.7 * judge(EIGHT)(even, [1, 2, 3])
    assert judge(ONE)(folded, [1, 2, 3]) > judge(ONE)(even, [1, 2, 3])
    both = judge(ONE, EIGHT)(even, [1, 2, 3])
    assert both == pytest.approx(score(judge(ONE).arrangement(even, [1, 2, 3]), (ONE, EIGHT)))
    assert judge(ONE).under(EIGHT)(even, [1, 2, 3]) == judge(EIGHT)(even, [1, 2, 3])


def test_before_there_is_load_one_user_and_a_full_house_count():
    assert [mix.streams for mix in expected(Policy.PIPEINFER, 8)] == [1, 8]
    assert [mix.streams for mix in expected(Policy.ITERATIVE, 1)] == [1]
