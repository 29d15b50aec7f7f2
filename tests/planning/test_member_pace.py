"""What members of wide stages tell: computing and waiting, compared over the same runs."""

from __future__ import annotations

import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.planning.member_pace import MemberPace


def test_members_are_compared_over_the_runs_that_all_have_told_of():
    pace = MemberPace(Grid((2, 1)))
    assert pace.figures([0.0, 0.0]) == []
    assert not pace.known
    for runs in (16, 32, 48):
        pace.saw(1, runs, 0.1 * runs, 0.3 * runs)
    for runs in (32, 48, 64):  # the first report was lost, another is early
        pace.saw(2, runs, 0.4 * runs, 0.0)
    pace.saw(None, 16, 9.0, 9.0)  # of a member that is there no more
    assert pace.known
    assert pace.shares(1) == [pytest.approx((1.0, 3.0)), pytest.approx((4.0, 0.0))]
    assert pace.shares(2) == []
    assert pace.figures([2e-3, 5e-3]) == [
        pytest.approx((2e-3, 6e-3)), pytest.approx((8e-3, 0.0)), (5e-3, 0.0)]


def test_only_what_was_lately_counts():
    pace = MemberPace(Grid((2,)))
    for runs in range(1, 11):
        pace.saw(1, runs, float(runs), 0.0)
        pace.saw(2, runs, max(float(runs), 5.0 * runs - 20), 0.0)
    assert pace.shares(1)[1][0] == pytest.approx(5.0)
