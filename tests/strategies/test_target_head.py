"""A head of the target reads, for every token, the row that it should read."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.backends.base import Capabilities, ShardInfo
from pipeinfer.core.calibration import Calibration
from pipeinfer.core.drafting import FeedDraft, Proposal
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.proposers.target_head import TargetHead
from tests.kit.drafting import Fixed, job

_WIDTH, _VOCAB = 4, 11


def mixed(*parts: object) -> np.random.Generator:
    """A generator that depends on every bit of the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


class HashingHead:
    """A head whose results depend on all cells of a sequence, their order and their rows."""

    def __init__(self, shift: int = 0) -> None:
        self.info = ShardInfo("toy", (0, 1), 1, True, True, _WIDTH, _VOCAB, 512, 6, 64, 0, 0)
        self.capabilities = Capabilities(False, False, True, False)
        self.tapped: FloatArray | None = None
        self.shift = shift
        self.cells: dict[int, list[tuple[int, object]]] = {k: [] for k in range(6)}

    def encode(self, rows: FloatArray) -> FloatArray:
        return rows + 1

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: object = None) -> FloatArray:
        assert hidden is not None
        assert len(set(rows.lists.outputs)) == 1  # llama.cpp confuses the rows of others
        own, logits = [], []
        for token, pos, output, (seq,), row in zip(
                *rows.lists, rows.seq_ids, hidden, strict=True):
            cells = self.cells[seq]
            assert not cells or cells[-1][0] == pos - 1, "a gap"
            cells.append((pos, (token, row.tobytes())))
            own.append(result(cells)[0])
            logits += [result(cells)[1]] if output else []
        self.tapped = np.stack(own)
        return np.array(logits, np.float32).reshape(-1, _VOCAB)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        self.cells[seq_id] = [cell for cell in self.cells[seq_id] if not p0 <= cell[0] < p1]

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        assert not self.cells[dst]
        self.cells[dst] = [cell for cell in self.cells[src] if p0 <= cell[0] < p1]

    def seq_keep(self, seq_id: int) -> None:
        raise AssertionError

    def close(self) -> None:
        """Nothing is held."""


def result(cells: list[tuple[int, object]]) -> tuple[FloatArray, FloatArray]:
    """The head's row and logits after the last of these cells."""
    draw = mixed(cells)
    return (draw.standard_normal(_WIDTH).astype(np.float32),
            draw.standard_normal(_VOCAB).astype(np.float32))


def chain(path: list[int], true: dict[int, FloatArray], shift: int, depth: int) -> list[int]:
    """What a fresh head proposes: rows of the target where they are known, else its own."""
    cells: list[tuple[int, object]] = []
    path, row, logits = list(path), None, None
    begun, end = min(true) + 1, len(path)
    for index in range(begun, end + depth - 1):
        if index == len(path):
            assert logits is not None
            path.append(int(logits.argmax()))
        before = true.get(index - 1)
        row = before + 1 if before is not None else row
        assert row is not None
        cells.append((index + shift, (path[index], row.tobytes())))
        row, logits = result(cells)
    assert logits is not None
    return [*path[end:], int(logits.argmax())]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([0, -1]))
def test_proposals_are_those_of_a_fresh_head(data, shift):
    head = TargetHead(HashingHead(shift), paths=2)
    lanes: list[tuple[list[int], dict[int, FloatArray]]] = [([1, 2, 3], {}), ([4, 2, 3], {})]
    token = st.integers(0, _VOCAB - 1)
    for _ in range(data.draw(st.integers(1, 12))):
        lane = data.draw(st.integers(0, 1))
        path, true = lanes[lane]
        path += data.draw(st.lists(token, max_size=4))
        # rows of a lane come in order; those of a beginning that others have computed never come
        first = max(true) + 1 if true else data.draw(st.integers(0, len(path) - 1))
        count = data.draw(st.integers(0, max(len(path) - first, 0)))
        rows = np.stack([mixed(lane, first + k).standard_normal(_WIDTH) for k in range(count)]
                        ).astype(np.float32) if count else None
        if rows is not None:
            head.feed(FeedDraft(lane, first, rows))
            true.update(enumerate(rows, first))
        guesses = data.draw(st.lists(token, max_size=3))
        depth = data.draw(st.integers(1, 3))
        found = head.propose(job(path, guesses, lane=lane, depth=depth), lambda: False)
        assert found is not None
        if not true or max(true) >= len(path) + len(guesses) - 1:
            continue
        assert [one.token for one in found] == chain(path + guesses, true, shift, depth)
        distance = len(path) + len(guesses) - 1 - max(true)
        assert [one.depth for one in found] == [distance + k for k in range(len(found))]


def test_without_rows_nothing_is_proposed_nor_computed():
    inner = HashingHead()
    head = TargetHead(inner)
    assert head.propose(job([1, 2, 3], depth=2), lambda: False) == ()
    assert not any(inner.cells.values())


def test_far_from_the_last_row_nothing_is_proposed():
    head = TargetHead(HashingHead())
    head.feed(FeedDraft(0, 0, np.zeros((1, _WIDTH), np.float32)))
    assert head.propose(job([1] * 33, depth=1), lambda: False)
    assert head.propose(job([1] * 34, depth=1), lambda: False) == ()


def test_a_cache_that_is_full_leaves_no_cell_behind():
    class Full(HashingHead):
        def decode(self, rows, hidden=None, should_stop=None):  # type: ignore[no-untyped-def]
            if len(self.cells[0]) > 2:
                raise RuntimeError("full")
            return super().decode(rows, hidden)

    inner = Full()
    head = TargetHead(inner)
    head.feed(FeedDraft(0, 0, np.zeros((9, _WIDTH), np.float32)))
    with pytest.raises(RuntimeError, match="full"):
        head.propose(job(range(10)), lambda: False)
    assert [pos for pos, _ in inner.cells[0]] == list(range(1, 9))  # those that were evaluated


def test_far_from_its_rows_a_head_gives_way_to_a_draft():
    """As often as it was wrong there, whatever it claims."""
    calibration = Calibration()
    for _ in range(60):
        calibration.learn(0.9, True, first=True, depth=1)
        calibration.learn(0.9, False, first=True, depth=3)
    wanted = job([1, 2], depth=1, fade=calibration.fade)
    for depth, expected in ((1, 5), (3, 6)):
        both = Cascade([Fixed(Proposal(-1, 5, 0.9, depth=depth)),
                        Fixed(Proposal(-1, 6, 0.6))])
        found = both.propose(wanted, lambda: False)
        assert found is not None
        assert found[0].token == expected
        assert found[0].depth == (depth if expected == 5 else 0)
    assert calibration.estimate(0.9, first=True, depth=1) > 0.9
    assert calibration.estimate(0.9, first=True, depth=3) < 0.2
