"""When slices of wide stages move between ranks, and when they go back."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from pipeinfer.cluster.balance import Balance
from pipeinfer.core.grid import Grid
from pipeinfer.core.policy import Policy
from pipeinfer.models.locate import EMBEDDED, open_model
from pipeinfer.models.slices import cut_of
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.load_seen import Seen
from pipeinfer.planning.measured_grid import slice_shares
from pipeinfer.planning.pace import WINDOW, StagePace
from pipeinfer.planning.partition import Load
from pipeinfer.planning.regrid import GridRoom, regrid
from pipeinfer.planning.replan import Holding
from pipeinfer.scheduler.settings import Limits

MODEL = open_model(EMBEDDED / "target.gguf")
CUT = tuple(one.name for one in cut_of(MODEL, (3, 1)))
SHARES = slice_shares(MODEL, CUT)


class Bed:
    """A session over a stage of two members, on hosts of their own; the leader has the larger
    slice."""

    def __init__(self):
        self.moved = []
        self.before = (Holding(1, 0, 12, 0, CUT, (0,)), Holding(2, 0, 12, 1, CUT, (1,)))
        self.assembly = SimpleNamespace(
            held=self.before, threads={}, returning=(), grows=False, changes=["moved"], ready={},
            grid=Grid((2,)), better=self.better, move=self.move)
        load = SimpleNamespace(lately=lambda tokens: Seen(), restart=lambda tokens: None,
                               worked=0.0)
        times = SimpleNamespace(pace=StagePace(Grid((2,)), ()), load=load)
        self.session = SimpleNamespace(
            assembly=self.assembly, hosts=[RankInfo(rank, f"h{rank}") for rank in range(3)],
            draft=None, limits=Limits(n_ctx=64, policy=Policy.ITERATIVE), notes=[],
            first=SimpleNamespace(curve=()), plan=SimpleNamespace(
                whole=False, seconds_of=lambda held: ()),
            loaded=SimpleNamespace(job=SimpleNamespace(model=MODEL)),
            resume=lambda: self.balance.watch(),
            config=SimpleNamespace(speculation=SimpleNamespace(parallel=1)),
            head=SimpleNamespace(times=times, scheduler=SimpleNamespace(
                totals=SimpleNamespace(accepted=0),
                calibration=SimpleNamespace(acceptance=0.7))))
        self.balance = Balance(self.session)

    def better(self, seconds, sums, shares, judge):
        room = GridRoom(shares, {1: 1e9, 2: 1e9}, lambda one: 1.0, {1: "", 2: ""})
        return regrid(Load((1.0,) * 12, (1.0,) * 12), self.assembly.held, seconds, room,
                      partial(judge.rate, sums=sums))

    def move(self, held, why, threads):
        self.moved.append([(one.rank, one.slices) for one in held])
        self.assembly.held, self.assembly.changes = held, [why]

    def runs(self, speeds):
        """Members that take so long for the same work do many runs."""
        times = self.session.head.times
        took = [speeds[one.rank] * sum(SHARES[i] for i in one.slices) * 0.01
                for one in self.assembly.held]
        for run in range(1, 2 * WINDOW + 1):
            waits = [max(took) - one for one in took]
            times.pace.saw(1, np.array([[float(run), max(took), waits[0]]]))
            if run % 16 == 0:
                for node, (own, waited) in enumerate(zip(took, waits, strict=True), 1):
                    times.pace.reported(node, run, own * run, waited * run)


def test_a_member_that_becomes_slow_gives_its_slice_away_and_that_is_looked_at_later():
    bed = Bed()
    assert bed.balance.preview() is None  # nothing is known yet
    bed.runs({1: 1.0, 2: 1.0})
    assert bed.balance.rebalance(1.25, 1.5) is None
    bed.session.head.times.pace._reports.clear()
    bed.runs({1: 3.0, 2: 1.0})
    found = bed.balance.preview()
    assert [(one.rank, one.slices) for one in found.held] == [(2, (0,)), (1, (1,))]
    assert "rank 1 takes 3.0 times as long for the same work" in found.why
    said = [bed.balance.rebalance(1.25, 1.5) for _ in range(3)]
    assert said[:2] == [None, None]  # not at the first look
    assert "slices moved between ranks for" in said[2]
    assert bed.balance.verify() is None  # nothing is known of the new places
    bed.runs({1: 3.0, 2: 1.0})
    assert "times the old speed (by what stages take" in bed.balance.verify()
    assert bed.moved == [[(2, (0,)), (1, (1,))]]
    assert bed.balance.preview() is None


def test_what_brought_nothing_goes_back():
    bed = Bed()
    bed.runs({1: 3.0, 2: 1.0})
    bed.balance.rebalance()
    bed.runs({1: 3.0, 2: 9.0})
    assert "slices back where they were: 0.3" in bed.balance.verify()
    assert bed.moved[1] == [(1, (0,)), (2, (1,))]
    bed.runs({1: 3.0, 2: 1.0})
    assert bed.balance.rebalance() is None  # not tried again at once


def test_shares_are_of_the_work_of_a_layer():
    assert sum(SHARES) == pytest.approx(1.0)
    assert SHARES[0] > 1.8 * SHARES[1]
