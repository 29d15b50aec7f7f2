"""Who forms a stage together, and who takes over the slices of those that are lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.errors import PlanError, UsageError
from pipeinfer.planning.partition import Member
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import (
    combined,
    grouped,
    holdings,
    retake,
    share_of,
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


RACKS = {1: "a", 2: "a", 3: "a", 4: "b", 5: "b", 6: "b"}


@pytest.mark.parametrize(("widths", "ranks"), [
    ((2, 2), ((1, 2), (4, 5))),  # rank 3 is spare: the others of its rack are taken
    ((2, 1, 2), ((1, 2), (3,), (4, 5))),
    ((1, 3, 2), ((1,), (4, 5, 6), (2, 3))),
    ((3, 3), ((1, 2, 3), (4, 5, 6))),
])
def test_members_of_a_stage_are_of_one_group(widths, ranks):
    assert grouped(widths, range(1, 7), RACKS) == ranks
    assert grouped(widths, range(1, 7), {})[0] == tuple(range(1, 1 + widths[0]))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4),
       st.lists(st.sampled_from("abc"), min_size=1, max_size=7))
def test_stages_of_one_group_are_found_where_there_are_any(widths, names):
    groups = dict(enumerate(names))
    found = grouped(widths, range(len(names)), groups)
    possible = any(
        all(sum(width for width, own in zip(widths, choice, strict=True) if own == name)
            <= names.count(name) for name in "abc")
        for choice in itertools.product("abc", repeat=len(widths)))
    assert (found is not None) == possible
    for width, team in zip(widths, found or (), strict=False):
        assert len(team) == width
        assert len({groups[rank] for rank in team}) == 1
    used = [rank for team in found or () for rank in team]
    assert len(set(used)) == len(used)


def test_a_grid_that_needs_members_of_two_groups_is_refused():
    with pytest.raises(UsageError, match=r"--grid 1x4 needs members of different groups .*a: ranks "
                                         r"1, 2, 3; b: ranks 4, 5, 6\)"):
        teams_of("1x4", "", range(1, 7), RACKS)


def test_a_spare_of_the_same_group_is_taken_first():
    racks = {1: "a", 2: "a", 3: "b", 4: "b", 8: "b", 9: "a"}
    first = retake(grid((2, 2)), {2}, [8, 9], anyone, racks)
    assert [one.rank for one in first] == [1, 9, 3, 4]
    then = retake(first, {9}, [8], anyone, racks)  # better than to hold two slices
    assert [one.rank for one in then] == [1, 8, 3, 4]


def test_a_larger_slice_takes_more_memory():
    cut = ("h0-1.f0-96.v0-8", "h1-2.f96-128.v8-16")
    assert share_of(Holding(1, 0, 4, 0, cut, (0,))) == 0.75
    assert share_of(Holding(1, 0, 4, 0, cut, (0, 1))) == share_of(Holding(1, 0, 4)) == 1.0


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
    with pytest.raises(PlanError, match=r"slices 0, 1, 2, 3 of layers 0 to 3.*--spares"):
        retake(grid((2,)), {1, 2}, [], anyone)
    with pytest.raises(PlanError, match="no rank with the memory"):
        retake(grid((2,)), {1}, [], lambda rank, holding: False)


def test_a_stage_that_has_lost_everybody_is_joined_to_a_neighbour_with_the_same_slices():
    now = retake(grid((2, 1, 2)), {3}, [], anyone)
    assert [(one.rank, one.start, one.stop, one.slices) for one in now] == [
        (1, 0, 8, (0, 1)), (2, 0, 8, (2, 3)), (4, 8, 12, (0, 1)), (5, 8, 12, (2, 3))]
    no_room = retake(grid((2, 1, 2)), {3}, [], lambda rank, holding: holding.stop != 8)
    assert [(one.rank, one.start, one.stop) for one in no_room] == [
        (1, 0, 4), (2, 0, 4), (4, 4, 12), (5, 4, 12)]
    one_left = retake(grid((2, 1, 2)), {1, 2, 3, 5}, [], anyone)
    assert one_left == (Holding(4, 0, 12, 0, CUT, (0, 1, 2, 3)),)


def test_layers_that_are_cut_otherwise_are_never_taken():
    held = [structs.replace(one, cut=CUT[::-1]) if one.rank == 3 else one
            for one in grid((2, 1))]
    with pytest.raises(PlanError, match=r"layers 4 to 7.*--spares"):
        retake(held, {3}, [], anyone)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_slice_is_held_once_whoever_is_lost(widths, data):
    held = grid(widths)
    ranks = [one.rank for one in held]
    lost = data.draw(st.sets(st.sampled_from(ranks)))
    spares = list(range(20, 20 + data.draw(st.integers(0, 3))))
    try:
        now = retake(held, lost, spares, anyone)
    except PlanError:
        assert len(lost) == len(ranks)
        assert not spares
        return
    assert not lost & {one.rank for one in now}
    assert len({one.rank for one in now}) == len(now)
    at = 0
    for after in stages_of(now):
        assert sorted(i for one in after for i in one.slices) == [0, 1, 2, 3]
        assert [one.member for one in after] == list(range(len(after)))
        (start, stop, cut), = {(one.start, one.stop, one.cut) for one in after}
        assert (start, cut) == (at, CUT)
        at = stop
    assert at == held[-1].stop
    if not any(all(one.rank in lost for one in team) for team in stages_of(held)):
        assert len(stages_of(now)) == len(widths)
    for one in held:  # who lives keeps what it holds
        assert one.rank in lost or any(
            other.rank == one.rank and set(one.slices) <= set(other.slices) for other in now)
