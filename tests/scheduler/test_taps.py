"""Rows for a prediction head: each accepted token's own, whatever was in flight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.messages import Decode, LaneOpen
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.errors import ProtocolError
from pipeinfer.scheduler.events import Enqueue, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import PUBLISHED, Limits
from tests.kit.sample import examples
from tests.kit.simulated import Pipeline, mark, plain

LIMITS = Limits(n_ctx=400, credit=5, partitions=8, draft_max=2, chunk=4, parallel=2)
KINDS = {
    "trees": LIMITS,
    "states": structs.replace(LIMITS, states=True),
    "synchronous": structs.replace(LIMITS, policy=Policy.SPECULATIVE, tree_max=4),
    "published": structs.replace(LIMITS, policy=Policy.PUBLISHED, exact_width=8, **PUBLISHED),
    "plain": structs.replace(LIMITS, policy=Policy.ITERATIVE),
}


@given(data=st.data(), kind=st.sampled_from(list(KINDS)), width=st.sampled_from([1, 2, 5]),
       kept=st.sampled_from([0, 2]), cells=st.sampled_from([0, 90]),
       accuracy=st.sampled_from([0.0, 0.7, 1.0]), seed=st.integers(0, 2**32))
@examples(120)
def test_every_row_belongs_to_its_token(data, kind, width, kept, cells, accuracy, seed):
    limits = structs.replace(KINDS[kind], exact_width=width, kept=kept, cells=cells)
    pipeline = Pipeline(limits, n_vocab=7, accuracy=accuracy, seed=seed, taps=True)
    prompts = [(1, 2, 3, 4, 5, 6, 1 + k % 2) for k in range(4)]
    for k, prompt in enumerate(prompts):
        pipeline.submit(Request(k, prompt, 20))
        for pick in data.draw(st.lists(st.integers(0, 1000), max_size=40)):
            pipeline.step(pick)
    pipeline.drain()
    texts = {(*prompt, *plain(prompt, 20, 7)) for prompt in prompts}
    for rows in pipeline.fed.values():
        assert any(all(row == mark(text[: index + 1]) for index, row in rows.items())
                   for text in texts)
    if not (kept or cells):  # else some come from the cache, or are computed in another lane
        lanes = [one.lane for one in pipeline.log if isinstance(one, LaneOpen)]
        assert len(lanes) == 4
        for lane in lanes:
            assert sorted(pipeline.fed[lane]) == list(range(26))


def test_a_chunk_is_given_at_once_and_warms_the_head_up():
    scheduler = Scheduler(LIMITS)
    out = scheduler.handle(Enqueue(Request(0, tuple(range(1, 7)), 5)))
    first, second = (one for one in out if isinstance(one, Decode))
    rows = np.arange(4.0)[:, None]
    out = scheduler.handle(RunDone(first.run_id, (), rows))
    (given_,) = (one for one in out if isinstance(one, FeedDraft))
    assert (given_.index, given_.rows.tolist()) == (0, rows.tolist())
    (warm,) = (one for one in out if isinstance(one, StartDraft))
    assert (warm.base, warm.max_tokens) == (5, 0)
    with pytest.raises(ProtocolError, match="3 tapped rows"):
        scheduler.handle(RunDone(second.run_id, (Choice(1),), rows[:3]))
