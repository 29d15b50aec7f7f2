"""Which kind of decoding a trial settles on, and how much it spends on finding out."""

from __future__ import annotations

import pytest

from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.worth import OVERLAP, Trial


def run(trial, tokens, guessing, plain, lanes=1, key="a", start=(0, 0.0)):
    """Decode so many tokens at these speeds; tokens of each kind, and where it stopped."""
    total, now = start
    counts = {True: 0, False: 0}
    for _ in range(tokens):
        counts[trial.speculate] += 1
        now += 1.0 / (guessing if trial.speculate else plain)
        total += 1
        trial.tokens(total, now, lanes, key)
    return counts, (total, now)


@pytest.mark.parametrize(("guessing", "plain"), [(3.0, 1.0), (1.3, 1.0), (1.0, 1.3), (1.0, 3.0)])
def test_the_better_kind_gets_nearly_all_tokens(guessing, plain):
    counts, _ = run(Trial(OVERLAP), 4000, guessing, plain)
    assert counts[guessing > plain] > 0.93 * 4000
    assert counts[guessing < plain] > 0  # it is looked at now and then


def test_of_equally_fast_ways_speculation_is_chosen():
    counts, _ = run(Trial(OVERLAP), 2000, 1.0, 1.0)
    assert counts[True] > counts[False]


def test_a_change_of_measured_times_is_noticed():
    trial = Trial(OVERLAP)
    _, at = run(trial, 2000, 1.0, 2.0)
    assert not trial.speculate
    counts, _ = run(trial, 6000, 4.0, 2.0, start=at)
    assert counts[True] > counts[False]


def test_numbers_of_requests_are_judged_apart():
    trial = Trial(OVERLAP)
    _, at = run(trial, 600, 2.0, 1.0, lanes=1)
    _, at = run(trial, 900, 1.0, 2.0, lanes=8, key="b", start=at)
    assert not trial.speculate
    trial.tokens(at[0], at[1], 1, "c")
    assert trial.speculate


@pytest.mark.parametrize(("guessing", "plain"), [(2.0, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("length", [8, 20, 50])
def test_requests_shorter_than_a_span_are_added_up_and_prompts_do_not_count(guessing, plain,
                                                                            length):
    trial, at, counts = Trial(OVERLAP), (0, 0.0), {True: 0, False: 0}
    for key in range(4000 // length):
        found, (total, now) = run(trial, length, guessing, plain, key=key, start=at)
        at = (total, now + 1000.0)  # the next one's prompt
        trial.tokens(*at, 0, None)
        for kind in counts:
            counts[kind] += found[kind]
    assert counts[guessing > plain] > 0.85 * 4000
    (account,) = trial._accounts.values()
    assert account.plain == pytest.approx(plain)


def test_the_controller_stops_and_resumes_speculation():
    controller = Controller(Limits(n_ctx=100), trial=Trial(OVERLAP))
    now, changes = 0.0, []
    for total in range(1, 400):
        now += 1.0 if controller.limits.path_min <= 1.0 else 0.5
        limits = controller.progress(total, now, 1, "a")
        if limits is not None:
            changes.append(limits.path_min > 1.0)
    assert changes[0]
    assert True in changes
    assert False in changes
    pinned = Controller(Limits(n_ctx=100), pinned={"path_min"}, trial=Trial(OVERLAP))
    assert all(pinned.progress(total, total, 1, "a") is None for total in range(200))
