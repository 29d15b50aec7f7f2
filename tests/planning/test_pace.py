"""How long stages take, and their members: what is measured of their runs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.planning.pace import WINDOW, StagePace

CURVE = ((2, 1.5), (4, 2.0))


def feed(pace, seconds, count=WINDOW, rows=1):
    """`count` runs that take each stage `seconds` of its own."""
    for _ in range(count):
        pace.saw(rows, tuple((0.0, one, 0.0) for one in seconds))


def paced(grid, *seconds):
    """The times of a grid whose leaders compute for so long."""
    pace = StagePace(grid, ())
    feed(pace, seconds)
    return pace


def test_members_are_compared_over_the_runs_that_all_have_told_of():
    pace = paced(Grid((2, 1)), 2e-3, 5e-3)
    assert pace.members == []
    assert not pace.known
    for runs in (16, 32, 48):
        pace.reported(1, runs, 0.1 * runs, 0.3 * runs)
    for runs in (32, 48, 64):  # the first report was lost, another is early
        pace.reported(2, runs, 0.4 * runs, 0.1 * runs)
    pace.reported(None, 16, 9.0, 9.0)  # of a member that is there no more
    assert pace.known
    assert pace.members == [
        pytest.approx((2e-3, 6e-3)), pytest.approx((8e-3, 2e-3)), pytest.approx((5e-3, 0.0))]


def test_a_stage_that_was_slow_from_its_first_run_is_slow_against_the_plan():
    pace = StagePace(Grid.plain(3), (), planned=(1e-3, 2e-3, 3e-3))
    for _ in range(WINDOW):
        assert pace.slowdown == pytest.approx([1.0] * 3)  # a few runs may be slow
        feed(pace, (1.2e-3, 4.8e-3, 3.6e-3), 1)
    assert pace.slowdown == pytest.approx([1.0, 2.0, 1.0])  # all take 1.2 times as long as planned
    assert pace.drift == pytest.approx([1.0] * 3)  # none has become slower
    feed(pace, (1.2e-3, 4.8e-3, 9e-3))
    assert pace.slowdown == pytest.approx([1.0, 2.0, 2.5])
    assert paced(Grid.plain(2), 2e-3, 5e-3).slowdown == [1.0, 1.0]  # nothing was measured


def test_only_what_was_lately_counts():
    pace = paced(Grid((2,)), 1.0)
    for runs in range(1, 11):
        pace.reported(1, runs, float(runs), 0.0)
        pace.reported(2, runs, max(float(runs), 5.0 * runs - 20), 0.0)
    assert pace.members[1][0] == pytest.approx(5.0)


def test_a_plain_stage_is_its_own_only_member():
    pace = paced(Grid.plain(2), 2e-3, 5e-3)
    assert pace.known
    assert pace.members == []
    assert pace.drift == pace.slowdown


def test_nothing_is_said_before_there_are_enough_runs():
    pace = StagePace(Grid.plain(2), CURVE)
    feed(pace, [0.1, 0.2], 15)
    assert not pace.known
    assert pace.seconds == [0.0, 0.0]
    assert pace.slowdown == [1.0, 1.0]
    feed(pace, [0.1, 0.2], 1)
    assert pace.known
    assert pace.seconds == pytest.approx([0.1, 0.2])
    assert not pace.settled
    feed(pace, [0.1, 0.2], WINDOW - 16)
    assert pace.settled


@pytest.mark.parametrize(("rows", "cost"), [(1, 1.0), (2, 1.5), (3, 1.75), (4, 2.0)])
def test_runs_of_several_rows_are_brought_down_to_one_row(rows, cost):
    pace = StagePace(Grid.plain(3), CURVE)
    feed(pace, [0.1 * cost, 0.2 * cost, 0.3 * cost], rows=rows)
    assert pace.seconds == pytest.approx([0.1, 0.2, 0.3])


def test_runs_that_the_curve_does_not_reach_are_left_out():
    pace = StagePace(Grid.plain(1), CURVE)
    feed(pace, [0.1])
    feed(pace, [9.0], rows=5)
    assert pace.seconds == pytest.approx([0.1])
    alone = StagePace(Grid.plain(1), ())
    feed(alone, [9.0], rows=2)
    assert not alone.known


def test_runs_without_a_time_of_each_stage_are_left_out():
    pace = StagePace(Grid.plain(2), CURVE)
    pace.saw(1, np.zeros((0, 2)))
    feed(pace, [0.1] * 3)
    feed(pace, [0.1])
    assert not pace.known


def test_a_few_slow_runs_do_not_make_a_stage_slow():
    rng = random.Random(1)
    pace = StagePace(Grid.plain(2), CURVE)
    times = [0.1] * 62 + [5.0, 7.0]
    rng.shuffle(times)
    for first in times:
        pace.saw(1, ((0.0, first, 0.0), (0.0, 0.1, 0.0)))
    assert pace.seconds == pytest.approx([0.1, 0.1])
    assert pace.slowdown[1] == pytest.approx(1.0)


def test_a_stage_that_stalls_now_and_then_counts_as_slower():
    """A quarter of its runs takes five times as long: a median would not see it."""
    pace = StagePace(Grid.plain(1), CURVE)
    for number in range(4 * WINDOW):
        feed(pace, [0.5 if number % 4 == 0 else 0.1], 1)
    assert 0.15 < pace.seconds[0] < 0.2


def test_only_the_stage_that_became_slow_is_slow_and_only_as_long_as_it_is():
    pace = StagePace(Grid.plain(3), CURVE)
    feed(pace, [0.1, 0.2, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 1.0, 1.0])
    feed(pace, [0.1, 0.6, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 3.0, 1.0])
    assert pace.seconds == pytest.approx([0.1, 0.6, 0.1])
    feed(pace, [0.1, 0.2, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 1.0, 1.0])


def test_the_best_is_a_figure_of_many_runs():
    pace = StagePace(Grid.plain(1), CURVE)
    feed(pace, [0.1])
    feed(pace, [0.001], 1)  # one run that the clock got wrong
    feed(pace, [0.1], 200)
    assert pace.slowdown[0] < 1.05


def test_a_stage_that_waits_for_its_own_members_is_not_slow():
    pace = StagePace(Grid.plain(2), CURVE)
    for run in range(2 * WINDOW):
        waited = 0.0 if run < WINDOW else 0.4
        pace.saw(1, ((0.0, 0.1 + waited, waited), (1.0, 0.1, 0.0)))
    assert pace.seconds == pytest.approx([0.1, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 1.0])
