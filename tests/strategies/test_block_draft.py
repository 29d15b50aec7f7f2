"""A draft of blocks reads the rows of its lane, and proposes what follows a path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.backends.base import Capabilities, ShardInfo
from pipeinfer.core.drafting import FeedDraft
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import BackendError
from pipeinfer.models.heads import BlockShape
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.proposers.dflash import BlockDraft
from tests.kit.drafting import job
from tests.strategies.test_target_head import mixed

_WIDTH, _VOCAB, _PLACES = 4, 11, 5
DFLASH = BlockShape(_PLACES + 1, 10)
DSPARK = BlockShape(_PLACES, 10, first=0, confident=True, chained=True)


class HashingBlocks:
    """A draft whose results depend on all rows of a sequence. most: cells that it has place for"""

    def __init__(self, shape: BlockShape = DFLASH, most: int = 512) -> None:
        self.info = ShardInfo("toy", (0, 1), 1, True, True, _WIDTH, _VOCAB, most, 6, 3, 0, 0)
        self.capabilities = Capabilities(False, False, True, False)
        self.shape, self.most = shape, most
        self.cells: dict[int, list[tuple[int, bytes]]] = {k: [] for k in range(6)}

    def insert(self, seq_id, first, rows):
        assert rows.dtype == np.float32
        assert 0 < len(rows) <= self.info.n_batch
        if sum(map(len, self.cells.values())) + len(rows) > self.most:
            raise BackendError("full")
        cells = self.cells[seq_id]
        assert not cells or cells[-1][0] == first - 1, "a gap"
        cells += [(first + k, row.tobytes()) for k, row in enumerate(rows)]

    def block(self, seq_id, first, token):
        assert self.cells[seq_id][-1][0] == first - 1
        return result(self.cells[seq_id], token, self.shape)

    def seq_rm(self, seq_id, p0, p1):
        self.cells[seq_id] = [cell for cell in self.cells[seq_id] if not p0 <= cell[0] < p1]

    def close(self):
        """Nothing is held."""


def result(cells, token, shape):
    draw = mixed(cells, token)
    logits = draw.standard_normal((_PLACES, _VOCAB)).astype(np.float32)
    return logits, draw.uniform(0.1, 1, _PLACES).astype(np.float32) if shape.confident else None


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([DFLASH, DSPARK]), st.sampled_from([30, 512]))
def test_proposals_are_those_of_a_fresh_draft(data, shape, most):
    backend = HashingBlocks(shape, most)
    draft = BlockDraft(backend, lanes=2)
    lanes = [([1, 2, 3], {}), ([4, 2, 3], {}), ([3, 2, 1], {})]
    token = st.integers(0, _VOCAB - 1)
    for step in range(data.draw(st.integers(1, 14))):
        lane = data.draw(st.integers(0, 2))
        path, true = lanes[lane]
        path += data.draw(st.lists(token, max_size=4))
        begin = max(true) + 1 if true else data.draw(st.integers(0, len(path) - 1))
        first = data.draw(st.integers(min(true), begin)) if true else begin  # some come again
        count = data.draw(st.integers(0, max(len(path) - 1 - first, 0)))
        if count:
            rows = mixed(lane, first, step).standard_normal((count, _WIDTH)).astype(np.float32)
            draft.feed(FeedDraft(lane, first, rows))
            for index in [one for one in true if one >= first]:
                del true[index]
            true.update(enumerate(rows, first))
        stopped = data.draw(st.integers(0, 3))
        draft.propose(job(path, lane=lane, depth=2), iter([False] * stopped + [True] * 99).__next__)
        begun = max(true, default=-1) + 1
        logits, sure = result([(k, true[k].tobytes()) for k in sorted(true)], path[begun], shape) \
            if true else (None, None)
        chain = [int(row.argmax()) for row in logits] if true else []
        ahead = data.draw(st.integers(0, _PLACES)) if begun == len(path) - 1 else 0
        right = data.draw(st.booleans())
        below = [*chain[:ahead]] if right else data.draw(st.lists(token, max_size=3))
        found = draft.propose(job(path, below, lane=lane, depth=9), lambda: False)
        known = [*path[begun + 1:], *below]
        expected = chain[len(known):] if chain[:len(known)] == known else []
        kept = [index for index, _ in backend.cells[draft._lanes[lane].seq_id]] \
            if lane in draft._lanes else []
        if kept != sorted(true):  # another lane needed its place
            assert most == 30 or lane not in draft._lanes or not kept or kept[0] > min(true)
            for index in set(true).difference(kept):
                del true[index]
            continue
        assert [one.token for one in found] == expected
        if found and sure is not None:
            assert [one.confidence for one in found] == sure.tolist()[len(known):]
        assert all(one.depth == (0 if sure is not None else len(known) + k + 1)
                   for k, one in enumerate(found))


def fed(shape=DFLASH, count=4):
    """A draft with rows of a lane, its path, and the logits of its block."""
    draft, path = BlockDraft(HashingBlocks(shape)), list(range(count + 1))
    rows = mixed(count).standard_normal((count, _WIDTH)).astype(np.float32)
    draft.feed(FeedDraft(0, 0, rows.astype(np.float16)))
    rows = rows.astype(np.float16).astype(np.float32)
    cells = [(k, row.tobytes()) for k, row in enumerate(rows)]
    return draft, path, *result(cells, path[-1], shape)


def test_a_job_bounds_the_chain():
    draft, path, logits, _ = fed()
    chain = [int(row.argmax()) for row in logits]

    def found(**changes):
        return draft.propose(job(path, depth=9, **changes), lambda: False)

    whole = found()
    assert [one.token for one in whole] == chain
    assert len(found(max_tokens=2)) == len(found(max_depth=2)) == 2
    assert found(stop_ids=frozenset(chain)) == () == found(free_only=True) == found(max_tokens=0)
    least = min(one.confidence for one in whole)
    assert len(found(p_min=least + 1e-6)) == [one.confidence for one in whole].index(least)
    assert len(found(chain_min=whole[0].confidence + 1e-6)) == 1
    others = found(alternatives=2, p_split=0.0)[_PLACES:]
    ranked = np.argsort(-logits, axis=1)[:, 1:3]
    assert [one.token for one in others] == ranked.ravel().tolist()
    assert [one.parent for one in others] == [k - 1 for k in range(_PLACES) for _ in range(2)]
    assert all(one.alternative for one in others)


@pytest.mark.parametrize(("shape", "length"), [(DFLASH, _PLACES), (DSPARK, 3)])
def test_a_chain_ends_where_its_places_follow_another_token(shape, length):
    draft, path, logits, sure = fed(shape)
    banned = int(logits[2].argmax())  # its second choice is another than llama.cpp went on from
    assert banned not in {int(logits[k].argmax()) for k in (0, 1)}
    params = SamplingParams(logit_bias=((banned, -100.0),))
    found = draft.propose(job(path, depth=9, params=params), lambda: False)
    assert len(found) == length
    assert found[2].token == int(np.argsort(-logits[2])[1])
    assert sure is None or found[2].confidence != pytest.approx(float(sure[2]))


def test_penalties_see_the_path_and_the_chain_before_a_place():
    draft, path, logits, _ = fed()
    params = SamplingParams(repeat_penalty=1.0, presence_penalty=9.0, repeat_last_n=-1)
    found = draft.propose(job(path, depth=9, params=params), lambda: False)
    chain = []
    for row in logits:
        chain.append(next(int(one) for one in np.argsort(-row) if one not in {*path, *chain}))
    assert [one.token for one in found] == chain


def test_rows_that_wait_too_long_are_dropped():
    draft = BlockDraft(HashingBlocks(most=5000))
    rows = mixed("many").standard_normal((1500, _WIDTH)).astype(np.float32)
    for at in range(0, 1500, 100):
        draft.feed(FeedDraft(0, at, rows[at : at + 100]))
    path = [1] * 1501
    found = Cascade([draft]).propose(job(path, depth=9), lambda: False)
    assert len(found) == _PLACES
    kept = [index for index, _ in draft.backend.cells[0]]
    assert kept == list(range(kept[0], 1500))
    assert 0 < len(kept) <= 1024
