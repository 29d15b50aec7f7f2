"""What a pipeline was used for, and stages' times without the waiting for each other's cores."""

from __future__ import annotations

import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.core.policy import Policy
from pipeinfer.planning.pace import WINDOW, Interval, LoadWatch, Seen, Share, StagePace, own_seconds

HERE = [Share("h")] * 3


def test_intervals_that_do_not_meet_are_their_own():
    found = own_seconds([Interval(0, 0.0, 1.0), Interval(1, 1.0, 2.0)], HERE, {"h": 1})
    assert found == pytest.approx([1.0, 2.0])


def test_two_at_once_on_one_core_count_half():
    found = own_seconds([Interval(0, 0.0, 2.0), Interval(1, 1.0, 2.0)], HERE, {"h": 1})
    assert found == pytest.approx([1.5, 1.5])
    found = own_seconds([Interval(i, 5.0, 3.0) for i in range(3)], HERE, {"h": 2})
    assert found == pytest.approx([2.0, 2.0, 2.0])


def test_enough_cores_other_hosts_and_unknown_ones_change_nothing():
    both = [Interval(0, 0.0, 2.0), Interval(1, 0.0, 2.0)]
    assert own_seconds(both, HERE, {"h": 2}) == [2.0, 2.0]
    assert own_seconds(both, HERE, {}) == [2.0, 2.0]
    assert own_seconds(both, [Share("h"), Share("i")], {"h": 1, "i": 1}) == [2.0, 2.0]
    threads = [Share("h", 2), Share("h", 2)]
    assert own_seconds(both, threads, {"h": 2}) == pytest.approx([1.0, 1.0])


def overlapping(pace):
    """Three stages at 4 ms on two cores; each waits for the others half of its time."""
    for run in range(WINDOW):
        start = run * 6e-3
        pace.saw(1, tuple((start + after, 6e-3, 0.0) for after in (0.0, 6e-3, 12e-3)))


def test_a_pace_tells_computing_from_waiting():
    told, blind = StagePace(Grid.plain(3), (), HERE, {"h": 2}), StagePace(Grid.plain(3), ())
    overlapping(told)
    overlapping(blind)
    assert blind.seconds == pytest.approx([6e-3] * 3)
    assert told.seconds == pytest.approx([4e-3] * 3, rel=0.05)


def test_prompts_take_cores_but_have_no_figure():
    pace = StagePace(Grid.plain(2), ((4, 2.0),), [Share("h"), Share("h")], {"h": 1})
    for run in range(WINDOW):
        pace.saw(64, ((run, 0.5, 0.0), (run + 0.5, 0.5, 0.0)))
        pace.saw(1, ((run + 0.5, 0.2, 0.0), (run + 1.0, 0.2, 0.0)))
    assert pace.seconds == pytest.approx([0.1, 0.1], rel=0.1)


def test_streams_prompts_and_tokens_of_the_time_at_work():
    watch = LoadWatch()
    watch.running(1, 10.0)
    watch.prompt(300)
    watch.running(3, 20.0)
    watch.running(0, 30.0)
    watch.running(0, 90.0)  # nothing happened: it does not count
    seen = watch.lately(100)
    assert (seen.busy, seen.streams, seen.speed) == (20.0, 40.0, 5.0)
    mix = seen.mix(Policy.PIPEINFER, 0.6)
    assert (mix.streams, mix.prompt_rows, mix.acceptance) == (2, 3.0, 0.6)


def test_what_was_long_ago_is_forgotten():
    watch = LoadWatch()
    for minute in range(10):
        watch.running(1, 60.0 * minute)
        watch.running(0, 60.0 * minute + 30.0)
        watch.lately(100 * (minute + 1))
    watch.running(8, 600.0)
    for minute in range(10, 30):
        watch.running(8, 60.0 * minute)
        seen = watch.lately(1000 + 100 * minute)
    assert seen.mix(Policy.ITERATIVE, 0.0).streams == 8
    watch.restart(5000)
    assert watch.lately(5001).tokens == 1


def test_only_like_loads_are_compared():
    one = Seen(10.0, 10.0, 0.0, 100)
    assert one.like(Seen(20.0, 20.0, 0.0, 300))
    assert not one.like(Seen(10.0, 80.0, 0.0, 500))
    assert not one.like(Seen(10.0, 10.0, 2000.0, 100))
    assert not one.like(Seen(1.0, 1.0, 0.0, 10))
