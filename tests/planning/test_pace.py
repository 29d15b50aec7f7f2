"""What members of wide stages tell: computing and waiting, compared over the same runs."""

from __future__ import annotations

import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.planning.pace import WINDOW, StagePace


def paced(grid, *seconds):
    """The times of a grid whose leaders compute for so long."""
    pace = StagePace(grid, ())
    for run in range(WINDOW):
        pace.saw(1, [(float(run), took, 0.0) for took in seconds])
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
    for run in range(WINDOW):
        assert pace.slowdown == pytest.approx([1.0] * 3)  # a few runs may be slow
        pace.saw(1, [(float(run), took, 0.0) for took in (1.2e-3, 4.8e-3, 3.6e-3)])
    assert pace.slowdown == pytest.approx([1.0, 2.0, 1.0])  # all take 1.2 times as long as planned
    assert pace.drift == pytest.approx([1.0] * 3)  # none has become slower
    for run in range(WINDOW):
        pace.saw(1, [(float(run), took, 0.0) for took in (1.2e-3, 4.8e-3, 9e-3)])
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
