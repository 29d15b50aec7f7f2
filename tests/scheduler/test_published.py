"""`--policy published`: a private sequence per speculative run, fixed micro-batches, reactive
cutoffs, the accepted token's run in every round."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.messages import Cancel, Decode
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.core.types import END, Choice, Request, SeqCopy, SeqRemove
from pipeinfer.scheduler import events
from pipeinfer.scheduler.events import Drafted, Emit, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import PUBLISHED, Limits
from pipeinfer.scheduler.token_tree import PLANNED, BufferedTree, Node
from tests.kit.sample import fewer
from tests.kit.simulated import Pipeline

START = structs.replace(Limits(n_ctx=400, policy=Policy.PUBLISHED, exact_width=8, credit=6,
                               partitions=6), **PUBLISHED)


def without(ablation):
    return structs.replace(START, ablations=frozenset({ablation}))


def long_run(limits, accuracy=0.8, **options):
    pipeline = Pipeline(limits, n_vocab=7, accuracy=accuracy, **{"n_stages": 4, **options})
    return pipeline, pipeline.answer((1, 2, 3, 4, 5), 150)


def begin(limits=START):
    """A request whose first token is 7, at position 2, and the draft's first job."""
    scheduler = Scheduler(limits, validate=True)
    scheduler.handle(events.Enqueue(Request(0, (5, 6), 30)))
    out = scheduler.handle(RunDone(0, (Choice(7),)))
    return scheduler, *(next(i for i in out if isinstance(i, kind))
                        for kind in (Decode, StartDraft))


def guess(scheduler, job, tokens):
    """The draft's chain of tokens: the run that it becomes, and the next job."""
    out = scheduler.handle(Drafted(job.job_id, tuple(
        Proposal(k - 1, token, 0.9) for k, token in enumerate(tokens))))
    return (next((i for i in out if isinstance(i, kind)), None) for kind in (Decode, StartDraft))


def test_buffers_by_hand():
    """A run's own id, copies of what is before it, the swap, and the token's run once more."""
    scheduler, tip, job = begin()
    assert tip.rows.seq_ids == ((0,),)
    first, job = guess(scheduler, job, (8, 9))
    assert first.rows.seq_ids == ((1,), (1,))
    assert first.ops == (SeqCopy(0, 1, 0, 3),)  # the tip's own cell with it: early sharing
    second, job = guess(scheduler, job, (10,))
    assert second.rows.seq_ids == ((2,),)
    assert second.ops == (SeqCopy(1, 2, 0, 5),)
    out = scheduler.handle(RunDone(tip.run_id, (Choice(8),)))
    (again,) = [i for i in out if isinstance(i, Decode)]
    assert (again.rows.tokens.tolist(), again.rows.positions.tolist()) == ([8], [3])
    assert not again.speculative
    assert SeqCopy(1, 0, 3, 4) in again.ops  # accepted: into the front buffer
    assert again.rows.seq_ids == ((3,),)
    out = scheduler.handle(RunDone(first.run_id, (Choice(9), Choice(4))))
    assert [i for i in out if isinstance(i, Cancel)] == [Cancel((second.run_id,))]
    (right,) = [i for i in out if isinstance(i, Decode)]
    assert right.rows.tokens.tolist() == [4]
    assert right.rows.seq_ids == ((0,),)
    assert SeqCopy(1, 0, 4, 5) in right.ops
    assert SeqRemove(2, 5) in right.ops  # what the dead run has put there
    assert SeqCopy(0, 3, 3, 5) in right.ops  # every other id hears of what was accepted
    assert sorted(scheduler.pool.free) == [1, 2, 3, 4, 5, 6]


TREE = (Proposal(-1, 8, 0.6), Proposal(-1, 9, 0.3), Proposal(0, 10, 0.9))


def test_buffers_of_a_tree_by_hand():
    """An id for each path; the accepted one is swapped, the others are clean up to the token that
    both paths follow."""
    scheduler, tip, job = begin(structs.replace(START, branches=2))
    assert (job.branches, job.p_split) == (2, 0.1)
    out = scheduler.handle(Drafted(job.job_id, TREE))
    first, job = (next(i for i in out if isinstance(i, kind)) for kind in (Decode, StartDraft))
    assert first.rows.tokens.tolist() == [8, 10, 9]
    assert first.rows.positions.tolist() == [3, 4, 3]
    assert first.rows.seq_ids == ((1,), (1,), (2,))
    assert first.ops == (SeqCopy(0, 1, 0, 3), SeqCopy(0, 2, 0, 3))
    assert job.suffix == (8, 10)  # the next tree is built on this one
    out = scheduler.handle(Drafted(job.job_id, (Proposal(-1, 11, 0.6), Proposal(-1, 12, 0.4))))
    second = next(i for i in out if isinstance(i, Decode))
    assert second.rows.seq_ids == ((3,), (4,))
    assert second.ops == (SeqCopy(1, 3, 0, 5), SeqCopy(1, 4, 0, 5))
    out = scheduler.handle(RunDone(tip.run_id, (Choice(9),)))
    assert Cancel((second.run_id,)) in out
    (again,) = [i for i in out if isinstance(i, Decode)]
    assert again.ops[:5] == (
        SeqCopy(2, 0, 3, 4),  # the swap
        SeqRemove(1, 3, END), SeqRemove(4, 3, END), SeqRemove(3, 3, END), SeqRemove(2, 4, END))
    assert {SeqCopy(0, k, 3, 4) for k in (1, 3, 4)} <= set(again.ops)  # propagation
    assert sorted(scheduler.pool.free) == [1, 2, 3, 4, 5, 6]


def test_rows_that_a_run_repeats_do_not_stay_with_its_id():
    """If the run is skipped they were never computed."""
    pool = SequencePool(2)
    pool.acquire(0)
    tree = BufferedTree(0, pool, Node(5, 2, None, (0,), 7, speculative=False), shares=False)
    tree.issue([Node(7, 3, tree.frontier, (), PLANNED, speculative=True)], 8)
    tree.prune()
    assert pool.warm == {1: 2}


def test_a_tree_repeats_its_path_once_without_multibuffering():
    limits = structs.replace(without(Ablation.MULTIBUFFER), branches=2)
    scheduler, _, job = begin(limits)
    run = next(i for i in scheduler.handle(Drafted(job.job_id, TREE)) if isinstance(i, Decode))
    assert run.rows.tokens.tolist() == [7, 8, 10, 9]
    assert run.rows.outputs.tolist() == [False, True, True, True]
    assert run.rows.seq_ids == ((1, 2), (1,), (1,), (2,))
    assert run.ops == (SeqCopy(0, 1, 0, 2), SeqCopy(0, 2, 0, 2))


def test_side_branches_are_accepted():
    """More tokens are in flight when they are accepted than with a chain of the same draft."""
    trees = structs.replace(START, branches=4, partitions=24)
    forks, found = 0, {START: 0, trees: 0}
    for limits in found:
        for seed in range(fewer(3, 1)):
            pipeline, stats = long_run(limits, accuracy=0.3, seed=seed)
            found[limits] += stats.accepted_speculative
            forks += sum(len(set(i.rows.seq_ids)) > 1 for i in pipeline.log
                         if isinstance(i, Decode) and i.speculative)
    assert forks > fewer(100, 33)
    assert found[trees] > found[START]


def test_ids_are_taken_in_turn():
    pipeline, _ = long_run(START)
    used = [i.rows.seq_ids[0][0] for i in pipeline.log if isinstance(i, Decode) and i.speculative]
    assert set(used) == set(range(1, 7))
    for run in (i for i in pipeline.log if isinstance(i, Decode) and i.speculative):
        assert len({s for ids in run.rows.seq_ids for s in ids}) == 1


def test_a_missing_swap_is_noticed(monkeypatch):
    """Negative control: canonical runs that do not find what was accepted."""
    monkeypatch.setattr("pipeinfer.scheduler.sequence_pool.SequencePool.share",
                        lambda *_: None)
    with pytest.raises(AssertionError):
        long_run(START)


def test_a_missing_propagation_is_only_slower(monkeypatch):
    """It brings copies forward; what an id still lacks is copied when it is taken."""
    monkeypatch.setattr("pipeinfer.scheduler.sequence_pool.SequencePool.propagate",
                        lambda *_: None)
    long_run(START)


def test_every_round_computes_the_accepted_token_once_more():
    pipeline, stats = long_run(START)
    runs = pipeline.runs()
    cancelled = {run for i in pipeline.log if isinstance(i, Cancel) for run in i.run_ids}
    plain_runs = {i.run_id for i in runs if not i.speculative}
    misses = stats.accepted - stats.accepted_speculative
    assert len(plain_runs) > misses + 10
    end = max(k for k, i in enumerate(pipeline.log) if isinstance(i, Emit))  # then its lane ends
    before = {run for i in pipeline.log[:end] if isinstance(i, Cancel) for run in i.run_ids}
    assert cancelled
    assert not before & plain_runs  # never cut while the request runs


@pytest.mark.parametrize("ablation", COMPONENTS[Policy.PUBLISHED])
def test_what_an_ablation_switches_off(ablation):
    pipeline, stats = long_run(without(ablation))
    runs = pipeline.runs()
    speculative = [i for i in runs if i.speculative]
    match ablation:
        case Ablation.CANCEL:
            assert not [i for i in pipeline.log if isinstance(i, Cancel)]
            assert stats.skipped_runs == 0
        case Ablation.MULTIBUFFER:
            repeated = [i for i in speculative if not i.rows.outputs.all()]
            assert len(repeated) == len(speculative) > 20
            assert max(len(i.rows) for i in speculative) == START.exact_width
        case Ablation.ASYNC:
            assert not speculative
            assert max(len(i.rows) for i in runs) > 1
        case Ablation.CONTINUOUS:
            assert max(len(i.rows) for i in speculative) > START.draft_max


@pytest.mark.parametrize("ablation", [None, Ablation.MULTIBUFFER, Ablation.CONTINUOUS])
def test_nothing_is_guessed_before_the_prompt_is_back(ablation):
    """The paper's metric 2; the project's own policy guesses behind the prompt."""
    limits = structs.replace(without(ablation) if ablation else START, chunk=2)
    assert guessed_before_the_first_token(limits) == []
    pipeline, _ = long_run(limits)
    assert any(i.speculative for i in pipeline.log if isinstance(i, Decode))


def test_the_own_policy_guesses_behind_the_prompt():
    kinds = guessed_before_the_first_token(
        structs.replace(START, policy=Policy.PIPEINFER, path_min=0.0, chunk=2))
    assert {StartDraft, Decode} == set(kinds)


def guessed_before_the_first_token(limits):
    """What is drafted and issued as a guess before the prompt's result; a draft that only reads
    the prompt is neither."""
    pipeline, _ = long_run(limits)
    first = next(k for k, i in enumerate(pipeline.log) if isinstance(i, Emit))
    return [type(i) for i in pipeline.log[:first] if (isinstance(i, StartDraft) and i.max_tokens)
            or (isinstance(i, Decode) and i.speculative)]


def cutoffs(limits, answers):
    """The cutoff of each job, when the draft's answers have so many tokens."""
    scheduler, _, job = begin(limits)
    found = []
    for count in answers:
        if job is None:
            break
        found.append(round(job.p_min, 3))
        _, job = guess(scheduler, job, range(10, 10 + count))
    return found


def test_recovery_asks_more_of_every_further_run():
    assert cutoffs(START, (3, 3, 3)) == [0.1, 0.1, 0.1]
    asks_more = structs.replace(START, p_recovery=0.4)
    assert cutoffs(asks_more, (3,) * 5) == [0.1, 0.5, 0.9]  # then it waits


def test_decay_asks_less_after_every_empty_draft():
    assert cutoffs(START, (0, 0)) == [0.1]  # without it: until a result is back
    assert cutoffs(structs.replace(START, p_min=0.4, p_decay=0.15), (0,) * 6) == [0.4, 0.25, 0.1]


def test_the_tree_is_a_chain():
    scheduler, _, job = begin()
    out = scheduler.handle(Drafted(job.job_id, (Proposal(-1, 8, 0.9), Proposal(-1, 9, 0.8))))
    assert [i.rows.tokens.tolist() for i in out if isinstance(i, Decode)] == [[8]]
    (lane,) = scheduler.lanes.values()
    assert isinstance(lane.tree, BufferedTree)
