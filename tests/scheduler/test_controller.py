"""The controller against the pipeline it models, and its manners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.planning.judge import relative
from pipeinfer.scheduler.controller import (
    SIZES,
    Controller,
    Setting,
    Timing,
    best_chain,
    chain_cutoff,
    costs,
    cutoff,
    in_flight,
    least_confidence,
    least_hope,
    linear,
    speed,
)
from pipeinfer.scheduler.settings import Limits

EIGHT = Timing(slowest=0.1, computed=0.7, curve=linear(0.4), transit=0.001, draft=0.02)
LIMITS = Limits(n_ctx=1000, exact_width=16)


def told(limits=LIMITS, timing=EIGHT, pinned=frozenset(), runs=8, **values):
    """A controller that has seen an empty pipeline of that timing."""
    controller = Controller(limits, pinned, timing.curve, **values)
    for _ in range(runs):
        controller.run_returned(1, timing.slowest, timing.computed, timing.way(1))
        controller.drafted(1, timing.draft)
    return controller


def test_speed_by_hand():
    """Acceptance 0: every cycle is one latency and one token. 1: the slowest stage or the draft."""
    assert speed(EIGHT, 0.0, Setting(1), second=0.0) == pytest.approx(1 / EIGHT.way(1))
    assert speed(EIGHT, 0.5, Setting(0)) == pytest.approx(1 / EIGHT.way(1))
    assert speed(EIGHT, 1.0, Setting(1)) == pytest.approx(1 / 0.1, rel=0.15)
    slow_draft = structs.replace(EIGHT, draft=0.3)
    assert speed(slow_draft, 1.0, Setting(1)) == pytest.approx(1 / 0.3, rel=0.15)
    # 79 %, chain: (1 + g) tokens per latency + g slots, the first guess a slot later
    g = 0.79 / 0.21
    assert speed(EIGHT, 0.79, Setting(1)) == pytest.approx((1 + g) / (0.701 + g * 0.1), rel=0.02)


@given(st.floats(0, 1), st.booleans(), st.integers(2, 64))
def test_single_guesses_gain_with_acceptance(acceptance, join, credit):
    setting = Setting(1, join)
    low, high = (speed(EIGHT, a, setting, credit, 0) for a in (0.8 * acceptance, acceptance))
    assert 0 < low <= high * 1.001


@given(st.floats(0, 1), st.sampled_from(SIZES), st.booleans(), st.integers(2, 64),
       st.floats(0, 1), st.integers(0, 3))
def test_speed_is_between_a_token_per_cycle_and_one_per_row(acceptance, size, join, credit,
                                                            second, alternatives):
    value = speed(EIGHT, acceptance, Setting(size, join), credit, alternatives, second)
    assert 0 < value < 2 * size / EIGHT.slowest


def test_expensive_rows_give_single_tokens_and_cheap_rows_larger_runs():
    dear = told().advise(0.79, 0.4)
    assert (dear.draft_max, dear.join_tip) == (1, False)
    cheap = structs.replace(EIGHT, curve=linear(0.01), draft=0.002)
    assert told(timing=cheap).advise(0.79, 0.4).draft_max >= 4


def test_one_stage_with_dear_rows_does_not_speculate():
    one = Timing(slowest=0.7, computed=0.7, curve=linear(1.0), transit=0.0, draft=0.02)
    assert told(timing=one).advise(0.9, 0.4).path_min > 1


def test_a_useless_draft_is_measured_and_not_used():
    limits = told().advise(0.01, 0.0)
    assert limits.path_min == 1.0
    assert told(limits).advise(0.8, 0.4).path_min < 0.1


def test_the_credit_fills_the_pipeline_whatever_the_links_take():
    assert in_flight(EIGHT, 1) == 9
    far = structs.replace(EIGHT, transit=0.6)
    limits = told(timing=far).advise(0.79, 0.4)
    assert limits.credit == in_flight(far, limits.draft_max) >= 13
    limits = told(timing=far, max_rows=5).advise(0.79, 0.4)
    assert 2 <= limits.credit * limits.draft_max <= 5


@pytest.mark.parametrize(("name", "value"), [
    ("draft_max", 3), ("join_tip", True), ("credit", 5), ("path_min", 0.3), ("alternatives", 4),
])
def test_settings_of_the_user_are_kept(name, value):
    start = structs.replace(LIMITS, **{name: value})
    controller = told(start, pinned=frozenset({name}))
    limits = controller.advise(0.79, 0.4) or start
    assert getattr(limits, name) == value


def test_no_advice_before_measurements_or_without_a_change():
    assert Controller(LIMITS).advise(0.7, 0.4) is None
    controller = told()
    assert controller.advise(0.7, 0.4) is not None
    assert controller.advise(0.7, 0.4) is None


@pytest.mark.parametrize("limits", [
    structs.replace(LIMITS, policy=Policy.ITERATIVE),
    structs.replace(LIMITS, policy=Policy.SPECULATIVE),
    structs.replace(LIMITS, policy=Policy.PUBLISHED),
    structs.replace(LIMITS, ablations=frozenset({Ablation.ASYNC})),
    structs.replace(LIMITS, ablations=frozenset({Ablation.CANCEL, Ablation.CONTINUOUS})),
])
def test_what_the_model_does_not_describe_is_left_alone(limits):
    controller = told(limits)
    assert not controller.active
    assert controller.advise(0.7, 0.4) is None


@pytest.mark.parametrize("ablation", [Ablation.CANCEL, Ablation.ALTERNATIVES])
def test_a_component_alone_is_switched_off(ablation):
    """The controller goes on, or `--ablate` would compare two changes at once."""
    advised = told(structs.replace(LIMITS, ablations=frozenset({ablation}))).advise(0.7, 0.4)
    assert advised is not None
    assert advised.draft_max == told(LIMITS).advise(0.7, 0.4).draft_max


def test_a_joined_tip_with_a_useless_draft_is_given_up():
    """No run of a single row ever comes back there."""
    controller = Controller(structs.replace(LIMITS, join_tip=True), curve=linear(0.2))
    for _ in range(8):
        controller.run_returned(4, 0.16, 0.16, 0.161)
        controller.drafted(3, 0.03)
    timing = controller.timing
    assert timing is not None
    assert (timing.slot(1), timing.slot(4)) == pytest.approx((0.1, 0.16))
    limits = controller.advise(0.02, 0.02)
    assert limits is not None
    assert not limits.join_tip


def test_what_runs_of_several_rows_take_is_learnt():
    controller = told()
    for _ in range(6):
        controller.run_returned(3, 0.3, 2.1, 2.101)
    timing = controller.timing
    assert [timing.slot(rows) for rows in (1, 2, 3, 4)] == pytest.approx([0.1, 0.14, 0.3, 0.46])


def test_a_curve_between_and_beyond_its_points():
    curve = ((2, 1.0), (4, 1.0), (8, 2.0))
    assert [relative(curve, rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx(
        [1.0, 1.0, 1.0, 1.0, 1.5, 2.0, 3.0])
    assert relative((), 5) == 1.0


def test_cutoff_falls_with_depth():
    values = [cutoff(credit) for credit in (2, 4, 8, 32, 256)]
    assert values == sorted(values, reverse=True)
    assert values[2] == pytest.approx(0.05)


FOURS = Timing(1.0, 1.0, ((2, 1.5), (3, 2.3), (4, 1.55), (5, 2.2), (8, 2.6)), 0.0, 0.02)
DEAR = structs.replace(FOURS, curve=((2, 2.6), (4, 3.4), (8, 4.2)))


def test_in_turns_the_width_is_where_the_curve_is_low():
    assert best_chain(FOURS, 0.7, 6) == 3  # four rows, with the accepted token
    assert best_chain(FOURS, 0.7, 2) in (0, 1)  # three rows cost more than four
    assert best_chain(FOURS, 0.95, 15) > 3


def test_in_turns_dear_rows_or_a_dear_draft_mean_none():
    assert best_chain(DEAR, 0.7, 15) == 0
    assert best_chain(structs.replace(FOURS, draft=1.0), 0.7, 15) == 0


def test_guesses_cost_what_their_rows_take_beyond_the_first():
    curve = ((2, 1.7), (4, 2.5), (8, 5.0))
    assert costs(curve, 5) == (0.7, 1.1, 1.5, 2.1, 2.8)
    assert least_hope(costs(curve, 5), 0.0) == 0.5  # three that share a run
    assert least_hope(costs(curve, 5), 0.1) == 0.7  # and the next one has to be named
    assert least_hope(costs(curve, 5), 2.0) == 0.95
    assert least_hope((), 0.0) == 0.0
    assert chain_cutoff(costs(curve, 5), 0.0) == 0.85
    assert chain_cutoff((0.1,), 0.1) == 0.6
    assert chain_cutoff((), 0.0) == 0.0


@given(st.floats(0.05, 0.95), st.integers(1, 15))
def test_the_cutoff_in_turns_is_a_probability_that_falls_with_the_price(acceptance, size):
    dear, cheap = least_confidence(DEAR, acceptance, size), least_confidence(
        structs.replace(FOURS, curve=((2, 1.01), (16, 1.05))), acceptance, size)
    assert 0.0 <= cheap <= dear <= 0.4


def test_advice_in_turns_follows_the_times_and_what_the_user_set():
    limits = structs.replace(LIMITS, time_sharing=True, exact_width=8, tree_max=1, draft_max=1)
    advice = told(limits, FOURS).advise(0.7, 0.4)
    assert (advice.tree_max, advice.draft_max) == (3, 3)
    priced = told(structs.replace(limits, costs=(1.0,) * 7), FOURS).advise(0.7, 0.4)
    assert priced.costs == costs(FOURS.curve, 7)
    assert (priced.tree_max, priced.draft_max) == (7, 7)  # as many as sure guesses are worth
    assert priced.p_min == least_hope(priced.costs, FOURS.draft / FOURS.way(1))
    pinned = frozenset({"tree_max", "draft_max", "p_min"})
    assert told(limits, FOURS, pinned=pinned).advise(0.7, 0.4) is None


def test_where_stages_share_their_cores_a_run_keeps_all_of_them():
    """Lanes share one run then; in a pipeline of eight stages each has a run of its own."""
    four = structs.replace(LIMITS, policy=Policy.ITERATIVE, parallel=4, credit=9)
    apart = told(four).advise(0.7, 0.4)
    together = told(structs.replace(four, same_cores=True)).advise(0.7, 0.4)
    assert (apart.share[3], together.share[3]) == (1, 4)
    assert together.credit < apart.credit
