"""Who forms a stage together, and who takes over the slices of those that are lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import PlanError, UsageError
from pipeinfer.planning.partition import Member
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import (
    combined,
    holdings,
    retake,
    shares_of,
    stages_of,
    teams_of,
    widths_of,
)

CUT = ("a", "b", "c", "d")


def anyone(rank, holding):
    return True


def grid(widths, n_slices=4):
    teams = teams_of(",".join(map(str, widths)), str(n_slices), range(1, 20))
    ranges = [(4 * i, 4 * i + 4) for i in range(len(widths))]
    return holdings(teams, ranges, [CUT[:n_slices]] * len(widths))


def test_ranks_form_stages_in_their_order():
    teams = teams_of("2,1", "", [1, 2, 3, 4])
    assert teams.ranks == ((1, 2), (3,))
    assert teams.leaders == (1, 3)
    assert teams.shares == ((1.0, 1.0), ())
    assert teams_of("", "", [1, 2]) is None
    assert teams_of("", "4", [1, 2]).ranks == ((1,), (2,))
    assert holdings(teams, [(0, 3), (3, 4)], [("x", "y"), ()]) == (
        Holding(1, 0, 3, 0, ("x", "y"), (0,)), Holding(2, 0, 3, 1, ("x", "y"), (1,)),
        Holding(3, 3, 4))


@pytest.mark.parametrize(("grid", "slices", "what"), [
    ("2x4", "", "8 members, but only 4 ranks"), ("1x4", "3", "every member"),
    ("2x2", "2,2,2", "3 stages"), ("2x2", "x", "how many slices"), ("2x2", "0", "how many"),
    ("2x2", "2:0", "shares"), ("1x2", "2000", "1024"), ("1x2", "-1", "how many"),
])
def test_grids_that_cannot_be_say_what_to_do(grid, slices, what):
    with pytest.raises(UsageError, match=what):
        teams_of(grid, slices, [1, 2, 3, 4])


def test_shares_of_slices():
    assert shares_of("3:2:2", (2,)) == ((3.0, 2.0, 2.0),)
    assert shares_of("4,2", (2, 1)) == ((1.0,) * 4, (1.0,) * 2)
    assert shares_of("2", (1, 2)) == ((1.0, 1.0), (1.0, 1.0))


def test_a_team_is_as_fast_as_its_members_together():
    members = {rank: Member(f"rank {rank}", cost, memory=memory)
               for rank, cost, memory in ((1, 1.0, 8.0), (2, 3.0, 6.0))}
    team, = combined(members, teams_of("1x2", "", [1, 2]))
    assert team.per_cost == pytest.approx(0.75)
    assert team.memory == 12.0


def test_a_spare_takes_the_very_same_slices():
    held = grid((2, 2))
    now = retake(held, {2}, [9], anyone)
    assert now == tuple(h if h.rank != 2 else Holding(9, 0, 4, 1, CUT, (2, 3)) for h in held)


def test_without_a_spare_a_member_of_the_same_stage_holds_more_slices():
    now = retake(grid((2, 2)), {1}, [], anyone)
    assert now[0] == Holding(2, 0, 4, 0, CUT, (0, 1, 2, 3))  # and it leads
    assert widths_of(now) == (1, 2)


def test_where_nobody_is_left_it_says_what_is_missing():
    with pytest.raises(PlanError, match=r"slices 0, 1, 2, 3 of layers 4 to 8.*--spares"):
        retake(grid((2, 1)), {3}, [], anyone)
    with pytest.raises(PlanError, match="no rank is left"):
        retake(grid((2,)), {1}, [], lambda rank, holding: False)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_slice_is_held_once_whoever_is_lost(widths, data):
    held = grid(widths)
    ranks = [one.rank for one in held]
    lost = data.draw(st.sets(st.sampled_from(ranks)))
    spares = list(range(20, 20 + data.draw(st.integers(0, 3))))
    try:
        now = retake(held, lost, spares, anyone)
    except PlanError:
        gone = [all(one.rank in lost for one in team) for team in stages_of(held)]
        assert any(gone)
        return
    assert not lost & {one.rank for one in now}
    assert len({one.rank for one in now}) == len(now)
    for before, after in itertools.zip_longest(stages_of(held), stages_of(now)):
        assert sorted(i for one in after for i in one.slices) == [0, 1, 2, 3]
        assert [one.member for one in after] == list(range(len(after)))
        assert {(one.start, one.stop, one.cut) for one in after} == {
            (before[0].start, before[0].stop, before[0].cut)}
        for one in before:  # who lives keeps what it holds
            assert one.rank in lost or any(
                other.rank == one.rank and set(one.slices) <= set(other.slices) for other in after)
