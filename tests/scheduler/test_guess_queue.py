"""Guesses that wait: order, rows of one run, ids; and how confidence is learnt."""

from __future__ import annotations

import math

import pytest

from pipeinfer.core.calibration import Calibration
from pipeinfer.core.drafting import Proposal
from pipeinfer.core.types import Choice
from pipeinfer.scheduler.guess_queue import GuessQueue, probability
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.token_tree import PLANNED, Node, Tree

P = Proposal


def tree(ids=4):
    pool = SequencePool(ids)
    root = Node(1, 0, None, (pool.acquire(0),), 0, speculative=False)
    return Tree(0, pool, root)


def planned(lane, *proposals, weight=1.0):
    reserve = GuessQueue()
    nodes = lane.plan(lane.frontier, proposals, weight)
    reserve.add_leaf(lane.frontier)
    reserve.add(nodes)
    return reserve, nodes


def test_the_likeliest_proposal_is_issued_first_and_parents_before_children():
    lane = tree()
    reserve, nodes = planned(lane, P(-1, 5, 0.6), P(0, 6, 0.5), P(-1, 7, 0.35, alternative=True))
    assert reserve.best() is nodes[0]
    assert reserve.take(3, 3, -math.inf) == [nodes[0], nodes[2], nodes[1]]  # .6, .35, .3


def test_a_spare_waits_by_its_worth_and_is_drafted_by_its_probability():
    lane = tree()
    reserve, nodes = planned(lane, P(-1, 5, 0.6), P(0, 6, 0.5), P(-1, 7, 0.35, alternative=True),
                             weight=0.5)
    assert reserve.take(3, 3, -math.inf) == [nodes[0], nodes[1], nodes[2]]
    assert nodes[2].score == pytest.approx(math.log(0.35))
    assert nodes[2].priority == pytest.approx(math.log(0.175))


def test_proposals_below_the_floor_are_not_issued():
    lane = tree()
    reserve, nodes = planned(lane, P(-1, 5, 0.6), P(0, 6, 0.1))
    assert reserve.take(4, 3, math.log(0.1)) == [nodes[0]]
    assert reserve.best() is nodes[1]


def test_without_ids_only_continuations_leave():
    lane = tree(ids=1)
    reserve, nodes = planned(lane, P(-1, 5, 0.5), P(-1, 7, 0.4, alternative=True), P(0, 6, 0.9))
    assert reserve.take(4, lane.pool.available, -math.inf) == [nodes[0], nodes[2]]
    assert reserve.best() is nodes[1]


def test_rows_of_a_run_have_their_parents_in_one_earlier_run():
    lane = tree()
    reserve, first = planned(lane, P(-1, 5, 0.9))
    lane.issue(reserve.take(1, 3, -math.inf), 1)
    below = lane.plan(first[0], (P(-1, 6, 0.5),))
    beside = lane.plan(lane.frontier, (P(-1, 8, 0.3, alternative=True),))
    reserve.add([*below, *beside])
    assert reserve.take(4, 3, -math.inf) == below
    assert reserve.take(4, 3, -math.inf) == beside


def test_proposals_that_were_decided_are_removed():
    lane = tree()
    reserve, nodes = planned(lane, P(-1, 5, 0.6), P(-1, 7, 0.3, alternative=True))
    lane.issue(reserve.take(1, 3, -math.inf), 1)
    assert reserve.best_leaf() is lane.frontier
    lane.frontier.choice = Choice(5)
    lane.step(5)
    assert reserve.best() is None
    assert reserve.best_leaf() is nodes[0]
    assert nodes[1].run_id == PLANNED
    assert not nodes[1].open


def test_probability_is_seen_from_the_frontier():
    lane = tree()
    _, nodes = planned(lane, P(-1, 5, 0.5), P(0, 6, 0.5))
    assert probability(nodes[1].score, lane.frontier) == pytest.approx(0.25)
    lane.issue(nodes, 1)
    lane.step(5)
    assert probability(nodes[1].score, lane.frontier) == pytest.approx(0.5)


def test_an_overconfident_draft_is_discounted_and_recovers():
    calibration = Calibration()
    assert calibration.estimate(0.9, first=True) == pytest.approx(0.9)
    for _ in range(40):
        calibration.learn(0.9, False, first=True)
    assert calibration.estimate(0.9, first=True) < 0.12
    assert calibration.estimate(0.3, first=True) == pytest.approx(0.3)
    assert calibration.estimate(0.9, first=False) == pytest.approx(0.9)
    assert calibration.acceptance < 0.1
    for _ in range(300):
        calibration.learn(0.9, True, first=True)
    assert calibration.estimate(0.9, first=True) > 0.9


def test_second_guesses_have_a_share_of_their_own():
    calibration = Calibration()
    for hit in (True, False, False, False) * 20:
        calibration.learn_second(hit)
    assert calibration.second == pytest.approx(0.25, abs=0.05)
