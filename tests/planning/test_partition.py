"""The split of layers against all splits there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import PlanError
from pipeinfer.models.shard import stage_layers
from pipeinfer.planning.partition import (
    Load,
    Member,
    by_slowest,
    check_fits,
    choose,
    measure,
    partition,
)

costs = st.integers(1, 9).map(float)
sizes = st.integers(0, 5).map(float)


@st.composite
def problems(draw):
    n = draw(st.integers(1, 7))
    load = Load(
        tuple(draw(st.lists(costs, min_size=n, max_size=n))),
        tuple(draw(st.lists(sizes, min_size=n, max_size=n))),
        draw(sizes), draw(sizes), draw(sizes), draw(sizes), draw(sizes))
    members = tuple(
        Member(f"rank {i}", draw(costs), draw(sizes),
               draw(st.one_of(st.just(float("inf")), st.integers(2, 30).map(float))),
               draw(st.one_of(st.none(), st.none(), st.integers(0, 3))), draw(st.booleans()))
        for i in range(draw(st.integers(1, 4))))
    return load, members


def all_splits(load, members):
    """Every allowed split, the slow way."""
    n = len(load.costs)
    for counts in itertools.product(range(n + 1), repeat=len(members)):
        if sum(counts) != n:
            continue
        split = measure(load, members, counts)
        if all((count == member.layers if member.layers is not None
                else count > 0 or member.optional) and size <= member.memory
               for count, size, member in zip(counts, split.sizes, members, strict=True)):
            yield split


def key(split):
    return (split.slowest, sum(map(bool, split.counts)), split.total,
            sum(s * s for s in split.seconds), [-c for c in split.counts])


@given(problems())
def test_the_split_is_the_best_of_all(problem):
    load, members = problem
    splits = list(all_splits(load, members))
    if not splits:
        with pytest.raises(PlanError):
            partition(load, members)
        return
    found = partition(load, members)
    best = min(splits, key=key)
    assert key(found)[:4] == key(best)[:4]
    assert found in splits


@given(st.integers(1, 40), st.integers(1, 9))
def test_equal_ranks_share_equally(n, ranks):
    if ranks > n:
        return
    split = partition(Load((1.0,) * n, (1.0,) * n), [Member(str(i), 1.0) for i in range(ranks)])
    assert [(a, b) for _, a, b in split.ranges()] == stage_layers(n, ranks)


def test_too_little_memory_names_the_rank_and_the_lack():
    gib = 2.0**30
    load = Load((1.0,) * 4, (gib,) * 4, last_bytes=2 * gib)
    members = [Member("rank 1 on ant", 1.0, memory=4 * gib),
               Member("rank 2 on bee", 1.0, memory=1 * gib)]
    with pytest.raises(PlanError, match=r"rank 2 on bee needs 4\.0 GiB for 2 layers") as caught:
        partition(load, members)
    assert "has 1.0 GiB: it lacks 3.0 GiB" in str(caught.value)
    assert "needs 6.0 GiB but all ranks together have 5.0 GiB" in str(caught.value)


def test_memory_that_suffices_in_sum_only_is_said_so():
    load = Load((1.0, 1.0), (3.0, 3.0))
    members = [Member("a", 1.0, memory=4.0), Member("b", 1.0, memory=2.5)]
    with pytest.raises(PlanError, match="b needs"):
        partition(load, members)
    check_fits(measure(load, members, (1, 0)), members)


@pytest.mark.parametrize(("layers", "says"), [
    ((3, 3), "add up to 6; the model has 4"),
    ((1, 1), "add up to 2; the model has 4"),
    ((4, None), "every rank needs at least one"),
])
def test_set_counts_that_cannot_be(layers, says):
    members = [Member(str(i), 1.0, layers=count) for i, count in enumerate(layers)]
    with pytest.raises(PlanError, match=says):
        partition(Load((1.0,) * 4, (1.0,) * 4), members)


def test_a_slow_rank_is_left_out_only_if_that_is_faster():
    """With its one layer, the pipeline is as fast as without it."""
    members = [Member(str(k), cost) for k, cost in enumerate((1.0, 1.0, 15.0))]
    split, left_out = choose(Load((1.0,) * 30, (1.0,) * 30), members, by_slowest)
    assert split.slowest == 15.0
    assert left_out == {}
