"""The draft's cache: a path gives the candidates of a fresh evaluation, whatever came before."""

from __future__ import annotations

import random
import re

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import BackendError
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.runtime.drafts import DraftWorker
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.draft_model import DraftModel
from tests.kit.drafting import job as kit_job
from tests.kit.toy import ToyBackend, ToySpec

SPEC = ToySpec(n_vocab=12, n_layers=2, n_embd=8, seed=2)


def job(path, number=1, base=None, **change):
    base = len(path) if base is None else base
    return kit_job(path[:base], path[base:], job_id=number, **change)


def fresh(wanted):
    return DraftModel(ToyBackend.load(SPEC)).propose(wanted, lambda: False)


def never():
    return False


@pytest.mark.parametrize("paths", [1, 2, 4])
def test_proposals_do_not_depend_on_what_the_cache_held(paths):
    rng = random.Random(paths)
    draft, accepted, lane = DraftModel(ToyBackend.load(SPEC), paths=paths), [3, 1], 0
    params = SamplingParams()
    for number in range(300):
        if rng.random() < 0.5:
            accepted.append(rng.randrange(12))
        guess = [rng.randrange(12) for _ in range(rng.randrange(4))]
        if rng.random() < 0.1:  # another lane, which may share a prefix, with other parameters
            lane, accepted = lane + 1, accepted[: rng.randrange(1, len(accepted) + 1)]
            params = SamplingParams(rng.choice([0.0, 0.8]), key=lane)
        wanted = job([*accepted, *guess], number, base=len(accepted), lane=lane,
                     branches=rng.choice([1, 3]), p_split=0.05, params=params,
                     max_tokens=rng.choice([0, 1, 4]), p_min=rng.choice([0.0, 0.15]),
                     alternatives=rng.choice([0, 2]))
        left = [rng.randrange(1, 4) if rng.random() < 0.3 else 99]

        def stopped(left=left):
            left[0] -= 1
            return left[0] < 0

        got = draft.propose(wanted, stopped)
        assert got is None or got == fresh(wanted)


@pytest.mark.parametrize("lanes", [False, True])
def test_paths_of_no_more_use_give_way_to_new_ones(lanes):
    rng = random.Random(5)
    draft = DraftModel(ToyBackend.load(SPEC, n_ctx=48), paths=4)
    for number in range(6):
        path = [rng.randrange(12) for _ in range(40)]
        wanted = job(path, number, base=40 if lanes else 4, lane=number if lanes else 0)
        assert draft.propose(wanted, never) == fresh(wanted)


def test_a_path_that_cannot_fit_is_an_error():
    draft = DraftModel(ToyBackend.load(SPEC, n_ctx=48), paths=4)
    with pytest.raises(BackendError, match="no free cells"):
        draft.propose(job([1] * 60), never)


def test_work_of_an_interrupted_job_is_taken_up():
    draft = DraftModel(ToyBackend.load(SPEC))
    first = draft.propose(job([3, 1, 4]), never)
    rows = draft.rows_evaluated
    again = draft.propose(job([3, 1, 4, first[0].token]), never)
    assert [p.token for p in again[:2]] == [p.token for p in first[1:3]]
    assert draft.rows_evaluated - rows <= 3


def test_branches_that_stay_cached_are_not_evaluated_again():
    rows = {}
    for paths in (1, 3):
        draft = DraftModel(ToyBackend.load(SPEC), paths=paths)
        for number, last in enumerate([4, 5, 4, 5, 4, 5]):
            draft.propose(job([3, 1, last], number, base=2, max_tokens=1), never)
        rows[paths] = draft.rows_evaluated
    assert rows == {1: 3 + 5, 3: 3 + 1}


def test_spares_are_the_alternatives_of_what_is_proposed():
    wanted = job([1, 2, 3], max_tokens=2, p_split=0.0, alternatives=2)
    chain = fresh(job([1, 2, 3], max_tokens=2))
    proposals = fresh(wanted)
    assert proposals[:2] == chain
    assert all(p.alternative for p in proposals[2:])
    assert [p.parent for p in proposals[2:]] == [-1, -1, 0, 0]
    assert proposals[0].confidence >= proposals[2].confidence >= proposals[3].confidence
    assert len({p.token for p in proposals if p.parent == -1}) == 3


def test_tokens_that_a_smaller_draft_does_not_know_end_its_proposals():
    draft = DraftModel(ToyBackend.load(SPEC), n_vocab=20)
    assert draft.propose(job([3, 15]), never) == ()
    assert draft.propose(job([3, 5]), never) == fresh(job([3, 5]))


def test_tokens_beyond_the_targets_vocabulary_are_never_proposed():
    draft = DraftModel(ToyBackend.load(SPEC), n_vocab=2)
    proposals = draft.propose(job([1, 0, 1], branches=2, p_split=0.0), never)
    assert proposals
    assert all(p.token < 2 for p in proposals)


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"max_depth": 0}, {"p_min": 1.1},
                                    {"stop_ids": frozenset(range(12))}])
def test_no_proposals(change):
    assert DraftModel(ToyBackend.load(SPEC)).propose(job([1, 2], **change), never) == ()


def test_limits_of_a_tree():
    wanted = job([1, 2, 3], branches=3, p_split=0.0, max_tokens=9, max_depth=2)
    proposals = fresh(wanted)
    depth = {-1: 0}
    for i, p in enumerate(proposals):
        assert p.parent < i
        depth[i] = depth[p.parent] + 1
    assert max(depth.values()) == 2
    leaves = set(range(len(proposals))) - {p.parent for p in proposals}
    assert len(leaves) == 3


@pytest.mark.parametrize("change", [
    {}, {"rates": tuple(0.1 * k + 0.05 for k in range(10))}, {"fade": (0.9, 0.5)}])
def test_a_chain_is_continued_while_all_of_it_is_likely_to_be_right(change):
    whole = fresh(job([3, 1, 4], max_tokens=4, **change))
    wanted, likely = job([3, 1, 4], **change), [1.0]
    for depth, one in enumerate(whole, 1):
        likely.append(likely[-1] * wanted.chance(one.confidence, depth))
    assert len(whole) == 4
    for kept in range(1, 4):  # the token after which the chain is no longer likely enough is kept
        found = fresh(job([3, 1, 4], chain_min=likely[kept] * 1.001, **change))
        assert found == whole[:kept]
        assert len(fresh(job([3, 1, 4], chain_min=likely[kept], **change))) > kept


def test_the_chance_of_a_proposal_is_how_often_such_claims_were_right():
    plain, rated, faded = (job([1], **more) for more in (
        {}, {"rates": (0.1, 0.3)}, {"rates": (0.1, 0.3), "fade": (0.5, 0.25)}))
    assert plain.chance(0.8, 3) == 0.8
    assert (rated.chance(0.4, 1), rated.chance(1.0, 1)) == (0.1, 0.3)
    assert (faded.chance(0.8, 1), faded.chance(0.8, 9)) == (0.4, 0.2)


def test_guesses_follow_the_grammar_of_the_lane():
    letters = Vocabulary([b"\xff<eos>", *(b"%c" % (97 + i) for i in range(11))], [0])
    params = SamplingParams(grammar='%llguidance {"no_forcing": true}\nstart: /(cad|feed)+/',
                            grammar_start=3)
    draft = DraftModel(ToyBackend.load(SPEC), vocabulary=letters, paths=2)
    for path, wanted in (([5, 5, 5], "cf"), ([5, 5, 5, 3], "a"), ([5, 5, 5, 6, 5], "e"),
                         ([5, 5, 5, 3, 1, 4], "cf")):
        found = draft.propose(job(path, params=params, max_tokens=1, branches=2, p_split=0.0,
                                  stop_ids=frozenset({0})), never)
        assert {chr(96 + p.token) for p in found if p.parent == -1} <= set(wanted)
        assert found
    chain = draft.propose(job([5, 5, 5], params=params, max_tokens=12, max_depth=12), never)
    text = "".join(chr(96 + p.token) for p in chain)
    assert re.match("(cad|feed)+(c|ca|f|fe|fee)?$", text), text
    assert draft.propose(job([5, 5, 5, 4], params=params), never) == ()
    assert fresh(job([5, 5, 5, 4], params=params)) != ()


def test_the_worker_answers_reports_failures_and_forgets_stops():
    worker = DraftWorker(DraftModel(ToyBackend.load(SPEC)), lambda: None)
    for number in range(1, 20):
        worker.start(job([1, 2, 3], number))
    seen = []
    while len(seen) < 19:
        if (done := worker.take()) is not None:
            seen.append(done.job_id)
    for number in range(1, 20):
        worker.stop(number)
    assert seen == list(range(1, 20))
    assert not worker._stopped
    told = []
    worker.on_lost = told.append

    def answer():
        while (done := worker.take()) is None:
            pass
        return done

    worker.start(job([], 30))  # an empty path is a bug of the caller
    worker.start(job([1, 2], 31))
    assert [answer(), answer()] == [Drafted(30, ()), Drafted(31, ())]
    worker.start(job([1, 2], 32))
    assert answer() == Drafted(32, ())
    assert [text.startswith("the draft on rank 0 failed: ") for text in told] == [True]
    worker.close(1.0)
