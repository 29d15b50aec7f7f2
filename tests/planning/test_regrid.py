"""Slices on other ranks when some of these have become slow: none is cut anew."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.errors import PlanError
from pipeinfer.planning.partition import Load
from pipeinfer.planning.regrid import GridRoom, regrid
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import cut_layers, holdings, retake, stages_of, teams_of

SHARES = {1: (1.0,), 2: (0.75, 0.25), 3: (0.5, 0.3, 0.2), 4: (0.25,) * 4}
EQUAL = {2: (0.5, 0.5), 3: (1 / 3,) * 3, 4: (0.25,) * 4}


def cut(count, of=""):
    return tuple(f"{of}{index}" for index in range(count))


def grid(widths, slices, layers, first=1):
    teams = teams_of(",".join(map(str, widths)), ",".join(map(str, slices)), range(first, 30))
    stops = [sum(layers[:k + 1]) for k in range(len(layers))]
    return holdings(teams, list(zip([0, *stops], stops, strict=False)), [cut(n) for n in slices])


def rate(seconds, teams):
    """One user's plain decoding, and guesses that fill the pipeline."""
    return 1 / (sum(seconds) + 2 * max(seconds))


def moved(held, speeds, shares=SHARES, **room):
    """The verdict when ranks take so long for the same work (1 unless given)."""
    load = Load((1.0,) * held[-1].stop, (1.0,) * held[-1].stop)
    by_cut = {one.cut: shares[len(one.cut)] for one in held}
    seconds = [speeds.get(one.rank, 1.0) * (one.stop - one.start)
               * sum(by_cut[one.cut][index] for index in one.slices) for one in held]
    ranks = {one.rank for one in held} | set(room.get("spares", ()))
    given_room = GridRoom(by_cut, room.pop("memory", dict.fromkeys(ranks, 1e9)),
                          lambda one: len(one.slices) * (one.stop - one.start),
                          room.pop("kinds", dict.fromkeys(ranks, "")), **room)
    return regrid(load, held, seconds, given_room, rate)


def who(verdict):
    return [(one.rank, one.start, one.stop, one.slices) for one in verdict.held]


def test_a_slow_member_swaps_its_slice_with_a_smaller_one():
    found = moved(grid((2,), (2,), (8,)), {1: 2.0})
    assert who(found) == [(2, 0, 8, (0,)), (1, 0, 8, (1,))]
    assert [one.member for one in found.held] == [0, 1]
    assert found.gain == pytest.approx(2 * 0.75 / 0.75)


def test_equal_ranks_stay_where_they_are_and_a_few_per_cent_are_noise():
    held = grid((2, 2), (2, 2), (4, 4))
    found = moved(held, {1: 1.05, 4: 0.97}, EQUAL)
    assert (found.held, found.gain) == (held, 1.0)


def test_a_slow_member_has_its_slice_taken_where_that_is_worth_it():
    found = moved(grid((2,), (2,), (8,)), {2: 10.0}, EQUAL)
    assert who(found) == [(1, 0, 8, (0, 1))]
    some = moved(grid((2,), (4,), (8,)), {2: 3.0})
    assert who(some) == [(1, 0, 8, (0, 1, 2)), (2, 0, 8, (3,))]


def test_a_spare_stands_in_for_a_slow_member_or_takes_a_slice():
    held = grid((2,), (2,), (8,))
    assert who(moved(held, {2: 2.0}, EQUAL, spares=(9,))) == [(1, 0, 8, (0,)), (9, 0, 8, (1,))]
    alone = (Holding(1, 0, 8, 0, cut(2), (0, 1)),)
    joined = moved(alone, {}, EQUAL, spares=(9,)).held
    assert sorted(one.rank for one in joined) == [1, 9]
    assert [one.slices for one in joined] == [(0,), (1,)]


def test_layers_move_between_stages_that_are_cut_alike_only():
    held = grid((2, 2), (2, 2), (8, 8))
    found = moved(held, {1: 3.0, 2: 3.0}, EQUAL)
    (left, *_), (right, *_) = stages_of(found.held)
    assert (left.stop, right.start) == (4, 4)
    other = tuple(structs.replace(one, cut=cut(2, "x")) if one.start else one for one in held)
    stays = moved(other, {1: 3.0, 2: 3.0}, EQUAL)
    assert cut_layers(stays.held) == cut_layers(other)
    barred = frozenset((0, stop) for stop in range(1, 8))
    assert stages_of(moved(held, {1: 3.0, 2: 3.0}, EQUAL, barred=barred).held)[0][0].stop == 8


def test_a_rank_of_a_narrow_stage_changes_places_with_one_of_a_wide_one():
    held = grid((2, 1), (2, 1), (4, 4))
    found = moved(held, {3: 2.0}, {**EQUAL, 1: (1.0,)})
    assert [one.rank for one in found.held][2] in (1, 2)
    racks = {1: "a", 2: "a", 3: "b"}
    kept = moved(held, {3: 2.0}, {**EQUAL, 1: (1.0,)}, kinds=racks)
    assert {racks[one.rank] for one in stages_of(kept.held)[0]} == {"a"}


def test_rank_0_keeps_the_first_node_and_memory_is_kept():
    held = grid((2,), (2,), (8,), first=0)
    assert moved(held, {0: 2.0}).held == held
    full = moved(grid((2,), (2,), (8,)), {2: 10.0}, EQUAL, memory={1: 8.0, 2: 8.0})
    assert len(full.held) == 2


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_whatever_moves_every_slice_of_every_layer_is_held_once_and_none_is_other(widths, data):
    slices = [data.draw(st.integers(width, 4)) for width in widths]
    layers = [data.draw(st.integers(1, 5)) for _ in widths]
    held = grid(widths, slices, layers)
    speeds = {one.rank: data.draw(st.sampled_from([0.5, 1.0, 2.0, 6.0])) for one in held}
    spares = tuple(range(40, 40 + data.draw(st.integers(0, 2))))
    found = moved(held, speeds, spares=spares)
    assert cut_layers(found.held) == cut_layers(held)
    assert len({one.rank for one in found.held}) == len(found.held)
    assert found.gain >= 1.0
    lost = data.draw(st.sampled_from([one.rank for one in found.held]))
    with contextlib.suppress(PlanError):  # nobody is left of a stage
        after = retake(found.held, {lost}, (), lambda rank, one: True)
        assert cut_layers(after) == cut_layers(held)
        complete(after)
    complete(found.held)


def complete(held):
    """Each stage has all of its slices once, and the member with the first one leads."""
    for team in stages_of(held):
        assert sorted(index for one in team for index in one.slices) == list(
            range(len(team[0].cut)))
        assert [one.member for one in team] == list(range(len(team)))
        assert team[0].slices[0] == 0
        assert len({(one.start, one.stop, one.cut) for one in team}) == 1
