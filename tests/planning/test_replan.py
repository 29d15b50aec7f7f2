"""Who takes over the layers of lost stages, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import PlanError
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.replan import Holding, replan
from tests.kit.sample import examples


def load(n, last=0.0):
    return Load((1.0,) * n, (1.0,) * n, last_cost=last, last_bytes=last)


def members(*memories, speeds=None):
    return {rank: Member(f"rank {rank}", (speeds or {}).get(rank, 1.0), memory=memory)
            for rank, memory in enumerate(memories, 1)}


def ranges(found):
    return [(h.rank, h.start, h.stop) for h in found]


MIDDLE, END = [Holding(1, 0, 4), Holding(3, 8, 12)], [Holding(2, 4, 8), Holding(3, 8, 12)]
GAPS = {
    "a spare takes the whole gap and nobody else moves": (
        members(9, 9, 9, 9), MIDDLE, [4], [(1, 0, 4), (4, 4, 8), (3, 8, 12)]),
    "neighbours share a gap evenly": (members(9, 0, 9), MIDDLE, [], [(1, 0, 6), (3, 6, 12)]),
    "the only neighbour of a gap at an end": (
        members(0, 9, 9), END, [], [(2, 0, 8), (3, 8, 12)]),
    "what a neighbour cannot hold is passed on": (
        members(0, 6, 9), END, [], [(2, 0, 6), (3, 6, 12)]),
    "the fastest spare takes the larger gap": (
        members(9, 9, 9, 9, speeds={3: 2.0}), [Holding(1, 3, 5)], [3, 4],
        [(3, 0, 2), (1, 2, 7), (4, 7, 12)]),
    "the fewest stages of equal arrangements": (
        members(9, 9, 9, 9, 9), MIDDLE, [4, 5], [(1, 0, 4), (4, 4, 8), (3, 8, 12)]),
}


@pytest.mark.parametrize("name", GAPS)
def test_who_fills_a_gap(name):
    who, held, spares, wanted = GAPS[name]
    assert ranges(replan(load(12), who, held, spares)) == wanted


def test_too_little_memory_says_what_is_missing():
    with pytest.raises(PlanError, match=r"rank 1, rank 3\).*missing"):
        replan(load(12), {r: m for r, m in members(5, 5, 5).items() if r != 2},
               [Holding(1, 0, 4), Holding(3, 8, 12)], [])
    with pytest.raises(PlanError, match="no rank is left"):
        replan(load(12), {}, [], [])


@pytest.mark.parametrize(("lost", "found"), [
    ([Holding(2, 4, 8)], [(1, 0, 4), (10, 4, 8), (3, 8, 12)]),
    ([Holding(1, 0, 4), Holding(2, 4, 8)], [(10, 0, 4), (11, 4, 8), (3, 8, 12)]),
    ([Holding(1, 0, 4), Holding(3, 8, 12)], [(10, 0, 4), (2, 4, 8), (11, 8, 12)]),
])
def test_spares_stand_in_for_lost_stages_one_for_one(lost, found):
    """What they have in their page cache, or were sent, is what they take over."""
    who = {rank: Member(f"rank {rank}", 1.0, memory=12.0) for rank in (1, 2, 3, 10, 11, 12)}
    held = [holding for holding in (Holding(1, 0, 4), Holding(2, 4, 8), Holding(3, 8, 12))
            if holding not in lost]
    assert ranges(replan(load(12), who, held, [10, 11, 12], lost)) == found


@st.composite
def situations(draw):
    n = draw(st.integers(1, 7))
    k = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=k - 1, max_size=k - 1)))
    bounds = [0, *cuts, n]
    stages = [Holding(rank, a, b) for rank, (a, b) in enumerate(
        itertools.pairwise(bounds), 1) if a < b]
    held = [stage for stage in stages if draw(st.booleans())]
    lost = [stage for stage in stages if stage not in held]
    spares = list(range(10, 10 + draw(st.integers(0, 2))))
    ranks = [h.rank for h in held] + spares
    memory = {rank: Member(f"rank {rank}", draw(st.sampled_from([1.0, 2.0, 3.0])),
                           memory=draw(st.integers(1, 8))) for rank in ranks}
    return load(n, draw(st.sampled_from([0.0, 1.0]))), memory, held, spares, lost


def best(work, who, order):
    """(layers moved, slowest) over every contiguous split of an order."""
    n, found = len(work.costs), None
    for cuts in itertools.combinations_with_replacement(range(n + 1), len(order) - 1):
        bounds = [0, *cuts, n]
        moved, slowest = 0, 0.0
        for h, a, b in zip(order, bounds, bounds[1:], strict=False):
            if a < b and work.stage_bytes(a, b) > who[h.rank].memory:
                break
            moved += b - a - max(0, min(b, h.stop) - max(a, h.start))
            slowest = max(slowest, who[h.rank].per_cost * work.stage_cost(a, b) if a < b else 0.0)
        else:
            found = min(found or (n + 1, 0.0), (moved, slowest))
    return found


@examples(300)
@given(situations())
def test_no_split_of_the_same_order_is_better(situation):
    from pipeinfer.planning.replan import _with_spares

    work, who, held, spares, lost = situation
    wanted = None
    for limit in (lost, None):
        order = _with_spares(work, who, held, spares, limit)
        here = best(work, who, order) if order else None
        if here and (wanted is None or here[0] < wanted[0]):
            wanted = here
        if wanted and wanted[0] == sum(one.stop - one.start for one in lost):
            break
    try:
        found = replan(work, who, held, spares, lost)
    except PlanError:
        assert wanted is None
        return
    assert [h.start for h in found] == [0, *[h.stop for h in found[:-1]]]
    assert found[-1].stop == len(work.costs)
    before = {h.rank: h for h in held}
    moved = sum(h.stop - h.start - max(0, min(h.stop, b.stop) - max(h.start, b.start))
                for h in found for b in [before.get(h.rank, Holding(h.rank, 0, 0))])
    slowest = max(who[h.rank].per_cost * work.stage_cost(h.start, h.stop) for h in found)
    assert (moved, slowest) == wanted
