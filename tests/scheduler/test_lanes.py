"""Several requests at once over the simulated pipeline: every interleaving, every budget.

Whatever is shared, copied, evicted, preempted or cancelled, each request gets plain decoding's
tokens, from cells that were computed as if it were alone.
"""

from __future__ import annotations

import random

import pytest

from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.messages import Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Request, SeqCopy
from pipeinfer.scheduler.events import AbortRequest, Emit, Enqueue, Finish
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits
from tests.kit.sample import fewer
from tests.kit.simulated import Pipeline, plain

N_VOCAB = 7

BASES = tuple(tuple(random.Random(k).choices(range(N_VOCAB), k=45)) for k in range(2))


def check_chains(pipeline):
    """Each id's tokens in flight are one chain: the position of a row is the number of cells of
    its only id, whatever was dropped before."""
    cells = {}
    for item in pipeline.log:
        for op in getattr(item, "ops", ()):
            if isinstance(op, SeqCopy):
                cells[op.dst] = op.p1
            else:
                cells[op.seq_id] = min(cells.get(op.seq_id, 0), op.p0)
        if isinstance(item, Decode):
            assert len(set(item.lanes)) == 1
            for pos, ids in zip(item.rows.positions.tolist(), item.rows.seq_ids, strict=True):
                assert len(ids) == 1
                assert pos == cells.get(ids[0], 0)
                cells[ids[0]] = pos + 1


@pytest.mark.parametrize("policy", [Policy.SPECULATIVE, Policy.PIPEINFER, Policy.PUBLISHED])
def test_chains_are_speculated(policy):
    limits = Limits(n_ctx=90, policy=policy, exact_width=4, credit=4, chains=True, partitions=0,
                    tree_max=3)
    pipeline = run_all(limits, [Request(0, (1, 2, 3), 30)], accuracy=0.8, seed=3)
    check_chains(pipeline)
    assert pipeline.stats(0).accepted_speculative > 5


def check_outputs(pipeline, asked):
    for request in asked:
        wanted = plain(request.prompt, request.max_tokens, N_VOCAB, request.eos_ids)
        wanted = wanted[: pipeline.scheduler.limits.n_ctx - len(request.prompt)]
        got = pipeline.output[request.request_id]
        if pipeline.finished[request.request_id] == "abort":
            assert got == wanted[: len(got)]
        else:
            assert got == wanted


def check_at_rest(pipeline):
    """Only remembered prompts are left, and they can be dropped without a trace."""
    scheduler = pipeline.scheduler
    admission = scheduler.admission
    assert scheduler.idle
    assert scheduler.state.useful == scheduler.state.plain == 0
    assert scheduler.state.chunks == scheduler.state.guess_rows == 0
    assert not scheduler.state.tips
    assert not scheduler._filling
    assert len(admission.prefixes.kept) <= scheduler.limits.kept
    held = set(admission.pool.owner)
    assert held == {-1 - holder for holder in admission.prefixes.kept}
    assert sorted([*admission.pool.free, *held]) == list(range(admission.pool.size))
    cells = {cell for stage in pipeline.stages[:1] for cell in stage.kv.cells}
    if not scheduler.limits.states:  # whose cached texts count apart, though their cells are shared
        assert len(cells) == admission.prefixes.cells
    admission.forget_all()
    ops = admission.pool.take_ops()
    for stage in pipeline.stages:
        stage.kv.apply(ops)
        assert not stage.kv.cells
        if scheduler.limits.states:
            stage.states.apply(ops)
        assert not stage.states.texts
    assert not any(root.children for root in admission.prefixes._roots.values())
    assert admission.prefixes.cells == 0


def run_all(limits, asked, **options):
    pipeline = Pipeline(limits, n_vocab=N_VOCAB, **options)
    for request in asked:
        pipeline.submit(request)
    pipeline.drain()
    check_outputs(pipeline, asked)
    return pipeline


def shared_runs(pipeline):
    return [run for run in pipeline.runs() if len(set(run.lanes)) > 1]


def test_lanes_share_runs_when_the_pipeline_is_full():
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, exact_width=4, credit=3, parallel=6,
                    chunk=8, partitions=0)
    asked = [Request(i, (1, 2, i), 40) for i in range(6)]
    pipeline = run_all(limits, asked, n_stages=2, seed=1)
    shared = shared_runs(pipeline)
    assert shared
    assert max(len(run.rows) for run in shared) <= 4


def test_more_lanes_than_r_share_a_run_where_its_rows_were_tried():
    limits = Limits(n_ctx=200, exact_width=2, group_max=5, draft_max=4, tree_max=4, credit=2,
                    parallel=6, chunk=2)
    asked = [Request(i, (1, 2, i), 40) for i in range(6)]
    pipeline = run_all(limits, asked, n_stages=2, seed=1)
    assert max(len(run.rows) for run in shared_runs(pipeline)) == 5
    assert all(len(run.rows) <= 2 for run in pipeline.runs() if len(set(run.lanes)) == 1)


def test_nothing_is_shared_where_a_further_row_costs_more_than_a_run():
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, exact_width=4, credit=3, parallel=6,
                    chunk=8, partitions=0, share=(1, 1, 1, 1))
    asked = [Request(i, (1, 2, i), 40) for i in range(6)]
    pipeline = run_all(limits, asked, n_stages=2, seed=1)
    assert not shared_runs(pipeline)


@pytest.mark.parametrize("shared", [False, True])
def test_where_stages_share_their_cores_tokens_take_one_run_at_a_time(shared):
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, exact_width=2, credit=9, parallel=6,
                    chunk=8, partitions=0, same_cores=shared)
    pipeline = Pipeline(limits, n_stages=2, n_vocab=N_VOCAB, seed=1)
    asked = [Request(i, (1, 2, i), 40) for i in range(6)]
    for request in asked:
        pipeline.submit(request)
    seen = 0
    while pipeline.step():
        state = pipeline.scheduler.state
        if not state.chunks:
            seen = max(seen, state.plain)
    assert seen >= 1
    assert (seen == 1) is shared
    check_outputs(pipeline, asked)


def test_a_shared_run_is_cancelled_only_when_all_its_rows_are_dead():
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, exact_width=4, credit=2, parallel=4,
                    chunk=8, partitions=0)
    pipeline = Pipeline(limits, n_stages=3, n_vocab=N_VOCAB, seed=2)
    asked = [Request(i, (1, 2, i), 60) for i in range(4)]
    for request in asked:
        pipeline.submit(request)
    scheduler = pipeline.scheduler

    def shared_run():
        return next((run for run in scheduler.runs.values()
                     if run.useful and len(run.lanes) > 1), None)

    while shared_run() is None:
        assert pipeline.step()
    run = shared_run()
    first, *others = run.lanes
    pipeline.feed(AbortRequest(first.request.request_id, "abort"))
    assert run.useful
    for lane in others:
        pipeline.feed(AbortRequest(lane.request.request_id, "abort"))
    assert not run.useful
    pipeline.drain()
    check_outputs(pipeline, asked)


def test_speculation_stops_while_requests_fill_the_pipeline_and_resumes():
    limits = Limits(n_ctx=300, exact_width=4, credit=4, parallel=8, chunk=8)
    alone = run_all(limits, [Request(0, (1, 2), 120)], n_stages=3, seed=3)
    assert alone.stats(0).speculative_runs > 20
    asked = [Request(i, (1, 2, i), 120 if i == 0 else 40) for i in range(8)]
    crowd = run_all(limits, asked, n_stages=3, seed=3)
    others = [crowd.stats(i).speculative_runs for i in range(1, 8)]
    assert crowd.stats(0).speculative_runs > 10  # it was alone in the end
    assert sum(others) < 20
    loud = run_all(Limits(n_ctx=300, exact_width=4, credit=4, parallel=8, chunk=8, alone=True),
                   asked, n_stages=3, seed=3)
    assert sum(loud.stats(i).speculative_runs for i in range(1, 8)) > 60


def test_a_long_prompt_does_not_stall_a_running_stream():
    """Between two chunks of a newcomer every running lane gets its token into the pipeline."""
    limits = Limits(n_ctx=400, policy=Policy.ITERATIVE, exact_width=4, credit=3, parallel=3,
                    chunk=8, partitions=0)
    pipeline = Pipeline(limits, n_stages=2, n_vocab=N_VOCAB, seed=4)
    pipeline.submit(Request(0, (1, 2), 200))
    while len(pipeline.output[0]) < 5:
        pipeline.step()
    start = len(pipeline.log)
    pipeline.submit(Request(1, tuple(i % N_VOCAB for i in range(240)), 4))
    pipeline.drain()
    kinds = ["chunk" if len(i.rows) == 8 else "token" for i in pipeline.log[start:]
             if isinstance(i, Decode)]
    kinds = kinds[: len(kinds) - kinds[::-1].index("chunk")]
    assert kinds.count("chunk") == 30
    longest = max(len(part) for part in "".join(k[0] for k in kinds).split("t"))
    assert longest <= 4, kinds


def test_prompts_that_start_alike_are_computed_once():
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, chunk=8, credit=4, parallel=4, kept=2,
                    partitions=0)
    asked = [Request(i, (*BASES[0][:40], i), 5) for i in range(4)]
    pipeline = run_all(limits, asked, n_stages=3, seed=5)
    prompt_rows = sum(len(i.rows) for i in pipeline.log if isinstance(i, Decode)
                      and i.rows.positions[0] < 41)
    assert prompt_rows == 40 + 4  # each one's last, partial chunk is its own
    assert sorted(pipeline.stats(i).reused for i in range(4)) == [0, 40, 40, 40]
    check_at_rest(pipeline)


def test_the_next_turn_of_a_conversation_reuses_the_last_prompt():
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, chunk=8, credit=4, kept=1, partitions=0)
    pipeline = Pipeline(limits, n_stages=2, n_vocab=N_VOCAB, seed=6)
    pipeline.answer(BASES[0][:30], 9)
    second = pipeline.answer((*BASES[0][:30], *pipeline.output[0], 1, 2, 3), 9, 1)
    assert second.reused == 24  # whole chunks of the first prompt, no output
    assert len(pipeline.scheduler.admission.prefixes.kept) == 1
    check_at_rest(pipeline)


def test_the_least_recently_used_prompt_goes_first():
    limits = Limits(n_ctx=60, policy=Policy.ITERATIVE, chunk=4, credit=4, kept=3, partitions=0,
                    cells=60)
    pipeline = Pipeline(limits, n_stages=2, n_vocab=N_VOCAB, seed=7)

    def ask(request_id, head):
        return pipeline.answer((head,) * 17, 2, request_id).reused

    assert [ask(0, 1), ask(1, 2), ask(2, 1)] == [0, 0, 16]
    assert ask(3, 3) == 0
    assert ask(4, 4) == 0  # no cells for four: prompt 2 was not used for the longest time
    assert [ask(5, 3), ask(6, 1)] == [16, 16]
    assert ask(7, 2) == 0


@pytest.mark.parametrize("n_kept", [1, 4, 16])
def test_remembered_prompts_give_way_to_a_request_that_is_alone(n_kept):
    limits = Limits(n_ctx=60, policy=Policy.ITERATIVE, chunk=4, credit=2, parallel=4, cells=60,
                    kept=n_kept, partitions=0)
    pipeline = Pipeline(limits, n_stages=1, n_vocab=N_VOCAB, seed=7)
    asked = [*(Request(i, (i % N_VOCAB,) * 13, 1) for i in range(4)), Request(4, (5, 6), 58)]
    for request in asked:
        pipeline.submit(request)
        pipeline.drain()
    check_outputs(pipeline, asked)
    assert pipeline.max_cells <= 60
    check_at_rest(pipeline)


@pytest.mark.parametrize("options", [{"policy": Policy.SPECULATIVE}, {"join_tip": True}])
def test_guesses_that_travel_with_tokens_stay_within_their_cells(options):
    limits = Limits(n_ctx=256, chunk=4, exact_width=16, credit=2, parallel=32, cells=640, kept=4,
                    draft_max=8, tree_max=15, alone=True, guess_rows=64, **options)
    pipeline = Pipeline(limits, n_stages=1, n_vocab=N_VOCAB, accuracy=0.2, seed=3)
    asked = [Request(i, (1, 2, i % N_VOCAB), fewer(60, 20)) for i in range(32)]
    for request in asked:
        pipeline.submit(request)
    while pipeline.scheduler.lanes:  # a stage that is slower than the draft
        options = pipeline.choices()
        quick = [i for i, (kind, _) in enumerate(options) if kind != "stage"]
        pipeline.step(quick[0] if quick else 0)
        assert pipeline.scheduler.state.guess_rows <= 64
    pipeline.drain()
    check_outputs(pipeline, asked)
    assert pipeline.max_cells <= 640 + 64


def test_the_youngest_request_is_preempted_without_cells_and_replayed():
    limits = Limits(n_ctx=100, chunk=4, credit=4, parallel=3, cells=100, exact_width=4)
    asked = [Request(i, (1, 2, 3, i), 90) for i in range(3)]
    pipeline = run_all(limits, asked, n_stages=2, seed=8)
    preempted = [pipeline.stats(i).preempted for i in range(3)]
    assert preempted[0] == 0
    assert preempted[2] > 0
    order = [i.request_id for i in pipeline.log if isinstance(i, Finish)]
    assert order == [0, 1, 2]


def test_a_request_goes_on_from_tokens_that_another_cluster_made():
    limits = Limits(n_ctx=100, chunk=4, credit=4, exact_width=4)
    prompt = BASES[1][:11]
    wanted = plain(prompt, 40, N_VOCAB)
    for done in (1, 2, 17, 39, 40):
        pipeline = Pipeline(limits, n_stages=3, n_vocab=N_VOCAB, seed=done)
        pipeline.output[0] = []
        pipeline.feed(Enqueue(Request(0, prompt, 40), tuple(wanted[:done])))
        pipeline.drain()
        assert pipeline.output[0] == wanted[done:]
        assert pipeline.finished[0] == "length"


def test_a_waiting_request_can_be_aborted():
    limits = Limits(n_ctx=100, parallel=1)
    pipeline = Pipeline(limits, n_vocab=N_VOCAB, seed=1)
    for request_id in range(3):
        pipeline.submit(Request(request_id, (1, 2), 9))
    pipeline.abort(1)
    assert pipeline.finished[1] == "abort"
    pipeline.drain()
    assert pipeline.finished == {0: "length", 1: "abort", 2: "length"}


def test_the_draft_hears_of_a_request_that_leaves_during_its_prompt():
    limits = Limits(n_ctx=200, exact_width=4, credit=2, chunk=8, parallel=2)
    pipeline = Pipeline(limits, n_vocab=N_VOCAB, seed=1)
    pipeline.submit(Request(0, BASES[0], 9))
    (job,) = (i for i in pipeline.log if isinstance(i, StartDraft))
    assert job.max_tokens == 0
    pipeline.abort(0)
    assert DraftStop(job.job_id) in pipeline.log


def test_lanes_are_served_in_order():
    """No lane falls behind others that started with it."""
    limits = Limits(n_ctx=300, policy=Policy.ITERATIVE, exact_width=2, credit=3, parallel=5,
                    chunk=8, partitions=0)
    pipeline = Pipeline(limits, n_stages=2, n_vocab=N_VOCAB, seed=9)
    asked = [Request(i, (1, i), 100) for i in range(5)]
    for request in asked:
        pipeline.submit(request)
    while not pipeline.finished:
        pipeline.step()
        counts = [len(pipeline.output[i]) for i in range(5)]
        assert max(counts) - min(counts) <= 6
    pipeline.drain()
    check_outputs(pipeline, asked)


def test_the_simulation_notices_cells_of_another_prompt(monkeypatch):
    """Negative control: a prefix copied from the wrong place must not go unseen."""
    def share(self, src, dst, start, stop):
        others = [i for i in range(self.size) if i not in (src, dst) and i in self.owner]
        real(self, others[0] if others else src, dst, start, stop)

    real = SequencePool.share
    monkeypatch.setattr(SequencePool, "share", share)
    limits = Limits(n_ctx=200, policy=Policy.ITERATIVE, chunk=8, credit=4, parallel=2, kept=4,
                    partitions=0)
    asked = [Request(i, (*BASES[i % 2][:40], i), 5) for i in range(6)]
    with pytest.raises(AssertionError):
        run_all(limits, asked, n_stages=3, seed=5)


def test_events_of_a_request_end_with_its_terminal_one():
    limits = Limits(n_ctx=120, exact_width=4, credit=4, parallel=4, kept=2, chunk=8, cells=200)
    pipeline = Pipeline(limits, n_stages=3, n_vocab=N_VOCAB, seed=11)
    rng = random.Random(12)
    for request_id in range(40):
        pipeline.submit(Request(request_id, BASES[request_id % 2][: rng.randint(1, 40)],
                                rng.randint(1, 30)))
        for _ in range(rng.randint(0, 80)):
            pipeline.step()
        if rng.random() < 0.3:
            pipeline.abort(rng.randrange(request_id + 1))
    pipeline.drain()
    ended: set[int] = set()
    for item in pipeline.log:
        if isinstance(item, Emit):
            assert item.request_id not in ended
        elif isinstance(item, Finish):
            assert item.request_id not in ended
            ended.add(item.request_id)
    assert ended == set(range(40))
    check_at_rest(pipeline)
