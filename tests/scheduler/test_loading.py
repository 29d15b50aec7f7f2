"""Prompts from the stages' disks: no token depends on what is there; nothing is read in vain."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.core.types import END, Request, SamplingParams, SeqRemove
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.stored import STATE_CHUNKS, Stored
from tests.kit.simulated import LossyPipeline, plain

LIMITS = Limits(n_ctx=400, credit=4, partitions=8, draft_max=1, chunk=4, kept=3, parallel=3)
PROMPT = tuple(k % 7 for k in range(22))  # five whole chunks and two tokens


def pipeline(limits=LIMITS, disks=None, names=(), **options):
    made = LossyPipeline(limits, n_vocab=7, disks=[{}, {}, {}] if disks is None else disks,
                         **options)
    made.scheduler.state.stored = Stored(b"root", True, set(names), not limits.states)
    return made


def names_of(disks):
    """What all stages have."""
    return set.intersection(*(set(one) for one in disks))


def ask(made, number=0, prompt=PROMPT, count=12, salt=b""):
    made.submit(Request(number, prompt, count, salt=salt))
    made.drain()
    assert made.output[number] == plain(prompt, count, 7)
    return made.stats(number)


def reads(made):
    return [run for run in made.runs() if run.loads]


@pytest.mark.parametrize("states", [False, True])
def test_a_new_job_reads_what_an_old_one_has_computed(states):
    limits = structs.replace(LIMITS, states=states)
    old = pipeline(limits)
    assert ask(old).restored == 0
    again = pipeline(limits, old.disks, names_of(old.disks))
    stats = ask(again)
    assert (stats.restored, stats.reused) == (20, 20)
    run, = reads(again)
    assert [(one.start, one.stop, one.state) for one in run.loads] == [
        (k, k + 4, False) for k in range(0, 20, 4)] + [(0, 20, True)] * states
    assert not [one for one in again.runs() if one.saves]


def test_a_chunk_that_one_stage_lacks_is_computed_alone():
    old = pipeline()
    ask(old)
    third = old.scheduler.state.stored.chain(PROMPT, 4)[2]
    del old.disks[1][third]
    again = pipeline(disks=old.disks, names=old.scheduler.state.stored.names)
    stats = ask(again)
    assert stats.restored == 16
    first, second = reads(again)
    assert (len(first.loads), [one.start for one in second.loads]) == (5, [12, 16])
    computed = [run.saves for run in again.runs() if run.saves]
    assert [(one.start, one.stop) for saves in computed for one in saves] == [(8, 12)]
    ops = [op for run in again.runs() for op in run.ops]
    assert SeqRemove(first.loads[0].seq_id, 8, END) in ops
    assert third in old.disks[1]  # computed, so written


def test_a_state_that_is_missing_is_computed_from_the_start():
    limits = structs.replace(LIMITS, states=True)
    old = pipeline(limits)
    ask(old)
    old.disks[2].pop(Stored.state(old.scheduler.state.stored.chain(PROMPT, 4)[4]))
    again = pipeline(limits, old.disks, old.scheduler.state.stored.names)
    assert ask(again).restored == 0
    assert len(reads(again)) == 1


def test_a_state_is_read_where_memory_keeps_none():
    """As of models that take one request at a time."""
    limits = structs.replace(LIMITS, states=True, kept=0, parallel=1)
    old = pipeline(limits)
    ask(old, prompt=PROMPT[:10])
    again = pipeline(limits, old.disks, old.scheduler.state.stored.names)
    assert ask(again).restored == 8


def test_memory_comes_before_the_disk():
    made = pipeline()
    ask(made, 0)
    assert ask(made, 1).restored == 0
    assert not reads(made)


@pytest.mark.parametrize("states", [False, True])
def test_requests_of_another_salt_find_nothing_in_memory_and_on_disks(states):
    limits = structs.replace(LIMITS, states=states)
    made = pipeline(limits)
    for number, (salt, reused) in enumerate([
            (b"", 0), (b"one", 0), (b"one", 20), (b"two", 0), (b"", 20)]):
        assert ask(made, number, salt=salt).reused == reused
    again = pipeline(limits, made.disks, names_of(made.disks))
    for number, (salt, restored) in enumerate([(b"one", 20), (b"none", 0), (b"", 20)]):
        assert ask(again, number, salt=salt).restored == restored


def test_states_lie_at_every_sixteenth_chunk_as_well():
    made = pipeline(structs.replace(LIMITS, states=True))
    ask(made, prompt=tuple(k % 7 for k in range(4 * STATE_CHUNKS + 11)))
    ends = [one.stop for run in made.runs() for one in run.saves if one.state]
    assert ends == [4 * STATE_CHUNKS, 4 * STATE_CHUNKS + 8]


def test_names_depend_on_all_tokens_before_and_on_the_root():
    one, other = Stored(b"a", True, set()), Stored(b"b", True, set())
    names = one.chain((1, 2, 3, 4, 5), 2)
    assert len(names) == len(set(names)) == 2
    assert one.chain((1, 2, 9, 4), 2)[0] == names[0]
    assert not {*one.chain((9, 2, 3, 4), 2), *other.chain((1, 2, 3, 4), 2)} & set(names)


@pytest.mark.parametrize("request_", [
    Request(0, PROMPT, 3, SamplingParams(embed=True, pooling="mean")),
    Request(0, PROMPT, 3, stores=False)], ids=["all rows are needed", "not to be stored"])
def test_requests_that_leave_the_disk_alone(request_):
    old = pipeline()
    old.submit(request_)
    old.drain()
    assert not any(old.disks)
    ask(old, 1, PROMPT[1:])
    ask(old, 2, PROMPT[1:])
    again = pipeline(disks=old.disks, names=names_of(old.disks))
    again.submit(structs.replace(request_, prompt=PROMPT[1:]))
    again.drain()
    assert names_of(old.disks)
    assert not reads(again)


def test_an_answer_is_read_by_its_own_replay_alone():
    made = pipeline()
    made.submit(Request(0, PROMPT, 30))
    while len(made.output[0]) < 25:
        made.step()
    count, length = len(made.log), len(made.output[0])
    made.lose(3)
    made.drain()
    assert made.output[0] == plain(PROMPT, 30, 7)
    prompt, answer = [run for run in made.runs(count) if run.loads]
    assert [one.stop for one in prompt.loads] == [4, 8, 12, 16, 20]
    assert [one.start for one in answer.loads] == list(range(22, 22 + (length - 1) // 4 * 4, 4))
    turn = (*PROMPT, *made.output[0], 1, 2, 3)  # the next one has other rows there
    assert ask(made, 1, turn).reused == 20
    assert len(reads(made)) == 2


def test_a_replay_stores_no_chunk_that_it_has_still_to_compute():
    made = pipeline()
    made.submit(Request(0, PROMPT, 30))
    while len(made.output[0]) < 25:
        made.step()
    stored = made.scheduler.state.stored
    names = stored.answer(stored.chain(PROMPT, 4), [*PROMPT, *made.output[0]], len(PROMPT), 4)
    assert len(names) == 6
    for disk in made.disks:
        del disk[names[2]]
    stored.names.remove(names[2])
    made.lose(3)
    made.drain()
    assert made.output[0] == plain(PROMPT, 30, 7)
    assert set(names) <= names_of(made.disks)
