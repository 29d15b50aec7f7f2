"""A draft that decodes by lookahead names what it would name token by token."""

from __future__ import annotations

import random

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.strategies import registry, resources
from pipeinfer.strategies.proposers.draft_lookahead import DraftLookahead
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.strategies.proposers.lookahead import Lookahead
from pipeinfer.strategies.resources import Draft
from tests.kit.configs import job_config
from tests.kit.toy import ToyBackend
from tests.strategies.test_draft_model import SPEC, fresh, job, never


def evaluations(draft, wanted):
    """The proposals of a job, and how often a model was evaluated for it."""
    steps, count = draft.steps(wanted), 0
    while True:
        try:
            next(steps)
            count += 1
        except StopIteration as end:
            return end.value, count


@pytest.mark.parametrize("sizes", [(3, 3, 3), (0, 3, 2), (2, 5, 2)])
def test_it_names_the_same_tokens_in_fewer_evaluations(sizes):
    rng = random.Random(sum(sizes))
    one = DraftLookahead(ToyBackend.load(SPEC), Lookahead(*sizes), paths=3)
    other = DraftModel(ToyBackend.load(SPEC), paths=3)
    accepted, lane, params, counts = [3, 1], 0, SamplingParams(), [0, 0]
    for number in range(300):
        if rng.random() < 0.6:
            accepted = [*accepted, rng.randrange(12)]
        if rng.random() < 0.05 or len(accepted) > 60:  # a lane that shares a prefix
            lane, accepted = lane + 1, accepted[:rng.randrange(1, 40)]
            params = SamplingParams(rng.choice([0.0, 0.8]), key=lane, repeat_penalty=rng.choice(
                [1.0, 1.3]))
        guess = [rng.randrange(12) for _ in range(rng.randrange(3))]
        wanted = job([*accepted, *guess], number, base=len(accepted), lane=lane, params=params,
                     branches=rng.choice([1, 1, 3]), p_split=0.05, max_depth=8,
                     max_tokens=rng.choice([0, 1, 8]), stop_ids=frozenset({5}))
        found, named = evaluations(one, wanted), evaluations(other, wanted)
        assert found[0] == named[0]
        counts = [counts[0] + found[1], counts[1] + named[1]]
    assert counts[0] < counts[1]


def test_a_job_that_was_stopped_leaves_nothing_behind():
    backend = ToyBackend.load(SPEC, n_ctx=64)
    draft = DraftLookahead(backend, Lookahead(3, 3, 3), paths=1)
    rng = random.Random(3)
    for number in range(60):
        path = [rng.randrange(12) for _ in range(12)]
        left = [rng.randrange(3)]

        def stopped(left=left):
            left[0] -= 1
            return left[0] < 0

        draft.propose(job(path, number, lane=number, max_tokens=8, max_depth=8), stopped)
    wanted = job(path, 99, lane=99, max_tokens=8, max_depth=8)
    assert draft.propose(wanted, never) == fresh(wanted)


def test_more_lanes_than_it_keeps_n_grams_of():
    draft = DraftLookahead(ToyBackend.load(SPEC), Lookahead(2, 3, 2), paths=2)
    for number in range(150):
        wanted = job([number % 12, 3, 1], number, lane=number % 75, max_tokens=3)
        assert draft.propose(wanted, never) == fresh(wanted)
    assert len(draft._ahead._lanes) == len(draft._lanes) == 64


def test_its_cache_has_room_for_its_branches_and_a_draft_with_states_is_refused(monkeypatch):
    config = job_config(model="m.gguf", lookahead_window=3, lookahead_candidates=4)
    specs = registry.proposers()
    model = Draft(EMBEDDED / "draft.gguf")
    alone, ahead = (model.sizes(specs[name], config, 100).n_seq_max
                    for name in ("draft", "draft-lookahead"))
    assert ahead - alone == Lookahead(3, 5, 4).paths - 1
    monkeypatch.setattr(resources, "keeps_state", lambda _: True)
    with pytest.raises(UsageError, match=r"draft\.gguf keep a state: use --proposer draft"):
        model.sizes(specs["draft-lookahead"], config, 100)
