"""When layers move between ranks by themselves, and when they go back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeinfer.cluster.balance import Balance
from pipeinfer.cluster.session import Session
from pipeinfer.core.grid import Grid
from pipeinfer.core.policy import Policy
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.pace import WINDOW, Seen, StagePace
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.replan import Holding, MoveVerdict, rebalance
from pipeinfer.scheduler.settings import Limits

LOAD = Load((1.0,) * 12, (1.0,) * 12)
MEMBERS = {rank: Member(f"rank {rank}", 1.0, memory=9.0) for rank in (1, 2)}


class Bed:
    """A session over two stages on one host. gain: of the one other arrangement that its
    assembly finds; None: it finds what the times of the stages give."""

    def __init__(self, gain=None, first=2):
        self.moved, self.seen = [], Seen()
        self.before = (Holding(1, 0, first), Holding(2, first, 12))
        self.better = (Holding(1, 0, 12),)
        self.gain = gain
        load = SimpleNamespace(lately=lambda tokens: self.seen, restart=lambda tokens: None,
                               worked=0.0)
        self.assembly = SimpleNamespace(
            held=self.before, threads={}, returning=(), grows=False, changes=["moved"], ready={},
            grid=Grid.plain(2), better=self.found, move=self.move)
        self.session = SimpleNamespace(
            assembly=self.assembly, hosts=[RankInfo(rank, "h") for rank in range(3)],
            draft=None, limits=Limits(n_ctx=64, policy=Policy.ITERATIVE),
            first=SimpleNamespace(curve=()),
            plan=SimpleNamespace(whole=False, seconds_of=lambda held: ()),
            notes=[], resume=lambda: Session.watch_pace(self.session),
            judge=lambda: Session.judge(self.session),
            config=SimpleNamespace(speculation=SimpleNamespace(parallel=1)),
            head=SimpleNamespace(
                times=SimpleNamespace(pace=StagePace(Grid.plain(2), ()), load=load),
                scheduler=SimpleNamespace(totals=SimpleNamespace(accepted=0),
                                          calibration=SimpleNamespace(acceptance=0.7))))
        self.balance = Balance(self.session)

    def found(self, seconds, judge):
        if self.gain:
            return MoveVerdict(self.better, self.gain)
        return rebalance(LOAD, MEMBERS, self.assembly.held, seconds, (), judge)

    def move(self, held, why, threads):
        self.moved.append(held)
        self.assembly.held, self.assembly.changes = held, [why]
        self.assembly.grid = Grid.plain(len(held))

    def runs(self, seconds, count=WINDOW):
        """So many runs that take each stage `seconds` of its own."""
        for run in range(count):
            self.session.head.times.pace.saw(1, [(float(run), one, 0.0) for one in seconds])


def test_a_stage_that_becomes_slow_gives_layers_away():
    bed = Bed(first=6)
    bed.runs([0.06, 0.06], 2 * WINDOW)
    assert bed.balance.rebalance(1.25, 1.5) is None
    bed.runs([0.18, 0.06], 2 * WINDOW)
    assert [(one.rank, one.stop - one.start) for one in bed.balance.preview().held] == [
        (1, 3), (2, 9)]
    said = [bed.balance.rebalance(1.25, 1.5) for _ in range(3)]
    assert said[:2] == [None, None]  # not at the first look
    assert "layers redistributed for" in said[2]
    assert "stage 1 takes 3.0 times as long as at its best" in said[2]
    assert bed.balance.verify() is None  # nothing is known of the new places
    bed.runs([0.09, 0.09], 2 * WINDOW)
    assert "times the old speed (by what stages take" in bed.balance.verify()
    assert bed.balance.preview() is None


@pytest.mark.parametrize(("slowdown", "need", "drift", "moves"), [
    (1.0, 1.0, 1.0, True),  # asked for: any gain will do
    (1.0, 1.25, 1.5, False),  # a deal that was uneven from the start is its user's
    (1.6, 1.25, 1.5, True),
    (1.6, 2.5, 1.5, False),  # too little to gain
])
def test_a_server_moves_layers_by_itself_only_where_a_stage_has_become_slow(
        slowdown, need, drift, moves):
    bed = Bed(gain=2.0)
    bed.runs([0.1, 0.2])
    bed.runs([0.1, 0.2 * slowdown])
    said = [bed.balance.rebalance(need, drift) for _ in range(3)]
    assert any(said) == moves
    assert said[:2] == [None, None] or drift == 1.0  # not at the first look
    assert bed.moved[:1] == [bed.better] * moves


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
    bed.runs([0.1, 0.1])
    bed.runs([0.3, 0.32])
    assert [bed.balance.rebalance(1.25, 1.5) for _ in range(5)] == [None] * 5
