"""What dealing the layers out anew makes of stages that have become slow."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import structs

from pipeinfer.planning.partition import Load, Member, measure
from pipeinfer.planning.replan import Holding, rebalance


def load(n=12, **parts):
    return Load((1.0,) * n, (1.0,) * n, **parts)


def members(*memories):
    return {rank: Member(f"rank {rank}", 1.0, memory=memory)
            for rank, memory in enumerate(memories, 1)}


class Throughput:
    """Of a pipeline that is full, on cores of its own: its slowest stage sets the pace."""

    def __call__(self, split, ranks=(), now=False):
        return 1.0 / split.slowest

    def faster(self, rank, holders):
        return 1.0


throughput = Throughput()


def dealt(layers, seconds, *, who=None, spares=(), work=None):
    """Ranks in order, with how many layers each gets, and the gain. layers: of ranks 1, 2, ..."""
    ends = [0, *itertools.accumulate(layers)]
    held = [Holding(rank, *ends[rank - 1:rank + 1]) for rank in range(1, len(ends))]
    found = rebalance(work or load(), who or members(*[12.0] * 5), held, seconds, spares,
                      throughput)
    assert [h.start for h in found.held] == [0, *[h.stop for h in found.held[:-1]]]
    return [(h.rank, h.stop - h.start) for h in found.held], found.gain


EVEN = (4, 4, 4)
STAYS = [(1, 4), (2, 4), (3, 4)]
SLOW = [0.4, 1.2, 0.4]
BY_HAND = {rank: structs.replace(member, layers=4) for rank, member in members(*[12.0] * 3).items()}
DEALS = {
    "a slow stage gives layers away": (EVEN, SLOW, {}, [(1, 5), (2, 2), (3, 5)], 1.2 / 0.6),
    "the slowest stage gains": ((6, 6), [0.6, 1.2], {}, [(1, 8), (2, 4)], 1.2 / 0.8),
    "equal speeds": (EVEN, [0.4] * 3, {}, STAYS, 1.0),
    "nearly equal speeds": (EVEN, [0.4, 0.405, 0.398], {}, STAYS, 1.0),
    "uneven, but as the speeds are": ((8, 4), [0.8, 0.8], {}, [(1, 8), (2, 4)], 1.0),
    "a spare stands in for the slowest stage": (
        EVEN, [0.4, 4.0, 0.4], {"spares": [5, 4]}, [(1, 4), (5, 4), (3, 4)], 10.0),
    "no spare is taken where nobody is slow": (EVEN, [0.4] * 3, {"spares": [4]}, STAYS, 1.0),
    "what the others cannot hold stays": (
        EVEN, [0.4, 4.0, 0.4], {"who": members(5.0, 5.0, 5.0)}, [(1, 5), (2, 2), (3, 5)], 2.0),
    "memory leaves no choice": (EVEN, [0.4, 4.0, 0.4], {"who": members(4.0, 4.0, 4.0)}, STAYS, 1.0),
    "counts that a user set do not hold a slow stage": (
        EVEN, SLOW, {"who": BY_HAND}, [(1, 5), (2, 2), (3, 5)], 2.0),
    "the output head is work of the last stage": (
        (5, 5, 2), [0.5] * 3, {"work": load(12, last_cost=3.0)}, [(1, 5), (2, 5), (3, 2)], 1.0),
}


@pytest.mark.parametrize("name", DEALS)
def test_layers_follow_the_times_of_stages(name):
    layers, seconds, given, wanted, gain = DEALS[name]
    assert dealt(layers, seconds, **given) == (wanted, pytest.approx(gain))


def test_a_spare_that_is_too_small_is_not_taken():
    found, gain = dealt(EVEN, SLOW, who=members(12.0, 12.0, 12.0, 1.0), spares=[4])
    assert gain > 1.0
    assert dict(found).get(4, 0) <= 1


def test_every_deal_covers_the_model_fits_and_is_no_slower():
    rng = random.Random(7)
    changed = 0
    for _ in range(200):
        n, k = rng.randint(3, 9), rng.randint(1, 3)
        cuts = [0, *sorted(rng.sample(range(1, n), k - 1)), n]
        held = [Holding(i + 1, a, b) for i, (a, b) in enumerate(
            itertools.pairwise(cuts))]
        who = {i: Member(f"rank {i}", 1.0, memory=float(rng.randint(1, n))) for i in range(1, 6)}
        who |= {h.rank: Member(f"rank {h.rank}", 1.0, memory=float(
            rng.randint(h.stop - h.start, n))) for h in held}
        seconds = [(h.stop - h.start) * rng.choice([0.1, 0.1, 0.3, 2.0]) for h in held]
        spares = rng.sample([4, 5], rng.randint(0, 2))
        verdict = rebalance(load(n), who, held, seconds, spares, throughput)
        found, gain = verdict.held, verdict.gain
        assert [h.start for h in found] == [0, *[h.stop for h in found[:-1]]]
        assert found[-1].stop == n
        assert all(h.stop - h.start <= who[h.rank].memory for h in found)
        assert (gain > 1.0) == (list(found) != held)
        changed += gain > 1.0
        mine = {h.rank: took / (h.stop - h.start) for h, took in zip(held, seconds, strict=True)}
        if all(h.rank in mine for h in found):
            slowest = max(mine[h.rank] * (h.stop - h.start) for h in found)
            assert slowest * gain == pytest.approx(max(seconds))
    assert 20 < changed < 180


def test_measured_splits_are_what_the_tests_take_them_for():
    split = measure(load(), [Member("a", 0.1), Member("b", 0.3)], [8, 4])
    assert split.seconds == pytest.approx((0.8, 1.2))
    assert throughput(split) == pytest.approx(1 / 1.2)
