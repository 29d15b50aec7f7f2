"""Lost stages: whatever was in flight when they went, every request gets the tokens that it would
have got without, each of them once."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.core.types import Request
from pipeinfer.errors import ProtocolError
from pipeinfer.scheduler.events import Finish, Refuse, RunDone
from pipeinfer.scheduler.settings import Limits
from tests.kit.sample import matrix
from tests.kit.simulated import Lossy, LossyPipeline, plain
from tests.kit.threaded import ThreadedPipeline
from tests.scheduler.test_lanes import check_at_rest
from tests.scheduler.test_response_threads import METHODS, N_CTX, ask, expected, text_of

N_VOCAB = 7
BASE = tuple(random.Random(1).choices(range(N_VOCAB), k=40))

LIMITS = {
    "iterative": Limits(n_ctx=90, policy=Policy.ITERATIVE, exact_width=4, credit=4, chunk=7,
                        parallel=3, kept=2),
    "speculative": Limits(n_ctx=90, policy=Policy.SPECULATIVE, exact_width=8, chunk=4, parallel=2),
    "pipeinfer": Limits(n_ctx=90, exact_width=4, credit=5, chunk=7, parallel=3, kept=3,
                        partitions=5, draft_max=3),
    "alone": Limits(n_ctx=90, exact_width=8, credit=9, chunk=4, alternatives=2, eager=True,
                    join_tip=True),
    "shared runs": Limits(n_ctx=90, exact_width=4, credit=4, chunk=7, parallel=6, kept=1,
                          share=(1, 2, 2, 4)),
    "small cache": Limits(n_ctx=90, exact_width=4, credit=4, chunk=4, parallel=6, cells=90,
                          kept=1),
    "no cancel": Limits(n_ctx=90, exact_width=4, credit=6, chunk=7, parallel=2,
                        ablations=frozenset({Ablation.CANCEL})),
}


class LossyThreads(Lossy, ThreadedPipeline):
    """Responses with threads whose stages are lost."""


def drive(pipeline, rng, losses):
    """Steps with losses at random moments in between, then to the end."""
    for _ in range(losses):
        for _ in range(rng.choice([0, 1, 3, 12, 40, 120])):
            if not pipeline.step():
                break
        pipeline.lose(rng.choice([1, 2, 4]))
    pipeline.drain()


def check_each_once(pipeline, requests):
    """One terminal event each, and it is the last word on the request."""
    ends = [i.request_id for i in pipeline.log if isinstance(i, Finish | Refuse)]
    assert sorted(ends) == sorted(requests)


def test_preemption_and_losses_together():
    preempted = 0
    for seed in range(5):
        rng = random.Random(seed)
        pipeline = LossyPipeline(LIMITS["small cache"], n_vocab=N_VOCAB, seed=seed)
        asked = [Request(i, (*BASE[:8], i), 60) for i in range(5)]
        for request in asked:
            pipeline.submit(request)
        drive(pipeline, rng, 3)
        for request in asked:
            assert pipeline.output[request.request_id] == plain(request.prompt, 60, N_VOCAB)
        preempted += sum(i.stats.preempted for i in pipeline.log if isinstance(i, Finish))
        check_at_rest(pipeline)
    assert preempted


@pytest.mark.parametrize(("method", "name"), matrix(METHODS, ["pipeinfer", "small"]))
def test_losses_in_responses_with_threads(method, name):
    limits = {"pipeinfer": Limits(n_ctx=N_CTX, exact_width=4, credit=5, threads=5),
              "small": Limits(n_ctx=N_CTX, exact_width=4, credit=6, parallel=3, threads=4,
                              cells=120, kept=2, chunk=8)}[name]
    words, _ = METHODS[method]
    compared = 0
    for order in range(4):
        rng = random.Random(order)
        seeds = [order, order + 1] if name == "small" else [order]
        pipeline = LossyThreads(limits, words, seed=order, n_stages=1 + order % 3)
        for k, seed in enumerate(seeds):
            ask(pipeline, k, method, seed)
        drive(pipeline, rng, 3)
        check_each_once(pipeline, range(len(seeds)))
        for k, seed in enumerate(seeds):
            if pipeline.finished[k] != "context":  # its threads together outgrew the cache
                assert text_of(pipeline, k) == expected(method, seed)[1], (order, k)
                compared += 1
        check_at_rest(pipeline)
    assert compared >= 4


# --- one loss, looked at closely ----------------------------------------------------------------


def halfway(**options):
    """Two requests, one of them well on its way and one that waits."""
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, exact_width=4, credit=2, chunk=8,
                    parallel=1, **options)
    pipeline = LossyPipeline(limits, n_vocab=N_VOCAB, n_stages=2, seed=1)
    pipeline.submit(Request(0, BASE[:10], 20))
    pipeline.submit(Request(1, BASE[:4], 5))
    while len(pipeline.output[0]) < 6:
        pipeline.step()
    return pipeline


def test_emitted_tokens_are_replayed_and_not_emitted_again():
    pipeline = halfway()
    before = list(pipeline.output[0])
    at = len(pipeline.log)
    pipeline.lose(1)
    first = pipeline.runs(at)
    assert first[0].rows.tokens.tolist() == list(BASE[:8])
    pipeline.drain()
    replayed = [t for i in pipeline.runs(at) if i.lanes[0] == first[0].lanes[0]
                for t in i.rows.tokens.tolist()]
    assert replayed[: 10 + len(before)] == [*BASE[:10], *before]
    assert pipeline.output[0] == plain(BASE[:10], 20, N_VOCAB)
    assert (pipeline.stats(0).recovered, pipeline.stats(1).recovered) == (1, 0)


def test_lanes_and_runs_get_numbers_that_nobody_had_before():
    pipeline = halfway()
    at = len(pipeline.log)
    old = pipeline.runs()
    pipeline.lose(2)
    pipeline.drain()
    new = pipeline.runs(at)
    assert min(i.run_id for i in new) > max(i.run_id for i in old)
    assert min(min(i.lanes) for i in new) > max(max(i.lanes) for i in old)


def test_an_answer_of_the_old_stages_is_an_error():
    pipeline = halfway()
    run_id = next(iter(pipeline.scheduler.runs))
    pipeline.lose(2)
    with pytest.raises(ProtocolError, match=f"run {run_id} came back"):
        pipeline.scheduler.handle(RunDone(run_id, None))


def test_nothing_is_sent_for_what_the_old_stages_held():
    """New stages know no lane and no cell: no lane is closed, no run called off, no id cleaned."""
    pipeline = halfway()
    at = len(pipeline.log)
    pipeline.lose(2)
    kinds = [type(i).__name__ for i in pipeline.log[at:]]
    assert kinds[0] == "LaneOpen"
    assert not {"LaneClose", "Cancel", "CacheOps"} & set(kinds)


def test_other_sizes_may_come_with_the_new_stages():
    pipeline = halfway()
    pipeline.lose(3, structs.replace(pipeline.scheduler.limits, exact_width=2, credit=5))
    pipeline.drain()
    assert pipeline.scheduler.limits.exact_width == 2
    assert pipeline.output[0] == plain(BASE[:10], 20, N_VOCAB)
    check_at_rest(pipeline)


def test_order_of_submission_is_kept():
    limits = structs.replace(LIMITS["iterative"], parallel=2)
    pipeline = LossyPipeline(limits, n_vocab=N_VOCAB, seed=3)
    for i in range(5):
        pipeline.submit(Request(i, (1, 2, i), 6))
    for _ in range(25):
        pipeline.step()
    open_before = [lane.request.request_id for lane in pipeline.scheduler.lanes.values()]
    pipeline.lose(2)
    now = [lane.request.request_id for lane in pipeline.scheduler.lanes.values()]
    waiting = [ticket.request.request_id for ticket in pipeline.scheduler.waiting]
    assert now == sorted(open_before)
    assert [*now, *waiting] == [i for i in range(5) if i not in pipeline.finished]


def test_a_loss_while_nothing_runs_forgets_what_was_remembered():
    pipeline = LossyPipeline(LIMITS["pipeinfer"], n_vocab=N_VOCAB, seed=3)
    pipeline.answer(BASE[:30], 4)
    assert pipeline.scheduler.admission.prefixes.kept
    pipeline.lose(2)
    assert pipeline.scheduler.idle
    assert not pipeline.scheduler.admission.prefixes.kept
    stats = pipeline.answer(BASE[:30], 4, 1)
    assert (stats.reused, stats.recovered) == (0, 0)
    check_at_rest(pipeline)
