"""In turns a guess is issued where it brings more than its row takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core.calibration import Calibration
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.messages import Decode
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import Drafted, Enqueue, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits

FOURS = (0.7, 1.6, 1.5, 2.4, 2.9)  #: rows that are computed in fours


def issued(costs, *confidences):
    """How many guesses of a chain travel with the accepted token."""
    scheduler = Scheduler(Limits(n_ctx=90, time_sharing=True, exact_width=6, tree_max=5, p_min=0.0,
                                 costs=costs), validate=True)
    said = list(scheduler.handle(Enqueue(Request(1, (3, 1, 4), 30))))
    (prompt,) = (one for one in said if isinstance(one, Decode))
    said = list(scheduler.handle(RunDone(prompt.run_id, (Choice(5),))))
    job = next(one for one in said if isinstance(one, StartDraft) and one.max_tokens)
    guesses = tuple(Proposal(k - 1, 7 + k, one) for k, one in enumerate(confidences))
    said = list(scheduler.handle(Drafted(job.job_id, guesses)))
    (run,) = (one for one in said if isinstance(one, Decode))
    return len(run.rows) - 1


@pytest.mark.parametrize(("costs", "confidences", "expected"), [
    ((), (0.1, 0.1), 2),  # nobody has said what they cost
    (FOURS, (0.6,), 0),
    (FOURS, (0.8,), 1),
    (FOURS, (0.9, 0.9), 1),  # a third row takes as long as three more
    (FOURS, (0.9, 0.9, 0.9), 3),
    (FOURS, (0.7, 0.6, 0.6), 0),
    (FOURS, (0.99,) * 5, 5),
    (FOURS, (0.99, 0.99, 0.99, 0.5, 0.5), 3),
    ((0.05,) * 5, (0.1, 0.1), 2),
    (FOURS, (), 0),
])
def test_what_is_worth_its_rows_is_issued(costs, confidences, expected):
    assert issued(costs, *confidences) == expected


@given(st.lists(st.floats(0.01, 0.99), max_size=5),
       st.lists(st.floats(0.0, 2.0), min_size=5, max_size=5))
def test_no_other_number_of_guesses_brings_more(confidences, steps):
    costs = tuple(sum(steps[:k + 1]) for k in range(5))
    gains = [0.0, *(sum_of(confidences, size) - cost
                    for size, cost in enumerate(costs[:len(confidences)], 1))]
    assert gains[issued(costs, *confidences)] == pytest.approx(max(gains), abs=1e-6)


def sum_of(confidences, size):
    """Tokens that so many guesses bring on average."""
    reach, total = 1.0, 0.0
    for one in confidences[:size]:
        reach *= one
        total += reach
    return total


def test_a_claim_counts_for_what_it_has_turned_out_to_be():
    calibration = Calibration()
    assert calibration.least_claim(0.5) == 0.0  # nothing is known yet
    for _ in range(8):
        calibration.learn(0.35, hit=True, first=True)
        calibration.learn(0.15, hit=False, first=True)
    assert calibration.least_claim(0.5) == pytest.approx(0.2)
    for _ in range(40):
        calibration.learn(0.85, hit=False, first=True)
    assert calibration.least_claim(0.5) == pytest.approx(0.9)  # what is below hangs there
    calibration.learn(0.85, hit=True, first=False)
    assert calibration.least_claim(0.5) == pytest.approx(0.9)


def test_what_is_no_longer_tried_is_tried_again_some_time():
    calibration = Calibration()
    for _ in range(100):
        calibration.learn(0.95, hit=False, first=True)
    asked = 1
    while calibration.least_claim(0.5) == 1.0:
        asked += 1
        assert asked < 1000
    assert asked > 50
