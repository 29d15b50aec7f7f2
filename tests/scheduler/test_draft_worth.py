"""A draft's models that cost more than they bring are left alone, and tried again."""

from __future__ import annotations

import math

import pytest

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.messages import Decode
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import AbortRequest, Drafted, Enqueue, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.worth import Account
from pipeinfer.strategies.proposers.cascade import Cascade
from tests.kit.drafting import Fixed, job


def questions(worth, count, right, price=0.1, row=0.1):
    """Of how many questions the models were asked, if each names a token that is right in so many
    of four cases."""
    asked = 0
    for k in range(count):
        if worth.ask():
            asked += 1
            worth.went(-price)
            worth.add(-row)
            if k % 4 < right:
                worth.add(1.0)
    return asked


def test_models_that_pay_are_always_asked():
    assert questions(Account(), 1000, right=1) == 1000


def test_useless_models_are_asked_less_and_less():
    worth = Account()
    assert 4 <= questions(worth, 100, right=0) <= 30
    assert 1 <= questions(worth, 1000, right=0) <= 60


def test_models_are_asked_again_where_the_text_becomes_theirs():
    worth = Account()
    questions(worth, 2000, right=0)
    questions(worth, 1000, right=4)  # the longest rest is shorter
    assert questions(worth, 100, right=4) == 100
    assert questions(worth, 60, right=0) < 60  # and are found out again


@pytest.mark.parametrize(("price", "asked"), [(0.0, True), (0.5, False), (math.inf, False)])
def test_a_job_goes_to_free_proposers_alone_once_the_models_have_failed(price, asked):
    found = asked_at(scheduler_of(price), 1, 60)
    assert (0 in found) == (price != math.inf)
    assert (len(found) == 60) == asked


def scheduler_of(price):
    return Scheduler(Limits(n_ctx=900, time_sharing=True, exact_width=4, tree_max=3, p_min=0.0,
                            costs=(0.1, 0.2, 0.3), draft_price=price), validate=True)


def asked_at(scheduler, number, tokens):
    """The tokens of a text behind which the models are asked, if they are never right."""
    said, found = list(scheduler.handle(Enqueue(Request(number, (3, 1, 4), tokens + 9)))), []
    for step in range(tokens):
        (run,) = (one for one in said if isinstance(one, Decode))
        rows = len(scheduler.runs[run.run_id].nodes)
        said = list(scheduler.handle(RunDone(run.run_id, (Choice(5 + step % 2),) * rows)))
        job = next(one for one in said if isinstance(one, StartDraft) and one.max_tokens)
        if not job.free_only:
            found.append(step)
        guesses = () if job.free_only else (Proposal(-1, 9, 0.9, paid=True),)
        said = list(scheduler.handle(Drafted(job.job_id, guesses, rows=len(guesses))))
    scheduler.handle(AbortRequest(number, "abort"))
    return found


@pytest.mark.parametrize(("price", "again"), [(0.1, True), (0.5, True), (0.8, False)])
def test_models_that_would_have_to_read_too_much_are_not_asked_again_in_this_text(price, again):
    """A 7 B that drafted for a 70 B by turns took a tenth of the time to read what it had missed
    while it rested, for one question after each rest."""
    scheduler = scheduler_of(price)
    first = asked_at(scheduler, 1, 400)
    assert 0 in first
    assert any(step > 60 for step in first) == again
    scheduler.speculation.worth.rest = 0.0
    assert 0 in asked_at(scheduler, 2, 40)  # a new text is read from its beginning


def test_a_cascade_asks_no_model_for_a_job_that_must_be_free():
    free = Fixed(Proposal(-1, 3, 0.5), free=True)
    model = Fixed(Proposal(-1, 7, 0.8, paid=True))
    both = Cascade([free, model])
    assert both.propose(job([1], free_only=True), lambda: False) == free.proposals
    assert model.asked == 0
    found = both.propose(job([1], alternatives=2), lambda: False)
    assert found is not None
    assert [(p.token, p.paid) for p in found] == [(7, True), (3, False)]


def test_tokens_that_lookup_names_too_cost_the_model_nothing():
    free = Fixed(Proposal(-1, 3, 0.5), Proposal(0, 4, 0.5), Proposal(1, 5, 0.5), free=True)
    model = Fixed(*(Proposal(k - 1, token, 0.8, paid=True) for k, token in enumerate((3, 4, 6))))
    found = Cascade([free, model]).propose(job([1], alternatives=2), lambda: False)
    assert found is not None
    assert [(p.token, p.paid) for p in found] == [(3, False), (4, False), (6, True)]
