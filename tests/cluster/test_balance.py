"""When layers move between ranks, and when they go back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pipeinfer.cluster.balance import Balance
from pipeinfer.cluster.session import Session
from pipeinfer.core.grid import Grid
from pipeinfer.core.policy import Policy
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.pace import WINDOW, Seen, StagePace
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.replan import Holding, rebalance
from pipeinfer.scheduler.settings import Limits

LOAD = Load((1.0,) * 12, (1.0,) * 12)


class Bed:
    """A session over two stages, on hosts of their own."""

    def __init__(self):
        self.moved = []
        self.assembly = SimpleNamespace(
            held=(Holding(1, 0, 6), Holding(2, 6, 12)), threads={}, returning=(), grows=False,
            changes=["moved"], ready={}, grid=Grid((1, 1)), better=self.better, move=self.move)
        load = SimpleNamespace(lately=lambda tokens: Seen(), restart=lambda tokens: None,
                               worked=0.0)
        times = SimpleNamespace(pace=StagePace(Grid((1, 1)), ()), load=load)
        self.session = SimpleNamespace(
            assembly=self.assembly, hosts=[RankInfo(rank, f"h{rank}") for rank in range(3)],
            draft=None, limits=Limits(n_ctx=64, policy=Policy.ITERATIVE), notes=[],
            first=SimpleNamespace(curve=()), plan=SimpleNamespace(seconds_of=lambda held: ()),
            resume=lambda: Session.watch_pace(self.session),
            judge=lambda: Session.judge(self.session),
            config=SimpleNamespace(speculation=SimpleNamespace(parallel=8)),
            head=SimpleNamespace(times=times, scheduler=SimpleNamespace(
                totals=SimpleNamespace(accepted=0),
                calibration=SimpleNamespace(acceptance=0.7))))
        self.balance = Balance(self.session)

    def better(self, seconds, judge):
        return rebalance(LOAD, {rank: Member(f"rank {rank}", 1.0, memory=9.0) for rank in (1, 2)},
                         self.assembly.held, seconds, (), judge)

    def move(self, held, why, threads):
        self.moved.append([(one.rank, one.stop - one.start) for one in held])
        self.assembly.held, self.assembly.changes = held, [why]

    def runs(self, speeds):
        """Stages that take so long for a layer do many runs."""
        took = [0.01 * speeds[one.rank] * (one.stop - one.start) for one in self.assembly.held]
        for run in range(1, 2 * WINDOW + 1):
            self.session.head.times.pace.saw(1, np.array([[float(run), one, 0.0] for one in took]))


def test_a_stage_that_becomes_slow_gives_layers_away_and_that_is_looked_at_later():
    bed = Bed()
    assert bed.balance.preview() is None  # nothing is known yet
    bed.runs({1: 1.0, 2: 1.0})
    assert bed.balance.rebalance(1.25, 1.5) is None
    bed.runs({1: 3.0, 2: 1.0})
    found = bed.balance.preview()
    assert [(one.rank, one.stop - one.start) for one in found.held] == [(1, 3), (2, 9)]
    said = [bed.balance.rebalance(1.25, 1.5) for _ in range(3)]
    assert said[:2] == [None, None]  # not at the first look
    assert "layers redistributed for" in said[2]
    assert "stage 1 takes 3.0 times as long as at its best" in said[2]
    assert bed.balance.verify() is None  # nothing is known of the new places
    bed.runs({1: 3.0, 2: 1.0})
    assert "times the old speed (by what stages take" in bed.balance.verify()
    assert bed.moved == [[(1, 3), (2, 9)]]
    assert bed.balance.preview() is None


def test_what_brought_nothing_goes_back():
    bed = Bed()
    bed.runs({1: 3.0, 2: 1.0})
    bed.balance.rebalance()
    bed.runs({1: 3.0, 2: 9.0})
    assert "layers back where they were: 0." in bed.balance.verify()
    assert bed.moved[1] == [(1, 6), (2, 6)]
    bed.runs({1: 3.0, 2: 1.0})
    assert bed.balance.rebalance() is None  # not tried again at once
