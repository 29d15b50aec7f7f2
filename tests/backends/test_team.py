"""Members of a stage sum up parts: through shared memory and as messages, the same bits."""

from __future__ import annotations

import contextlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.backends.team import (
    SUM_TYPES,
    PeerFailed,
    Region,
    TeamShape,
    add_up,
    lengthen,
    shorten,
)
from pipeinfer.errors import BackendError, ProtocolError, TransportTimeout
from tests.kit.teams import WAYS, needs_c, teams_of

HOLDERS = [((0,),), ((0, 1),), ((0,), (1,)), ((0,), (1,), (2,)), ((0, 2), (1,)), ((0,), (1, 2, 3))]


class Stage:
    """All members of a stage, each to be used by threads of its own."""

    def __init__(self, way, holders, kind="f32", watch=lambda index: None, vocabulary=()):
        self.holders, self.n = holders, sum(map(len, holders))
        self.teams = teams_of(way, holders, kind, vocabulary=vocabulary, watch=watch)

    def each(self, work):
        """work(team, slice) by every slice at once, in order of slices; what each gave."""
        owners = [(team, index) for team, held in zip(self.teams, self.holders, strict=True)
                  for index in held]
        with ThreadPoolExecutor(self.n) as pool:
            futures = {index: pool.submit(work, team, index) for team, index in owners}
            return [futures[index].result(20) for index in range(self.n)]

    def begin(self, run_id, should_stop=None):
        """Begin a run that nobody has cancelled."""
        assert not any([team.begin(run_id, cancelled=False) for team in self.teams])
        for team in self.teams:
            team.arm(should_stop)

    def ones(self):
        """Whether each slice's first sum was made."""
        return self.each(lambda member, index: member.part(index).add(np.ones(8, np.float32), 0))

    def close(self):
        for team in self.teams:
            team.close()


@pytest.fixture
def stage():
    with contextlib.ExitStack() as made:
        yield lambda *args, **given: made.enter_context(contextlib.closing(Stage(*args, **given)))


@pytest.mark.parametrize("kind", SUM_TYPES)
@pytest.mark.parametrize("holders", HOLDERS)
@pytest.mark.parametrize("way", WAYS)
def test_parts_are_added_in_the_order_of_slices(stage, way, holders, kind):
    team = stage(way, holders, kind)
    rng = np.random.default_rng(1)
    for run_id in range(3):
        parts = rng.standard_normal((5, team.n, 48)) * 10.0 ** rng.integers(-9, 4, (5, team.n, 48))
        parts = parts.astype(np.float32)  # some too small for f16 but as a subnormal, or at all
        team.begin(run_id)

        def sums(member, index, parts=parts):
            found = []
            for place in range(5):
                own = parts[place, index].copy()
                assert member.part(index).add(own, place)
                found.append(own)
            return np.stack(found)

        for found in team.each(sums):
            for place in range(5):
                expected = add_up([shorten(part, kind) for part in parts[place]], kind)
                assert found[place].tobytes() == expected.tobytes()
    assert team.teams[0].count == 15


@pytest.mark.parametrize("kind", SUM_TYPES)
@pytest.mark.parametrize("holders", HOLDERS[2:])
def test_large_parts_are_added_up_in_shares_with_the_same_bits(stage, holders, kind):
    team = stage("messages", holders, kind)
    parts = (np.random.default_rng(2).standard_normal((team.n, 9001)) * 30).astype(np.float32)
    expected = add_up([shorten(part, kind) for part in parts], kind)
    team.begin(0)

    def sums(member, index):
        own = parts[index].copy()
        assert member.part(index).add(own, 0)
        small = np.ones(8, np.float32)
        assert member.part(index).add(small, 1)
        return own

    assert all(found.tobytes() == expected.tobytes() for found in team.each(sums))


@pytest.mark.parametrize("way", WAYS)
def test_the_leader_stops_everyone_at_the_same_sum(stage, way):
    team = stage(way, ((0,), (1, 2), (3,)))
    for run_id, at in ((7, 1), (8, 3), (9, 0)):
        asked = []

        def stop(asked=asked, at=at):
            asked.append(None)
            return len(asked) > at

        team.begin(run_id, stop)

        def sums(member, index):
            part = member.part(index)
            done = 0
            for place in range(12):
                if not part.add(np.ones(8, np.float32), place):
                    break
                done += 1
            return done

        assert team.each(sums) == [2 * at + 1] * 4  # looks after the feed forward of each layer
        for one in team.teams:
            one.check()  # nothing is wrong
    team.begin(10)
    assert team.ones() == [True] * 4


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_cancelled_is_skipped_by_all_sooner_or_later(stage, way):
    team = stage(way, ((0,), (1, 2)))
    leader, other = team.teams
    assert leader.begin(1, cancelled=True)
    assert other.begin(1, cancelled=False)  # it hears so before it begins
    assert not other.begin(2, cancelled=False)  # the leader has not said anything
    other.arm(None)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(other.part(i).add, np.ones(8, np.float32), 0) for i in (1, 2)]
        assert leader.begin(2, cancelled=True)
        assert [one.result(20) for one in waiting] == [False, False]
    other.check()
    for run_id in range(3, 63):  # the leader is far ahead
        assert leader.begin(run_id, cancelled=True)
    for run_id in range(3, 63):
        assert other.begin(run_id, cancelled=False)
    team.begin(63)
    assert team.ones() == [True] * 3


@pytest.mark.parametrize("way", WAYS)
def test_a_member_that_fails_ends_the_others_at_their_next_sum(stage, way):
    team = stage(way, ((0,), (1,), (2,)))
    team.begin(4)

    def sums(member, index):
        if index == 1:
            member.fail(1)
            return None
        return member.part(index).add(np.ones(8, np.float32), 0)

    assert team.each(sums) == [False, None, False]
    for member in (0, 2):
        with pytest.raises(PeerFailed, match="failed in run 4"):
            team.teams[member].check()


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_without_end_is_ended_by_its_watch(stage, way):
    awaited = []

    def watch(index):
        awaited.append(index)
        if len(awaited) > 2:
            raise TransportTimeout(rank=2, peer=1, tag="SUM", run_id=5, seconds=0.1)

    team = stage(way, ((0,), (1,)), watch=watch)
    other = team.teams[1]
    other.begin(5, cancelled=False)
    other.arm(None)
    assert not other.part(1).add(np.ones(8, np.float32), 0)
    with pytest.raises(TransportTimeout, match=r"rank 2 waited .* for SUM from rank 1, run 5"):
        other.check()
    assert set(awaited) == {0}


@pytest.mark.parametrize(("place", "count", "run_id"), [(1, 8, 6), (0, 4, 6), (0, 8, 9)])
@pytest.mark.parametrize("way", WAYS)
def test_members_that_are_not_at_the_same_sum_say_so(stage, way, place, count, run_id):
    team = stage(way, ((0,), (1,)))
    team.teams[0].begin(6, cancelled=False)
    team.teams[1].begin(run_id, cancelled=False)
    for one in team.teams:
        one.arm(None)
    wrong = team.each(lambda member, index: member.part(index).add(
        np.ones(count if index else 8, np.float32), place if index else 0))
    assert wrong == [False, False]
    with pytest.raises(ProtocolError, match="not at the same sum of run 6"):
        team.teams[0].check()


@pytest.mark.parametrize("holders", HOLDERS)
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_put_beside_each_other(stage, way, holders):
    n = sum(map(len, holders))
    cuts = np.cumsum([0, *range(3, 3 + n)]).tolist()
    vocabulary = tuple(itertools.pairwise(cuts))
    team = stage(way, holders, vocabulary=vocabulary)
    whole = np.arange(2 * cuts[-1], dtype=np.float32).reshape(2, -1)
    for run_id in range(3):
        team.begin(run_id)
        found = team.each(lambda member, index: member.gather(
            index, np.ascontiguousarray(whole[:, slice(*vocabulary[index])])))
        assert np.array_equal(found[holders[0][0]], whole)
        assert all(one is None for index, one in enumerate(found) if index != holders[0][0])
    with pytest.raises(BackendError, match="slice 0 gave 1 logits"):
        team.teams[0].gather(0, np.zeros((1, 1), np.float32))


values = st.integers(0, 2**32 - 1)


@needs_c
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@given(bits=st.lists(values, min_size=1, max_size=50))
def test_c_and_numpy_round_alike(kind, bits):
    numbers = np.array(bits, np.uint32).view(np.float32)
    own = lengthen(shorten(numbers, kind), kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeinfer.backends.team.compiled", lambda: None)
        expected = lengthen(shorten(numbers, kind), kind)
    real = ~np.isnan(numbers)
    assert own[real].tobytes() == expected[real].tobytes()
    assert np.isnan(own[~real]).all()
    assert np.isnan(expected[~real]).all()


@needs_c
def test_names_of_shared_memory_are_checked_and_not_left_behind():
    shape = TeamShape(((0,), (1,)), 0, "f32", 64)
    region = Region.create(shape)
    name = region.name
    other = Region.open(name, shape)
    region.forget_name()
    with pytest.raises(BackendError, match="--set sum_path=messages"):
        Region.open(name, shape)
    for wrong in ("../etc/passwd", "pipeinfer-sums-/x", ""):
        with pytest.raises(ProtocolError, match="no name"):
            Region.open(wrong, shape)
    region.close()
    other.close()


@needs_c
def test_what_leaders_left_who_were_killed_is_swept_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setattr("pipeinfer.backends.team._FOLDER", tmp_path)
    shape = TeamShape(((0,), (1,)), 0, "f32", 64)
    held = Region.create(shape)
    left, young, other = (tmp_path / name for name in (
        "pipeinfer-sums-left", "pipeinfer-sums-young", "something-else"))
    for path in (left, young, other):
        path.write_bytes(b"")
    for path in (left, other, tmp_path / held.name):
        os.utime(path, (0, 0))
    Region.create(shape).close()
    assert {path.name for path in tmp_path.iterdir()} == {held.name, young.name, other.name}
    held.close()


@needs_c
def test_without_room_there_is_no_shared_memory(monkeypatch, tmp_path):
    shape = TeamShape(((0,), (1,)), 0, "f32", 64)
    monkeypatch.setattr("pipeinfer.backends.team._FOLDER", tmp_path / "missing")
    assert Region.create(shape) is None

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeinfer.backends.team._FOLDER", tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    assert Region.create(shape) is None
    assert not list(tmp_path.iterdir())
