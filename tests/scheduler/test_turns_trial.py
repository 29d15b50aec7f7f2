"""What the account of guesses settles on where draft and target take turns, and what it spends."""

from __future__ import annotations

import random

import pytest

from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.worth import TURNS, Trial


def run(trial, tokens, gain, lanes=1, key="a", start=(0, 0.0), pace=1.0, seed=0):
    """Decode so many tokens, with guesses `gain` times as fast; tokens of each kind, and where it
    stopped. Every third step with guesses brings three tokens."""
    dice, (total, now), counts = random.Random(seed), start, {True: 0, False: 0}
    while counts[True] + counts[False] < tokens:
        made = lanes * (3 if trial.speculate and dice.random() < 0.33 else 1)
        speed = gain * 5 / 3 if trial.speculate and made > lanes else gain * 5 / 7 \
            if trial.speculate else 1.0
        now += made / lanes / speed / pace * dice.uniform(0.95, 1.05)
        counts[trial.speculate] += made
        total += made
        trial.tokens(total, now, lanes, key)
    return counts, (total, now)


@pytest.mark.parametrize("gain", [2.0, 1.3, 1.1])
def test_guesses_that_pay_are_made_all_along(gain):
    counts, _ = run(Trial(TURNS), 2000, gain)
    assert counts[True] > 0.9 * 2000
    assert counts[False] > 0  # how fast plain decoding is has to be known


@pytest.mark.parametrize("gain", [0.8, 0.5])
def test_guesses_that_do_not_pay_rest_longer_and_longer(gain):
    counts, _ = run(Trial(TURNS), 400, gain)
    assert counts[False] > 0.6 * 400
    counts, _ = run(Trial(TURNS), 4000, gain)
    assert counts[False] > 0.85 * 4000
    assert counts[True] > 0  # they are tried now and then


def test_a_short_answer_whose_guesses_pay_is_guessed_nearly_whole():
    counts, _ = run(Trial(TURNS), 60, 1.5)
    assert counts[True] > 0.8 * 60


def test_a_text_that_becomes_another_is_noticed():
    trial = Trial(TURNS)
    _, at = run(trial, 3000, 0.6)
    counts, at = run(trial, 3000, 2.0, start=at)
    assert counts[True] > 0.6 * 3000
    counts, _ = run(trial, 3000, 0.6, start=at)
    assert counts[False] > 0.6 * 3000


def test_a_machine_that_slows_down_for_everything_does_not_end_guesses():
    trial, at, guessed = Trial(TURNS), (0, 0.0), 0
    for k in range(40):
        counts, at = run(trial, 200, 1.3, start=at, pace=1.0 if k % 2 else 0.8, seed=k)
        guessed += counts[True]
    assert guessed > 0.7 * 8000


def test_numbers_of_requests_have_accounts_of_their_own():
    trial = Trial(TURNS)
    _, at = run(trial, 2000, 2.0)
    _, at = run(trial, 4000, 0.5, lanes=4, key="b", start=at)
    assert not trial.speculate
    trial.tokens(at[0], at[1], 1, "c")
    assert trial.speculate


def test_what_lies_between_requests_does_not_count():
    trial, at, guessed = Trial(TURNS), (0, 0.0), 0
    for key in range(100):
        counts, (total, now) = run(trial, 20, 1.5, key=key, start=at, seed=key)
        at = (total, now + 1000.0)
        trial.tokens(*at, 0, key)  # another's prompt
        guessed += counts[True]
    assert guessed > 0.8 * 2000


def test_where_nothing_is_promised_plain_decoding_begins_and_hopeless_guesses_never_come():
    counts, _ = run(Trial(TURNS, rest=192), 192, 3.0)
    assert counts[True] == 0
    assert run(Trial(TURNS, rest=192), 1000, 3.0)[0][True] > 500
    assert run(Trial(TURNS, hopeless=True), 1000, 3.0)[0][True] == 0


def test_what_is_expected_to_pay_is_not_interrupted_at_once():
    counts, _ = run(Trial(TURNS, begin=96), 90, 2.0)
    assert counts[False] == 0


def test_a_controller_stops_the_draft_and_asks_it_again():
    limits = Limits(n_ctx=100, take_turns=True, exact_width=8, costs=(0.5,) * 7)
    controller = Controller(limits, trial=Trial(TURNS))
    total, now, paths = 0, 0.0, []
    for _ in range(60):
        total, now = total + 1, now + (3.0 if controller.trial.speculate else 1.0)
        if (changed := controller.progress(total, now, 1, "a")) is not None:
            paths.append(changed.path_min)
    assert paths[0] > 1.0  # not even asked
    assert paths[1] < 1.0
