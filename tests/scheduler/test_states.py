"""Models whose layers keep a state: an id for every speculative run, nothing removed in part."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.core.messages import NO_RUN, Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SeqCopy, SeqRemove
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.speculation import Speculation
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.state_tree import StateTree
from pipeinfer.scheduler.token_tree import PLANNED, Node
from tests.kit.simulated import Pipeline

LIMITS = Limits(n_ctx=400, states=True, credit=5, partitions=8, draft_max=1)


def long_run(limits=LIMITS, accuracy=0.8, **options):
    pipeline = Pipeline(limits, n_vocab=7, accuracy=accuracy, **{"n_stages": 4, **options})
    return pipeline, pipeline.answer((1, 2, 3, 4, 5), 150)


def turn(pipeline, number, prompt):
    return pipeline.answer(prompt, 10, number).reused


def test_the_next_turn_goes_on_from_the_last_prompts_state():
    pipeline = Pipeline(structs.replace(LIMITS, kept=4, chunk=8), n_vocab=7)
    prompt = list(range(30))
    assert turn(pipeline, 0, prompt) == 0
    prompt += pipeline.output[0] + list(range(20))
    assert turn(pipeline, 1, prompt) == 24
    prompt += pipeline.output[1] + list(range(5))
    assert turn(pipeline, 2, prompt) == 56


def test_what_prompts_have_in_common_is_kept_at_the_second():
    pipeline = Pipeline(structs.replace(LIMITS, kept=4, chunk=8), n_vocab=7)
    common = list(range(20))
    reused = [turn(pipeline, k, [*common, *[90 + k] * 15]) for k in range(4)]
    assert reused == [0, 0, 16, 16]
    assert len(pipeline.scheduler.admission.prefixes.kept) == 4


def test_tokens_are_guessed_and_accepted_with_an_id_each():
    pipeline, stats = long_run(accuracy=0.9)
    assert stats.accepted_speculative > 75
    assert stats.skipped_runs > 0
    for run in (i for i in pipeline.log if isinstance(i, Decode) and i.speculative):
        assert len(run.rows) == 1


@pytest.mark.parametrize("way", [{}, {"join_tip": True}, {"time_sharing": True},
                                 {"policy": Policy.SPECULATIVE}])
def test_runs_of_several_rows_repeat_what_a_wrong_token_left(way):
    limits = structs.replace(LIMITS, exact_width=8, draft_max=3, tree_max=3, **way)
    pipeline, stats = long_run(limits, accuracy=0.8)
    runs = pipeline.runs()
    assert max(len(run.rows) for run in runs) > 2
    assert all(len(set(run.rows.seq_ids)) == 1 for run in runs)
    again = [run for run in runs[1:] if not all(run.rows.outputs)]
    assert again  # rows without a result, behind the prompt
    assert stats.accepted_speculative > 75


def test_without_misses_nothing_is_repeated():
    limits = structs.replace(LIMITS, exact_width=8, draft_max=3, alternatives=0)
    pipeline, stats = long_run(limits, accuracy=1.0)
    runs = pipeline.runs()
    assert all(all(run.rows.outputs) for run in runs[1:])
    assert stats.rows < 170


def test_several_rows_by_hand():
    pool = SequencePool(5)
    pool.acquire(0)
    tree = StateTree(0, pool, Node(5, 2, None, (0,), 0, speculative=False))
    a = Node(7, 3, tree.frontier, (), PLANNED, speculative=True)
    b = Node(8, 4, a, (), PLANNED, speculative=True)
    assert tree.issue([a, b], 1) == [a, b]
    assert pool.take_ops() == (SeqCopy(0, 1, 0, 3),)
    c = Node(9, 4, a, (), PLANNED, speculative=True)  # behind a row inside a run
    assert tree.rows_left(a, 8) == 7
    assert tree.rows_left(b, 8) == 8
    assert tree.issue([c], 2) == [c]
    assert pool.take_ops() == (SeqCopy(0, 2, 0, 3),)
    assert [(n.token, n.seq_ids) for n in tree.repeated([c])] == [(7, (2,))]
    assert tree.step(7) == (a, [])
    assert tree.main_id == 0
    assert tree.step(6) == (None, [b, c])  # neither of them
    assert pool.take_ops() == (SeqRemove(1, 0), SeqRemove(2, 0))
    tip = tree.add(6, NO_RUN)
    assert [(n.token, n.pos, n.seq_ids) for n in tree.repeated([tip])] == [(7, 3, (0,))]
    d = Node(4, 5, tip, (), PLANNED, speculative=True)
    assert tree.issue([d], 3) == [d]
    assert pool.take_ops() == (SeqCopy(0, 3, 0, 3),)
    tree.widen(tip, [d])
    assert [n.seq_ids for n in tree.repeated([tip])] == [(3,)]
    assert tip.seq_ids == (3,)
    tip.run_id = 3
    assert tree.step(4) == (d, [])
    assert tree.main_id == 3
    assert pool.take_ops() == (SeqRemove(0, 0),)
    assert tree.rows_left(d, 8) == 8


def test_ids_by_hand():
    pool = SequencePool(4)
    pool.acquire(0)
    tree = StateTree(0, pool, Node(5, 2, None, (0,), 0, speculative=False))
    right, wrong = (Node(token, 3, tree.frontier, (), PLANNED, speculative=True)
                    for token in (7, 8))
    assert tree.issue([right], 1) == [right]
    assert tree.issue([wrong], 2) == [wrong]
    assert pool.take_ops() == (SeqCopy(0, 1, 0, 3), SeqCopy(0, 2, 0, 3))
    below = Node(9, 4, right, (), PLANNED, speculative=True)
    tree.issue([below], 3)
    assert pool.take_ops() == (SeqCopy(1, 3, 0, 4),)
    assert tree.step(7) == (right, [wrong])
    assert pool.take_ops() == (SeqRemove(2, 0), SeqRemove(0, 0))
    assert tree.step(4) == (None, [below])
    assert tree.add(4, NO_RUN).seq_ids == (1,)  # in place
    assert pool.take_ops() == (SeqRemove(3, 0),)


def test_a_state_that_is_not_copied_is_noticed(monkeypatch):
    """Negative control: speculative runs that continue their parent's state in place."""
    monkeypatch.setattr(SequencePool, "branch", lambda *given: given[2])
    with pytest.raises((AssertionError, KeyError)):
        long_run()


@pytest.mark.parametrize(("states", "size"), [(False, 4), (True, 3)])
def test_what_a_miss_repeats_counts_as_a_cost(states, size):
    """Chances of 0.8 each: the fourth row still gains more than it costs, unless a miss makes the
    next run repeat what was accepted."""
    limits = structs.replace(LIMITS, states=states, exact_width=8, time_sharing=True, tree_max=4,
                             costs=(0.35, 0.7, 1.05, 1.4))
    speculation = Speculation(SchedulerState(limits))
    assert speculation._worth([0.8, 0.64, 0.512, 0.41]) == size
