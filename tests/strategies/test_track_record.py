"""Claims of different sources are compared by what they were worth."""

from __future__ import annotations

import pytest

from pipeinfer.core.drafting import Proposal
from pipeinfer.strategies.proposers.cascade import Cascade, TrackRecord
from tests.kit.drafting import Fixed, job


def one(token, claim):
    return (Proposal(-1, token, claim),)


def test_the_source_that_is_right_wins_over_the_one_that_claims_more():
    cascade = Cascade([Fixed(*one(5, 0.9)), Fixed(*one(7, 0.6))])
    text, named = [1, 2], []
    for _ in range(20):
        named.append(cascade.propose(job(text), lambda: False)[0].token)
        text = [*text, 7]  # the target agrees with the second one
    assert named[0] == 5
    assert set(named[10:]) == {7}


def test_only_places_that_the_text_has_reached_on_the_same_path_count():
    record = TrackRecord([1.0])

    def chance():
        return record.judged(0, job([1]), one(3, 0.5))[1]

    record.add(0, job([1, 2], [4]), one(3, 0.5))
    record.settle(job([1, 2, 4]))  # the place is not reached yet
    assert chance() == 0.5
    record.settle(job([1, 2, 5, 3]))  # it is, but by another path
    assert chance() == 0.5
    record.add(0, job([1, 2], [4]), one(3, 0.5))
    record.settle(job([1, 2, 4, 3], lane=1))  # of another request
    assert chance() == 0.5
    record.settle(job([1, 2, 4, 3]))
    assert chance() > 0.5


@pytest.mark.parametrize("count", [1, 300])
def test_what_is_never_settled_is_forgotten(count):
    record = TrackRecord([1.0])
    for lane in range(count):
        for _ in range(count):
            record.add(0, job([1], lane=lane), one(3, 0.5))
    assert len(record._open) <= 64
    assert all(len(places) <= 64 for places in record._open.values())


def test_a_source_that_is_not_trusted_yet_wins_once_it_was_right():
    record = TrackRecord([0.5, 1.0])

    def best():
        return max((0, 1), key=lambda k: record.judged(k, job([1]), one(3, 0.8 - 0.2 * k))[1])

    assert best() == 1
    for length in range(1, 12):
        text = [3] * length
        for k in (0, 1):
            record.add(k, job(text), one(3 + k, 0.8 - 0.2 * k))
        record.settle(job([*text, 3]))
    assert best() == 0
