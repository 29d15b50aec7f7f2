"""Which kind of decoding a probe settles on, and how much it spends on finding out."""

from __future__ import annotations

import pytest

from pipeinfer.controller import Controller
from pipeinfer.policy import Limits
from pipeinfer.probing import Probe


def run(probe, tokens, guessing, plain, lanes=1, key="a", start=(0, 0.0)):
    """Decode so many tokens at these speeds; tokens of each kind, and where it stopped."""
    total, now = start
    counts = {True: 0, False: 0}
    for _ in range(tokens):
        counts[probe.speculate] += 1
        now += 1.0 / (guessing if probe.speculate else plain)
        total += 1
        probe.tokens(total, now, lanes, key)
    return counts, (total, now)


@pytest.mark.parametrize(("guessing", "plain"), [(3.0, 1.0), (1.3, 1.0), (1.0, 1.3), (1.0, 3.0)])
def test_the_better_kind_gets_nearly_all_tokens(guessing, plain):
    counts, _ = run(Probe(), 4000, guessing, plain)
    assert counts[guessing > plain] > 0.93 * 4000
    assert counts[guessing < plain] > 0  # it is looked at now and then


def test_equal_kinds_mean_guessing():
    counts, _ = run(Probe(), 2000, 1.0, 1.0)
    assert counts[True] > counts[False]


def test_a_change_of_the_world_is_noticed():
    probe = Probe()
    _, at = run(probe, 2000, 1.0, 2.0)
    assert not probe.speculate
    counts, _ = run(probe, 6000, 4.0, 2.0, start=at)
    assert counts[True] > counts[False]


def test_numbers_of_requests_are_judged_apart():
    probe = Probe()
    _, at = run(probe, 600, 2.0, 1.0, lanes=1)
    _, at = run(probe, 900, 1.0, 2.0, lanes=8, key="b", start=at)
    assert not probe.speculate
    probe.tokens(at[0], at[1], 1, "c")
    assert probe.speculate


def test_spans_with_prompts_in_them_do_not_count():
    probe = Probe()
    total, now = 0, 0.0
    for _ in range(500):  # a request comes every 20 tokens: no span is ever whole
        for _ in range(20):
            total, now = total + 1, now + 1.0
            probe.tokens(total, now, 1, total // 20)
        now += 50.0
        probe.tokens(total, now, 0, None)
    assert probe.speculate
    assert not any(kind.guessing for kind in probe._kinds.values())


def test_the_controller_falls_silent_and_speaks_again():
    controller = Controller(Limits(n_ctx=100), probe=Probe())
    now, changes = 0.0, []
    for total in range(1, 400):
        now += 1.0 if controller.limits.path_min <= 1.0 else 0.5
        limits = controller.progress(total, now, 1, "a")
        if limits is not None:
            changes.append(limits.path_min > 1.0)
    assert changes[0]
    assert True in changes
    assert False in changes
    pinned = Controller(Limits(n_ctx=100), pinned={"path_min"}, probe=Probe())
    assert all(pinned.progress(total, total, 1, "a") is None for total in range(200))
