"""Prompts with pictures over the simulated pipeline: each request gets the tokens of plain decoding
of what its pictures show, from cells that were cut as if it were alone; equal pictures are computed
once, and no cell of a picture is copied or removed without the rest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Media, Request, SeqCopy, SeqRemove
from pipeinfer.scheduler import pictures
from pipeinfer.scheduler.events import Refuse
from pipeinfer.scheduler.prefix_cache import piece_end
from pipeinfer.scheduler.settings import Limits
from tests.kit.sample import examples
from tests.kit.simulated import Pipeline, cuts, plain

LIMITS = Limits(n_ctx=200, chunk=8, kept=3, parallel=2, exact_width=4, credit=4, together=40)
KINDS = {"causal": (True, False), "together": (False, False), "sections": (True, True)}


def shown(number, n, start, kind="causal"):
    """A picture whose rows all show one number below 0."""
    causal, sections = KINDS[kind]
    rows = np.full((n, 3), -1000 - number, np.float32)
    places = np.zeros((3, n), np.int32) if sections else None
    return Media(max(1, n // 3) if sections else n, causal, places, rows,
                 digest=repr((number, n, kind)).encode(), start=start)


def request_of(number, parts, count=12):
    """A request from lists of tokens and (number, rows, kind) of pictures; and what it shows."""
    prompt, seen, media = [], [], []
    for part in parts:
        if isinstance(part, list):
            prompt += part
            seen += part
        else:
            media.append(shown(part[0], part[1], len(prompt), part[2]))
            prompt += [-1] * part[1]
            seen += [-1000 - part[0]] * part[1]
    return Request(number, tuple(prompt), count, media=tuple(media)), tuple(seen)


class Checked(Pipeline):
    """Checks that operations begin and end outside of pictures that are shared as a whole."""

    #: of the random tests those of kinds "together" and "sections"; of others all
    whole = frozenset((-1001, -1002, -1003))

    def _run_stage(self, index):
        stage = self.stages[index]
        for op in getattr(stage.queue[0][0], "ops", ()):
            if isinstance(op, SeqCopy | SeqRemove) and not self.scheduler.limits.states:
                src = op.src if isinstance(op, SeqCopy) else op.seq_id
                held = {c.pos: c.token for c in stage.kv.cells if src in c.ids}
                for edge in (op.p0, op.p1):
                    assert not (held.get(edge) in self.whole
                                and held.get(edge - 1) == held[edge]), (op, held)
        super()._run_stage(index)


_part = st.one_of(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.tuples(st.sampled_from([0, 4]), st.integers(1, 3).map(lambda k: 5 * k + 3),
              st.just("causal")),
    st.tuples(st.just(2), st.just(17), st.just("together")),
    st.tuples(st.just(3), st.just(19), st.just("sections")))


@st.composite
def conversations(draw):
    """Requests that often begin alike, pictures not next to one another."""
    parts = [one for part in draw(st.lists(_part, min_size=1, max_size=4))
             for one in ([1, 2], part)]
    found = []
    for number in range(draw(st.integers(1, 4))):
        own = parts[: draw(st.integers(1, len(parts)))]
        found.append(request_of(number, [*own, draw(st.lists(st.integers(0, 6), max_size=12))]))
    return found


@examples(150)
@given(data=st.data(), requests=conversations(), states=st.booleans(),
       policy=st.sampled_from([Policy.ITERATIVE, Policy.PIPEINFER, Policy.SPECULATIVE]),
       kept=st.sampled_from([0, 1, 3]), cells=st.sampled_from([0, 220]),
       chunk=st.sampled_from([1, 4, 8]), seed=st.integers(0, 2**32))
def test_every_interleaving_gives_the_tokens_of_what_is_shown(data, requests, states, policy, kept,
                                                              cells, chunk, seed):
    limits = structs.replace(LIMITS, policy=policy, kept=kept, cells=cells, states=states,
                             chunk=chunk, partitions=8)
    pipeline = Checked(limits, n_vocab=7, seed=seed)
    for request, _ in requests:
        pipeline.submit(request)
        for pick in data.draw(st.lists(st.integers(0, 1000), max_size=40)):
            pipeline.step(pick)
    pipeline.drain()
    for request, seen in requests:
        assert pipeline.output[request.request_id] == plain(seen, 12, 7)
    for item in pipeline.log:  # proposers read text only
        assert not isinstance(item, StartDraft) or min([*item.accepted, 0]) >= 0
        assert not isinstance(item, StartDraft) or item.base == len(item.accepted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_about_a_picture_computes_neither_it_nor_what_is_before(kind):
    first, _ = request_of(0, [[1, 2, 3], (1, 20, kind), [4, 5]])
    pipeline = Checked(LIMITS, n_vocab=7)
    pipeline.submit(first)
    pipeline.drain()
    again = [[1, 2, 3], (1, 20, kind), [4, 5], pipeline.output[0], [6, 6, 6]]
    second, seen = request_of(1, again)
    pipeline.log.clear()
    pipeline.submit(second)
    pipeline.drain()
    assert pipeline.output[1] == plain(seen, 12, 7)
    assert all(run.rows.media is None for run in pipeline.runs())
    assert pipeline.stats(1).reused >= 23


def test_equal_pictures_have_equal_tokens_and_no_others_do(monkeypatch):
    """Whatever a client sends: numbers come from whole digests and are never used twice."""
    table = pictures.Pictures()
    one, other = (request_of(0, [[1], (k, 4, "causal")])[0] for k in (1, 2))
    names = [table.named(r).prompt for r in (one, other, one)]
    assert names[0] == names[2] != names[1]
    assert max(names[0][1:]) < -1
    assert not table.named(one).stores
    monkeypatch.setattr(pictures, "_MOST", 1)
    table.named(other)  # forgets the first, whose number stays its own
    assert table.named(one).prompt not in names


def test_a_picture_that_must_be_one_run_and_does_not_fit_is_refused():
    pipeline = Checked(structs.replace(LIMITS, together=16), n_vocab=7)
    pipeline.submit(request_of(0, [[1], (2, 17, "together")])[0])
    refusal = next(item for item in pipeline.log if isinstance(item, Refuse))
    assert "17 rows that see each other" in str(refusal.error)
    pipeline.submit(request_of(1, [[1], (2, 16, "together"), [3]])[0])
    pipeline.drain()
    assert len(pipeline.output[1]) == 12


def test_a_head_gets_rows_of_text_by_their_places_in_the_text():
    pipeline = Checked(LIMITS, n_vocab=7, taps=True)
    request, _ = request_of(0, [[1, 2, 3], (1, 20, "causal"), [4, 5]])
    pipeline.submit(request)
    pipeline.drain()
    fed = [item for item in pipeline.log if isinstance(item, FeedDraft)]
    rows = sum(len(item.rows) for item in fed)
    assert sorted(i for one in fed for i in range(one.index, one.index + len(one.rows))) \
        == list(range(rows))
    assert rows == 5 + 11  # text, and all of the answer but its last token


@given(st.lists(_part, min_size=1, max_size=5), st.integers(1, 20))
def test_pieces_end_where_text_and_pictures_alone_say(parts, chunk):
    request, _ = request_of(0, [one for part in parts for one in ([1], part)])
    edges = cuts(request, chunk)
    place, found = 0, set()
    while place < len(request.prompt):
        found.add(place)
        shared = piece_end(request.media, place, chunk, shared=True)
        place = piece_end(request.media, place, chunk)
        assert shared >= place
        assert not any(one.whole and one.start < shared < one.stop for one in request.media)
    assert found == {edge for edge in edges if edge < len(request.prompt)}
