"""A better draft's late answer: its guesses go out beside those of the quick one, or before."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.messages import Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import Drafted, Enqueue, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import PUBLISHED, Limits
from tests.support.simulated import Pipeline, plain

LIMITS = Limits(n_ctx=90, policy=Policy.PIPEINFER, credit=6, partitions=8, draft_max=1, tree_max=4,
                p_min=0.0, path_min=0.001, exact_width=4)


def chain(*tokens, confidence=0.8):
    return tuple(Proposal(k - 1, token, confidence) for k, token in enumerate(tokens))


class Bench:
    """A scheduler whose prompt is read and that waits for guesses below its first token."""

    def __init__(self, limits=LIMITS):
        self.scheduler, self.said = Scheduler(limits, validate=True), []
        self.feed(Enqueue(Request(1, (3, 1, 4), 30)))
        run = next(one for one in self.said if isinstance(one, Decode))
        self.feed(RunDone(run.run_id, (Choice(5),)))
        self.job = next(one for one in reversed(self.said) if isinstance(one, StartDraft)
                        and one.max_tokens)

    def feed(self, event):
        new = self.scheduler.handle(event)
        self.said += new
        return [token for one in new if isinstance(one, Decode)
                for token in one.rows.tokens.tolist()]

    def answer(self, *tokens, confidence=0.8, **kind):
        return self.feed(Drafted(self.job.job_id, chain(*tokens, confidence=confidence), **kind))


def test_tokens_that_only_the_better_draft_proposes_are_issued_too():
    bench = Bench()
    assert bench.answer(7, 8, more=True)[0] == 7
    assert bench.answer(9, 2, further=True)[0] == 9


def test_drafting_continues_where_both_drafts_agree():
    bench = Bench()
    assert bench.answer(7, more=True) == [7]
    assert bench.answer(7, 8, 2, further=True)[0] == 8


def test_waiting_proposals_are_replaced_where_drafts_disagree():
    def issued(further):
        bench = Bench(Limits(n_ctx=90, policy=Policy.PIPEINFER, credit=3, partitions=8, draft_max=1,
                             tree_max=4, p_min=0.0, path_min=0.001, exact_width=4))
        first = bench.answer(7, 8, 2, 6, confidence=0.9, more=further)
        if further:
            bench.answer(7, 9, 9, confidence=0.9, further=True)
        run = next(one for one in bench.said if isinstance(one, Decode)
                   and one.rows.tokens.tolist() == [5])
        assert 7 in first
        return bench.feed(RunDone(run.run_id, (Choice(7),)))

    assert issued(further=False)[0] in (8, 2)
    assert issued(further=True)[0] == 9


@pytest.mark.parametrize(("branches", "issued"), [(1, []), (2, [9, 2])])
def test_trees_of_two_drafts_are_merged_under_the_published_policy(branches, issued):
    """A chain stays as the first draft named it."""
    bench = Bench(structs.replace(LIMITS, policy=Policy.PUBLISHED, branches=branches, **PUBLISHED))
    assert bench.answer(7, 8, more=True) == [7, 8]
    tree = (Proposal(-1, 7, 0.9), Proposal(-1, 9, 0.3), Proposal(1, 2, 0.9))
    assert bench.feed(Drafted(bench.job.job_id, tree, further=True)) == issued


def test_a_late_or_unknown_answer_changes_nothing():
    bench = Bench()
    bench.answer(7, more=True)
    job = bench.job.job_id
    run = next(one for one in bench.said if isinstance(one, Decode)
               and one.rows.tokens.tolist() == [5])
    bench.feed(RunDone(run.run_id, (Choice(2),)))  # neither guess was right
    assert DraftStop(job) in bench.said
    assert bench.feed(Drafted(job, chain(9), further=True)) == []
    assert bench.feed(Drafted(job + 100, chain(9), further=True)) == []


@pytest.mark.parametrize("limits", [
    LIMITS, Limits(n_ctx=90, policy=Policy.SPECULATIVE, partitions=4, exact_width=4, tree_max=3),
    Limits(n_ctx=90, policy=Policy.PUBLISHED, partitions=6, credit=4, exact_width=4, **PUBLISHED),
    Limits(n_ctx=90, policy=Policy.PUBLISHED, partitions=9, credit=4, exact_width=4, branches=3,
           **PUBLISHED),
])
def test_tokens_are_those_of_plain_decoding(limits):
    some = 0
    for seed in range(20):
        pipeline = Pipeline(limits, n_vocab=7, accuracy=0.6, seed=seed, second=0.8)
        pipeline.submit(Request(1, (3, 1, 4), 40))
        pipeline.drain()
        assert pipeline.output[1] == plain((3, 1, 4), 40, 7, frozenset())
        some += pipeline.corrections
    assert some
