"""The pure scheduler over a simulated pipeline: every interleaving gives plain decoding's tokens.

The simulated choice after a row is a hash of the tokens that the row can really see, at a stage
that applied exactly the operations and rows it was sent, so wrong cells mean wrong tokens.
"""

from __future__ import annotations

import pytest

from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.messages import Cancel, Decode
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.core.types import END, Choice, Request, SeqRemove
from pipeinfer.errors import ContextOverflow, InvariantError, ProtocolError
from pipeinfer.scheduler.events import AbortRequest, Drafted, Emit, Enqueue, Finish, Refuse, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.state import SchedulerState
from tests.kit.simulated import Pipeline, plain
from tests.scheduler.test_lanes import check_at_rest


def begun(limits, prompt=(5, 6), count=20):
    """A scheduler whose one request has its first token, 7, and what it said to that."""
    scheduler = Scheduler(limits, validate=True)
    scheduler.handle(Enqueue(Request(0, prompt, count)))
    return scheduler, scheduler.handle(RunDone(0, (Choice(7),)))


class Watched(Pipeline):
    """Counts how many useful guesses' runs are in flight at a time."""

    most_useful = 0

    def feed(self, event):
        super().feed(event)
        useful = [run for run in self.scheduler.runs.values() if run.speculative and run.useful]
        self.most_useful = max(self.most_useful, len(useful))


def long_run(limits, **options):
    pipeline = Watched(limits, n_vocab=7, accuracy=0.7, **options)
    request = Request(0, (1, 2, 3, 4, 5), 150)
    pipeline.submit(request)
    pipeline.drain()
    return pipeline, request


@pytest.mark.parametrize("break_it", ["truncate", "release"])
def test_a_missing_cache_operation_is_noticed(monkeypatch, break_it):
    """Negative control of the taint test: the simulation must be able to fail."""
    if break_it == "truncate":
        monkeypatch.setattr(SequencePool, "truncate", lambda self, seq_id, length: None)
    else:
        def release(self, seq_id, warm):
            self.owner.pop(seq_id)
            self.free.append(seq_id)

        monkeypatch.setattr(SequencePool, "release", release)
    limits = Limits(n_ctx=400, exact_width=8, branches=3, credit=4)

    def many_runs():
        for seed in range(20):
            long_run(limits, seed=seed)

    with pytest.raises(AssertionError):
        many_runs()


def test_restarting_a_chain_over_skipped_cells_is_noticed(monkeypatch):
    """The published corruption (docs/algorithms.md 4.7): a live run reads cells of a skipped one.

    Cancelling a run whose tokens are still wanted must end in an error, not in wrong tokens.
    """
    def cancel_anything(self, runs):
        for run in list(self.runs.values())[:1]:
            self.retire(run)
            self.emit(Cancel((run.run_id,)))

    monkeypatch.setattr(SchedulerState, "cancel", cancel_anything)
    noticed = 0
    for seed in range(20):
        try:
            pipeline, request = long_run(Limits(n_ctx=400, exact_width=8), seed=seed)
            noticed += pipeline.output[0] != plain(request.prompt, 150, 7)
        except (AssertionError, ProtocolError, InvariantError):
            noticed += 1
    assert noticed == 20


def test_speculation_really_happens_and_cancels():
    pipeline, _ = long_run(Limits(n_ctx=400, exact_width=4, credit=6, branches=2), seed=3,
                           n_stages=4)
    stats = pipeline.stats()
    assert stats.accepted == 150
    assert stats.accepted_speculative > 40
    assert stats.cancelled_runs > 10
    assert stats.skipped_runs > 0
    assert stats.guesses_tested >= stats.accepted_speculative


def test_no_run_is_issued_twice_for_a_path():
    """A token is issued once per path, so no run can become superfluous."""
    pipeline, request = long_run(Limits(n_ctx=400, exact_width=4, credit=6), seed=5, n_stages=4)
    accepted = [i.choice.token for i in pipeline.log if isinstance(i, Emit)]
    issued = sum(len(i.rows) for i in pipeline.runs())
    stats = pipeline.stats()
    wasted = stats.issued_speculative - stats.accepted_speculative
    assert issued == len(request.prompt) + len(accepted) - 1 + wasted


@pytest.mark.parametrize("ablation", COMPONENTS[Policy.PIPEINFER])
def test_what_an_ablation_switches_off(ablation):
    limits = Limits(n_ctx=400, ablations=frozenset({ablation}), exact_width=8, credit=6,
                    branches=3, draft_max=2)
    pipeline, request = long_run(limits, seed=1)
    runs = pipeline.runs()
    cancels = [i for i in pipeline.log if isinstance(i, Cancel)]
    widest = max(len({s for group in r.rows.seq_ids for s in group}) for r in runs)
    speculative = [r for r in runs if r.speculative]
    assert pipeline.output[0] == plain(request.prompt, 150, 7)
    match ablation:
        case Ablation.CANCEL:
            assert not cancels
        case Ablation.ALTERNATIVES:
            assert widest == 1
        case Ablation.ASYNC:
            assert not speculative
            assert max(len(r.rows) for r in runs) > 1
        case Ablation.CONTINUOUS:
            assert speculative
            assert max(len(r.rows) for r in speculative) > 2
            assert pipeline.most_useful == 1


def test_limits_on_rows_and_runs():
    limits = Limits(n_ctx=400, exact_width=3, credit=2, draft_max=8, chunk=4)
    scheduler = Scheduler(limits, validate=True)
    out = scheduler.handle(Enqueue(Request(0, tuple(range(10)), 20)))
    chunks = [i for i in out if isinstance(i, Decode)]
    assert [len(c.rows) for c in chunks] == [4, 4]
    assert [c.parent_id for c in chunks] == [-1, 0]
    out = scheduler.handle(RunDone(0, ()))
    last = next(i for i in out if isinstance(i, Decode))
    assert last.rows.positions.tolist() == [8, 9]
    assert last.rows.outputs.tolist() == [False, True]
    job = next(i for i in out if isinstance(i, StartDraft))  # ahead of the room for its guesses
    assert job.max_tokens == 3
    assert job.base == 10


def test_a_verified_token_is_issued_at_once_and_a_wrong_guess_cancelled():
    """The non-speculative token goes out alone and at once; a guess below it follows; a wrong
    guess is cancelled and its cells are removed before the right token."""
    scheduler, out = begun(Limits(n_ctx=100, exact_width=4, credit=4))
    issue = next(i for i in out if isinstance(i, Decode))
    assert (issue.rows.tokens.tolist(), issue.rows.positions.tolist()) == ([7], [2])
    job = next(i for i in out if isinstance(i, StartDraft))
    out = scheduler.handle(Drafted(job.job_id, (Proposal(-1, 8), Proposal(0, 9))))
    guess = next(i for i in out if isinstance(i, Decode))
    assert guess.speculative
    assert guess.parent_id == issue.run_id
    assert guess.rows.positions.tolist() == [3, 4]
    out = scheduler.handle(RunDone(issue.run_id, (Choice(1),)))
    assert [i for i in out if isinstance(i, Cancel)] == [Cancel((guess.run_id,))]
    assert any(isinstance(i, DraftStop) for i in out)
    right = next(i for i in out if isinstance(i, Decode))
    assert right.rows.tokens.tolist() == [1]
    assert right.ops == (SeqRemove(0, 3, END),)
    assert scheduler.handle(RunDone(guess.run_id, None)) is not None


def test_a_skipped_live_run_is_an_error():
    scheduler = Scheduler(Limits(n_ctx=100), validate=True)
    scheduler.handle(Enqueue(Request(0, (5, 6), 20)))
    with pytest.raises(ProtocolError, match="live rows"):
        scheduler.handle(RunDone(0, None))


@pytest.mark.parametrize("event", [RunDone(99, ()), RunDone(0, (Choice(1), Choice(2)))])
def test_results_that_do_not_fit(event):
    scheduler = Scheduler(Limits(n_ctx=100), validate=True)
    scheduler.handle(Enqueue(Request(0, (5, 6), 20)))
    with pytest.raises(ProtocolError):
        scheduler.handle(event)


def test_the_context_ends_a_request_and_a_long_prompt_is_refused():
    scheduler = Scheduler(Limits(n_ctx=8, policy=Policy.ITERATIVE), validate=True)
    out = scheduler.handle(Enqueue(Request(0, tuple(range(8)), 4)))
    assert isinstance(out[0], Refuse)
    assert isinstance(out[0].error, ContextOverflow)
    pipeline = Pipeline(Limits(n_ctx=8, exact_width=4), n_vocab=5)
    pipeline.submit(Request(1, (1, 2, 3), 50))
    pipeline.drain()
    assert pipeline.finished[1] == "context"
    assert len(pipeline.output[1]) == 5
    check_at_rest(pipeline)


def test_abort_of_a_waiting_and_of_an_unknown_request():
    scheduler = Scheduler(Limits(n_ctx=100), validate=True)
    scheduler.handle(Enqueue(Request(0, (1,), 5)))
    scheduler.handle(Enqueue(Request(1, (1,), 5)))
    out = scheduler.handle(AbortRequest(1, "left"))
    assert [(i.request_id, i.reason) for i in out if isinstance(i, Finish)] == [(1, "left")]
    assert not scheduler.handle(AbortRequest(42, "left"))


def test_reconfigure_only_when_idle():
    scheduler = Scheduler(Limits(n_ctx=100), validate=True)
    scheduler.handle(Enqueue(Request(0, (1,), 5)))
    with pytest.raises(ProtocolError):
        scheduler.reconfigure(Limits(n_ctx=50))


def test_recovery_lets_fewer_guesses_out_the_more_are_on_their_way():
    """Guesses of one confidence leave until the runs behind the last acceptance have raised the
    cutoff above it."""
    issued = {}
    for recovery in (0.0, 0.2):
        scheduler, out = begun(Limits(n_ctx=100, exact_width=4, credit=9, draft_max=1, p_min=0.4,
                                      p_recovery=recovery, path_min=0.0), count=40)
        issued[recovery], asked = 0, 0
        while (jobs := [i for i in out if isinstance(i, StartDraft)]) and asked < 12:
            asked += 1
            out = scheduler.handle(Drafted(jobs[0].job_id, (Proposal(-1, 8, 0.7),)))
            issued[recovery] += sum(isinstance(i, Decode) and i.speculative for i in out)
    assert 1 <= issued[0.2] <= 3 < issued[0.0]


def test_decay_does_not_ask_for_ever():
    """Empty drafts lower the cutoff until it cannot matter any more, then wait for a result."""
    scheduler, out = begun(Limits(n_ctx=100, exact_width=4, p_min=0.4, p_decay=0.1))
    asked = 0
    while jobs := [i for i in out if isinstance(i, StartDraft)]:
        asked += 1
        assert asked < 20
        out = scheduler.handle(Drafted(jobs[0].job_id, ()))
    assert 3 <= asked <= 5


def test_a_joined_tip_travels_with_its_first_guesses():
    scheduler, out = begun(Limits(n_ctx=100, exact_width=4, credit=4, join_tip=True))
    assert not [i for i in out if isinstance(i, Decode)]
    job = next(i for i in out if isinstance(i, StartDraft))
    out = scheduler.handle(Drafted(job.job_id, (Proposal(-1, 8), Proposal(-1, 9))))
    run = next(i for i in out if isinstance(i, Decode))
    assert run.rows.tokens.tolist() == [7, 8, 9]
    assert run.rows.seq_ids[0] == (0, 1)
    assert any(isinstance(i, StartDraft) for i in out)


def test_a_tip_does_not_wait_for_guesses_that_will_not_be_issued():
    _, out = begun(Limits(n_ctx=100, exact_width=4, join_tip=True, path_min=1.0))
    assert [i.rows.tokens.tolist() for i in out if isinstance(i, Decode)] == [[7]]


def test_alternatives_that_are_not_named_count_as_wrong():
    scheduler = Scheduler(Limits(n_ctx=100, exact_width=4), validate=True)
    out = scheduler.handle(Enqueue(Request(0, (5, 6), 20)))
    before = scheduler.calibration.second
    job = next(i for i in reversed(out) if isinstance(i, StartDraft))
    scheduler.handle(Drafted(job.job_id, (Proposal(-1, 8),)))
    scheduler.handle(RunDone(0, (Choice(7),)))
    assert scheduler.calibration.second < before


def test_unknown_events_are_refused():
    with pytest.raises(ProtocolError):
        Scheduler(Limits(n_ctx=10)).handle("hello")


# --- the state --------------------------------------------------------------------------------


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda s: setattr(s.state, "useful", s.state.useful + 1), "useful runs are noted"),
    (lambda s: setattr(s.state, "guess_rows", 7), "draft tokens in flight"),
    (lambda s: s.pool.free.append(next(iter(s.pool.owner))), "free and taken"),
    (lambda s: s.pool.free.pop(), "is lost"),
    (lambda s: s.pool.owner.update({next(iter(s.pool.owner)): 99}), "belongs to a lane"),
    (lambda s: next(iter(s.lanes.values())).accepted.append(4), "frontier is not its last token"),
    (lambda s: setattr(next(iter(s.lanes.values())), "unsent", True), "wait for room"),
    (lambda s: s.runs.clear(), "notes 1 useful runs and has 0|useful runs are noted"),
])
def test_a_state_that_contradicts_itself_is_named(spoil, says):
    scheduler = Scheduler(Limits(n_ctx=100, policy=Policy.ITERATIVE))
    scheduler.handle(Enqueue(Request(0, (1, 2, 3), 5)))
    scheduler.validate_state()
    spoil(scheduler)
    with pytest.raises(InvariantError, match=says):
        scheduler.validate_state()


def test_tuning_leaves_alone_what_runs_in_flight_rely_on():
    scheduler = Scheduler(Limits(n_ctx=400, exact_width=4))
    scheduler.tune(Limits(n_ctx=9, credit=7, exact_width=8))
    assert scheduler.limits == Limits(n_ctx=400, credit=7, exact_width=4)
