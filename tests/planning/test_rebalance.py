"""Who has become slow, and what dealing the layers out anew makes of it."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.cluster.balance import Balance
from pipeinfer.cluster.session import Session
from pipeinfer.core.grid import Grid
from pipeinfer.core.policy import Policy
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.pace import WINDOW, Seen, StagePace
from pipeinfer.planning.partition import Load, Member, measure
from pipeinfer.planning.replan import Holding, MoveVerdict, rebalance
from pipeinfer.scheduler.settings import Limits

CURVE = ((2, 1.5), (4, 2.0))


def feed(pace, seconds, count=WINDOW, rows=1):
    """`count` runs that take each stage `seconds` of its own."""
    for _ in range(count):
        pace.saw(rows, tuple((0.0, one, 0.0) for one in seconds))


# --- pace -------------------------------------------------------------------------------------


def test_nothing_is_said_before_there_are_enough_runs():
    pace = StagePace(Grid.plain(2), CURVE)
    feed(pace, [0.1, 0.2], 15)
    assert not pace.known
    assert pace.seconds == [0.0, 0.0]
    assert pace.slowdown == [1.0, 1.0]
    feed(pace, [0.1, 0.2], 1)
    assert pace.known
    assert pace.seconds == pytest.approx([0.1, 0.2])
    assert not pace.settled
    feed(pace, [0.1, 0.2], WINDOW - 16)
    assert pace.settled


@pytest.mark.parametrize(("rows", "cost"), [(1, 1.0), (2, 1.5), (3, 1.75), (4, 2.0)])
def test_runs_of_several_rows_are_brought_down_to_one_row(rows, cost):
    pace = StagePace(Grid.plain(3), CURVE)
    feed(pace, [0.1 * cost, 0.2 * cost, 0.3 * cost], rows=rows)
    assert pace.seconds == pytest.approx([0.1, 0.2, 0.3])


def test_runs_that_the_curve_does_not_reach_are_left_out():
    pace = StagePace(Grid.plain(1), CURVE)
    feed(pace, [0.1])
    feed(pace, [9.0], rows=5)
    assert pace.seconds == pytest.approx([0.1])
    alone = StagePace(Grid.plain(1), ())
    feed(alone, [9.0], rows=2)
    assert not alone.known


def test_runs_without_a_time_of_each_stage_are_left_out():
    pace = StagePace(Grid.plain(2), CURVE)
    pace.saw(1, np.zeros((0, 2)))
    feed(pace, [0.1] * 3)
    feed(pace, [0.1])
    assert not pace.known


def test_a_few_slow_runs_do_not_make_a_stage_slow():
    rng = random.Random(1)
    pace = StagePace(Grid.plain(2), CURVE)
    times = [0.1] * 62 + [5.0, 7.0]
    rng.shuffle(times)
    for first in times:
        pace.saw(1, ((0.0, first, 0.0), (0.0, 0.1, 0.0)))
    assert pace.seconds == pytest.approx([0.1, 0.1])
    assert pace.slowdown[1] == pytest.approx(1.0)


def test_a_stage_that_stalls_now_and_then_counts_as_slower():
    """A quarter of its runs takes five times as long: a median would not see it."""
    pace = StagePace(Grid.plain(1), CURVE)
    for number in range(4 * WINDOW):
        feed(pace, [0.5 if number % 4 == 0 else 0.1], 1)
    assert 0.15 < pace.seconds[0] < 0.2


def test_only_the_stage_that_became_slow_is_slow_and_only_as_long_as_it_is():
    pace = StagePace(Grid.plain(3), CURVE)
    feed(pace, [0.1, 0.2, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 1.0, 1.0])
    feed(pace, [0.1, 0.6, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 3.0, 1.0])
    assert pace.seconds == pytest.approx([0.1, 0.6, 0.1])
    feed(pace, [0.1, 0.2, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 1.0, 1.0])


def test_the_best_is_a_figure_of_many_runs():
    pace = StagePace(Grid.plain(1), CURVE)
    feed(pace, [0.1])
    feed(pace, [0.001], 1)  # one run that the clock got wrong
    feed(pace, [0.1], 200)
    assert pace.slowdown[0] < 1.05


# --- rebalance --------------------------------------------------------------------------------


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


def dealt(held, seconds, *, who=None, spares=(), work=None):
    found = rebalance(work or load(), who or members(*[12.0] * 5), held, seconds, spares,
                      throughput)
    return [(h.rank, h.start, h.stop) for h in found.held], found.gain


EVEN = [Holding(1, 0, 4), Holding(2, 4, 8), Holding(3, 8, 12)]


def test_a_slow_stage_gives_layers_away():
    found, gain = dealt(EVEN, [0.4, 1.2, 0.4])  # the middle one takes three times as long
    assert found == [(1, 0, 5), (2, 5, 7), (3, 7, 12)]
    assert gain == pytest.approx(1.2 / 0.6)


def test_the_gain_is_what_the_slowest_stage_gains():
    found, gain = dealt([Holding(1, 0, 6), Holding(2, 6, 12)], [0.6, 1.2])
    assert found == [(1, 0, 8), (2, 8, 12)]
    assert gain == pytest.approx(1.2 / 0.8)


@pytest.mark.parametrize("seconds", [[0.4] * 3, [0.4, 0.405, 0.398]])
def test_equal_speeds_change_nothing(seconds):
    found, gain = dealt(EVEN, seconds)
    assert found == [(h.rank, h.start, h.stop) for h in EVEN]
    assert gain == 1.0


def test_an_uneven_deal_that_suits_the_speeds_stays():
    held = [Holding(1, 0, 8), Holding(2, 8, 12)]
    found, gain = dealt(held, [0.8, 0.8])
    assert found == [(1, 0, 8), (2, 8, 12)]
    assert gain == 1.0


def test_a_spare_stands_in_for_the_slowest_stage():
    found, gain = dealt(EVEN, [0.4, 4.0, 0.4], spares=[5, 4])
    assert found == [(1, 0, 4), (5, 4, 8), (3, 8, 12)]
    assert gain == pytest.approx(10.0)


def test_no_spare_is_taken_where_nobody_is_slow():
    found, gain = dealt(EVEN, [0.4] * 3, spares=[4])
    assert found == [(h.rank, h.start, h.stop) for h in EVEN]
    assert gain == 1.0


def test_a_spare_that_is_too_small_is_not_taken():
    who = members(12.0, 12.0, 12.0, 1.0)
    found, gain = dealt(EVEN, [0.4, 1.2, 0.4], who=who, spares=[4])
    held = {rank: stop - start for rank, start, stop in found}
    assert gain > 1.0
    assert held.get(4, 0) <= 1


def test_what_the_others_cannot_hold_stays_where_it_is_slow():
    found, gain = dealt(EVEN, [0.4, 4.0, 0.4], who=members(5.0, 5.0, 5.0))
    assert found == [(1, 0, 5), (2, 5, 7), (3, 7, 12)]
    assert gain == pytest.approx(2.0)


def test_where_memory_leaves_no_choice_nothing_changes():
    found, gain = dealt(EVEN, [0.4, 4.0, 0.4], who=members(4.0, 4.0, 4.0))
    assert found == [(h.rank, h.start, h.stop) for h in EVEN]
    assert gain == 1.0


def test_counts_that_a_user_set_do_not_hold_a_slow_stage():
    who = {rank: structs.replace(member, layers=4)
           for rank, member in members(12.0, 12.0, 12.0).items()}
    found, gain = dealt(EVEN, [0.4, 1.2, 0.4], who=who)
    assert found == [(1, 0, 5), (2, 5, 7), (3, 7, 12)]
    assert gain > 1.0


def test_the_output_head_counts_as_work_of_the_last_stage():
    """Its stage takes as long as the others with fewer layers: it is no slower."""
    work = load(12, last_cost=3.0)
    held = [Holding(1, 0, 5), Holding(2, 5, 10), Holding(3, 10, 12)]
    found, gain = dealt(held, [0.5, 0.5, 0.5], work=work)
    assert found == [(1, 0, 5), (2, 5, 10), (3, 10, 12)]
    assert gain == 1.0


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


# --- by itself --------------------------------------------------------------------------------


@pytest.mark.parametrize(("slowdown", "need", "drift", "moves"), [
    (1.0, 1.0, 1.0, True),  # asked for: any gain will do
    (1.0, 1.25, 1.5, False),  # a deal that was uneven from the start is its user's
    (1.6, 1.25, 1.5, True),
    (1.6, 2.5, 1.5, False),  # too little to gain
])
def test_a_server_moves_layers_by_itself_only_where_a_stage_has_become_slow(
        slowdown, need, drift, moves):
    bed = Bed(gain=2.0)
    feed(bed.pace, [0.1, 0.2])
    feed(bed.pace, [0.1, 0.2 * slowdown])
    said = [bed.balance.rebalance(need, drift) for _ in range(3)]
    assert any(said) == moves
    assert said[:2] == [None, None] or drift == 1.0  # not at the first look
    assert bed.moved[:1] == [bed.better] * moves


class Bed:
    """A session of two stages whose assembly finds one other arrangement."""

    def __init__(self, gain):
        self.pace, self.moved, self.seen = StagePace(Grid.plain(2), CURVE), [], Seen()
        self.before = (Holding(1, 0, 2), Holding(2, 2, 12))
        self.better = (Holding(1, 0, 12),)
        self.accepted = 0
        load = SimpleNamespace(lately=lambda tokens: self.seen, restart=lambda tokens: None,
                               worked=0.0)
        self.assembly = SimpleNamespace(
            held=self.before, threads={}, returning=(), grows=False, changes=["moved"], ready={},
            grid=Grid.plain(len(self.before)),
            better=lambda *given: MoveVerdict(self.better, gain), move=self.move)
        self.session = SimpleNamespace(
            assembly=self.assembly, hosts=[RankInfo(rank, "h") for rank in range(3)], draft=None,
            limits=Limits(n_ctx=64, policy=Policy.ITERATIVE), first=SimpleNamespace(curve=CURVE),
            plan=SimpleNamespace(whole=False, seconds_of=lambda held: ()),
            notes=[], resume=lambda: Session.watch_pace(self.session),
            judge=lambda: Session.judge(self.session),
            config=SimpleNamespace(speculation=SimpleNamespace(parallel=1)),
            head=SimpleNamespace(
                times=SimpleNamespace(pace=self.pace, load=load),
                scheduler=SimpleNamespace(totals=SimpleNamespace(accepted=0),
                                          calibration=SimpleNamespace(acceptance=0.7))))
        self.balance = Balance(self.session)

    def move(self, held, why, threads):
        self.moved.append(held)
        self.assembly.held, self.assembly.changes = held, [why]
        self.assembly.grid = Grid.plain(len(held))

    def runs(self, seconds):
        feed(self.session.head.times.pace, seconds)


def test_a_preview_says_what_would_be_done_and_does_nothing():
    bed = Bed(gain=1.5)
    assert bed.balance.preview() is None  # nothing is known yet
    bed.runs([0.1, 0.1])
    found = bed.balance.preview()
    assert (found.held, found.gain) == (bed.better, 1.5)
    assert "rank 2 holds no layers now" in found.why
    assert (bed.moved, bed.assembly.held) == ([], bed.before)
    assert found.why in bed.balance.rebalance()
    assert bed.moved == [bed.better]
    bed.session.plan.whole = True
    assert bed.balance.preview() is None


def test_a_move_that_brought_nothing_is_taken_back_and_not_tried_again_at_once():
    bed = Bed(gain=1.5)
    bed.runs([0.1, 0.1])
    assert "rank 2 holds no layers now" in bed.balance.rebalance()
    assert bed.balance.verify() is None  # too early to tell
    bed.runs([0.3])
    assert "layers back where they were: 0.67 times" in bed.balance.verify()
    assert bed.moved == [bed.better, bed.before]
    bed.runs([0.1, 0.1])
    assert bed.balance.verify() is None
    assert bed.balance.rebalance() is None
    assert len(bed.moved) == 2


def test_a_move_that_kept_its_promise_stays_and_says_so():
    bed = Bed(gain=1.5)
    bed.runs([0.1, 0.1])
    bed.balance.rebalance()
    bed.runs([0.12])
    said = bed.balance.verify()
    assert "1.67 times the old speed (by what stages take; promised 1.50)" in said
    assert bed.session.notes[-1] == said
    assert bed.moved == [bed.better]


def test_tokens_per_second_under_a_like_load_count_more_than_stage_times():
    bed = Bed(gain=1.5)
    bed.runs([0.1, 0.1])
    bed.seen = Seen(100.0, 800.0, 0.0, 8400)  # eight streams, 84 tokens/s
    bed.balance.rebalance()
    bed.runs([0.12])
    bed.seen = Seen(100.0, 800.0, 0.0, 5700)
    assert "0.68 times the speed" in bed.balance.verify()
    assert bed.moved == [bed.better, bed.before]


def test_a_neighbour_that_slows_all_stages_alike_moves_nothing():
    bed = Bed(gain=2.0)
    feed(bed.pace, [0.1, 0.1])
    feed(bed.pace, [0.3, 0.32])
    assert [bed.balance.rebalance(1.25, 1.5) for _ in range(5)] == [None] * 5


def test_a_stage_that_waits_for_its_own_members_is_not_slow():
    pace = StagePace(Grid.plain(2), CURVE)
    for run in range(2 * WINDOW):
        waited = 0.0 if run < WINDOW else 0.4
        pace.saw(1, ((0.0, 0.1 + waited, waited), (1.0, 0.1, 0.0)))
    assert pace.seconds == pytest.approx([0.1, 0.1])
    assert pace.slowdown == pytest.approx([1.0, 1.0])
