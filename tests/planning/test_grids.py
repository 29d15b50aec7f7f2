"""Grids of ranks: shares, sums, and the best grid against all there are on small clusters."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeinfer.core.grid import parse_widths
from pipeinfer.core.policy import Policy
from pipeinfer.errors import PlanError
from pipeinfer.planning.grids import Cluster, arrange, best_grid, even_grid, shape
from pipeinfer.planning.judge import LoadMix, score
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.teams import Network, SumCost, TeamCut, Wire, shares_of, team

FAST, SLOW = Wire(2e-6, 1e10), Wire(50e-6, 1.175e8)
CURVE = ((2, 1.3), (4, 2.0), (8, 3.4))
CUT = TeamCut(8192, 8, 112, 0.18, 0.02, 32)


def cluster(n=8, wire=FAST, policy=Policy.PIPEINFER, layers=80, speeds=(), **given):
    hosts = tuple(Member(f"h{i}", (speeds[i] if speeds else 1.0) * 3e-3, 2e-4,
                         given.get("memory", 1e12), curve=CURVE) for i in range(n))
    load = Load((1.0,) * layers, (4e8,) * layers, last_cost=0.6, last_bytes=2e8)
    return Cluster(hosts, given.get("network") or Network(wire), load, given.get("cut", CUT),
                   given.get("sums", SumCost()), (LoadMix(policy, acceptance=0.79),), 4e-4, 5e-3,
                   given.get("widths", ()), given.get("groups", ()))


# --- shares and sums --------------------------------------------------------------------------


def test_stages_are_of_one_group():
    racks = ("a", "b") * 4  # not neighbours in the order of the hosts
    found = best_grid(cluster(groups=racks))
    assert max(found.widths) > 1
    assert all(len({racks[index] for index in one.hosts}) == 1 for one in found.stages)
    assert best_grid(cluster(groups=tuple("abcdefgh"))).widths == best_grid(
        cluster(widths=(1,))).widths
    assert [one.hosts for one in even_grid(cluster(groups=racks), (4, 2)).stages] == [
        (0, 2, 4, 6), (1, 3)]
    with pytest.raises(PlanError, match="different groups"):
        even_grid(cluster(groups=racks), (5,))


def test_shares_follow_speeds_in_whole_pieces():
    assert shares_of(8, [1.0] * 8) == [1] * 8
    assert shares_of(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert shares_of(9, [1.0, 2.0]) == [6, 3]
    assert shares_of(3, [1.0, 100.0]) == [2, 1]  # nobody goes without


def test_shares_are_as_even_as_can_be():
    rng = random.Random(3)
    for _ in range(50):
        speeds = [rng.choice([1.0, 1.5, 3.0]) for _ in range(rng.randint(2, 3))]
        pieces = rng.randint(len(speeds), 9)
        slowest = max(s * n for s, n in zip(speeds, shares_of(pieces, speeds), strict=True))
        every = (split for split in itertools.product(range(1, pieces + 1), repeat=len(speeds))
                 if sum(split) == pieces)
        assert slowest == pytest.approx(min(
            max(s * n for s, n in zip(speeds, split, strict=True)) for split in every))


def test_a_sum_costs_what_a_hand_finds():
    cost, wire = SumCost(4, 40e-6, 2e-6), Wire(50e-6, 1e8)
    assert cost.seconds(1, 8192, wire) == 0.0
    assert cost.seconds(2, 8192, wire) == pytest.approx(90e-6 + 32768 / 1e8)
    once = 40e-6 + 2 * 2e-6 + 50e-6
    assert cost.seconds(4, 1024, wire) == pytest.approx(once + 3 * 4096 / 1e8)  # whole parts
    assert cost.seconds(4, 8192, wire) == pytest.approx(2 * once + 1.5 * 32768 / 1e8)
    assert SumCost(2).seconds(2, 8192, wire) < SumCost(4).seconds(2, 8192, wire)


def test_both_sums_wait_for_the_slowest_member():
    """Seven members of eight groups of heads: one has two."""
    hosts = [Member(str(i), 1.0) for i in range(8)]
    eight, seven = (team(hosts, range(n), Network(FAST), CUT, 1.0) for n in (8, 7))
    assert eight.layer == pytest.approx(1 / 8)
    assert seven.layer == pytest.approx(0.18 * 2 / 8 + 0.82 / 7)
    assert sum(seven.shares) == pytest.approx(1.0)


def test_more_members_than_groups_compute_keys_and_values_twice():
    hosts = [Member(str(i), 1.0) for i in range(16)]
    wide = team(hosts, range(16), Network(FAST), CUT, 1.0)
    assert wide.pieces == (2,) * 16
    assert wide.layer == pytest.approx(0.16 / 16 + 0.02 / 8 + 0.82 / 16)
    assert CUT.widths(40) == tuple(range(1, 33))
    assert TeamCut(14848, 2, 232, 0.15).widths(9) == (1, 2)


# --- grids ------------------------------------------------------------------------------------


def test_fast_links_make_it_wide_and_slow_ones_long():
    wide, long = best_grid(cluster()), best_grid(cluster(wire=SLOW))
    assert max(wide.widths) > max(long.widths)
    assert len(wide.widths) < len(long.widths)
    far = best_grid(cluster(wire=Wire(5e-3, 1e8)))
    assert set(far.widths) == {1}


def test_sockets_of_a_host_are_members_and_hosts_are_stages():
    """Four machines of two sockets each, a slow link between the machines."""
    special = {frozenset((2 * k, 2 * k + 1)): Wire(1e-6, 5e10) for k in range(4)}
    found = best_grid(cluster(network=Network(Wire(1e-3, 1e8), special)))
    assert found.widths == (2, 2, 2, 2)
    assert all(stage.hosts[0] // 2 == stage.hosts[1] // 2 for stage in found.stages)


def test_a_slow_host_gets_a_smaller_share_or_none():
    found = best_grid(cluster(4, speeds=(1, 1, 1, 2.5)))
    for stage in found.stages:
        if 3 in stage.hosts and stage.width > 1:
            assert stage.blocks[stage.hosts.index(3)] < max(stage.blocks)
    hopeless = best_grid(cluster(4, speeds=(1, 1, 1, 500.0)))
    assert all(3 not in stage.hosts for stage in hopeless.stages)
    assert "h3 left out" in hopeless.why()


def test_the_reason_names_times_and_what_else_there_was():
    text = best_grid(cluster()).why()
    assert "(stages x width)" in text
    assert "ms for sums" in text
    assert "times the speed" in text


def test_what_fits_nowhere_is_an_error_that_says_what_is_missing():
    with pytest.raises(PlanError, match="no grid of 8 hosts holds the model"):
        best_grid(cluster(memory=1e9))
    tight = best_grid(cluster(memory=4.5e9))
    assert sum(tight.widths) == 8
    assert max(itertools.chain(*tight.memory)) <= 4.5e9
    with pytest.raises(PlanError, match=r"possible widths are 1, 2$"):
        even_grid(cluster(cut=TeamCut(8192, 2, 112, 0.2)), (4, 4))


def test_only_widths_that_are_allowed_are_used():
    assert set(best_grid(cluster(widths=(1, 2))).widths) <= {1, 2}
    assert even_grid(cluster(), (4, 4)).name == "2x4"
    assert shape((4, 2, 2)) == "4,2,2"
    assert parse_widths(shape((4, 2, 2))) == (4, 2, 2)
    assert even_grid(cluster(), (4, 4)).options == "--grid 2x4"
    unlike = even_grid(cluster(4, speeds=(1, 2, 1, 1)), (2, 2))
    assert unlike.options == "--grid 2x2 --slices 1.00:0.50,2"


def every_plan(where):
    """Tokens per second of each way to seat some of the hosts."""
    n, layers = len(where.hosts), where.n_layers
    for count in range(1, n + 1):
        for order in itertools.permutations(range(n), count):
            for size in range(1, count + 1):
                for cuts in itertools.combinations(range(1, count), size - 1):
                    groups = [order[a:b] for a, b in itertools.pairwise((0, *cuts, count))]
                    if any(list(g) != sorted(g) or not where.allows(len(g)) for g in groups):
                        continue
                    stages = [where.team(group) for group in groups]
                    for ends in itertools.combinations(range(1, layers), size - 1):
                        dealt = [b - a for a, b in itertools.pairwise((0, *ends, layers))]
                        if all(taken <= where.hosts[index].memory
                               for k, (one, c) in enumerate(zip(stages, dealt, strict=True))
                               for index, taken in zip(one.hosts, where.bytes_of(
                                   one, c, first=k == 0, last=k == size - 1), strict=True)):
                            yield score(arrange(where, stages, dealt), where.mixes)


def random_cluster(seed):
    rng = random.Random(seed)
    n, layers = rng.choice([2, 3, 3, 4]), rng.randint(4, 6)
    kinds = [Wire(2e-6, 1e10), Wire(50e-6, 1e8), Wire(2e-3, 1e8)]
    special = {frozenset(pair): rng.choice(kinds)
               for pair in itertools.combinations(range(n), 2) if rng.random() < 0.4}
    alike = rng.random() < 0.3
    hosts = tuple(Member(str(i), 0.03 * (1.0 if alike else rng.choice([1.0, 1.0, 1.6, 3.0, 8.0])),
                         memory=rng.choice([3e9, 6e9, 1e12]), overhead=2e-4, curve=CURVE)
                  for i in range(n))
    load = Load((1.0,) * layers, (1e9,) * layers, last_cost=0.6, last_bytes=1e8)
    mix = LoadMix(rng.choice(list(Policy)), rng.choice([1, 1, 4]), 0.0, rng.choice([0.5, 0.8]))
    return Cluster(hosts, Network(rng.choice(kinds), special), load,
                   TeamCut(8192, rng.choice([2, 8]), 112, 0.18), SumCost(rng.choice([2, 4])),
                   (mix,), 4e-4, rng.choice([1e-3, 0.02]))


@pytest.mark.parametrize("seed", range(30))
def test_the_grid_is_within_a_twentieth_of_the_best_of_all(seed):
    where = random_cluster(seed)
    best = max(every_plan(where), default=0.0)
    if not best:
        with pytest.raises(PlanError):
            best_grid(where)
        return
    assert best_grid(where).tokens >= 0.95 * best
