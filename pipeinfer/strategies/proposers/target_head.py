"""Proposals of the target's own head: multi-token prediction (MTP), or EAGLE-3.

A head is about one layer. For each token it reads the token's embedding and a hidden row, which is
the target's row of the token before. It predicts the token after. Rows of the target exist for
verified tokens only, so beyond them the head reads its own rows, and its proposals fade with the
distance. When rows of the target arrive, tokens that were computed without them are computed again.

`HeadRows` finds the hidden row of every token; the search below a path is that of `DraftModel`.
Independent of llama.cpp and threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from msgspec import Struct, field, structs

from pipeinfer.backends.base import Backend
from pipeinfer.config import Option, OwnOption
from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.types import END, FloatArray, Rows, make_rows
from pipeinfer.strategies.proposers.draft_model import DraftModel, Ranking
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

if TYPE_CHECKING:
    from pipeinfer.models.text.vocabulary import Vocabulary

_MOST_CHAINED = 32  #: tokens beyond the target's last row below which nothing is proposed
_KEEP_OWN = 96  #: of the head's own rows, the last so many of a sequence
_KEEP_TRUE = 512  #: rows of the target that are kept of a lane


class RowHead(Backend, Protocol):
    """A head as a backend, whose rows have a token and a hidden row.

    shift: by how much positions differ from the index of the token
    """

    shift: int

    @property
    def tapped(self) -> FloatArray:
        """Its own hidden rows after the last decode, float32[n, n_embd]."""

    def encode(self, rows: FloatArray) -> FloatArray:
        """Return the hidden rows, float32[n, n_embd], for rows of the target, float32[n, t]."""


class _HeadSequence(Struct):
    """A sequence of the head's cache.

    lane: whose text it has; -1: none
    sure: tokens before this index were computed with rows of the target
    own: the head's own rows, by index
    """

    lane: int = -1
    sure: int = 0
    own: dict[int, FloatArray] = field(default_factory=dict)


class _WaitingRow(Struct):
    """A row that waits for its decode."""

    token: int
    index: int
    seq_id: int
    output: bool
    hidden: FloatArray


class HeadRows:
    """A head as a backend of tokens alone, whose positions are their indices in a lane.

    A token whose hidden row is not known is left out, as is what its sequence held before.
    lanes: how many lanes' rows are kept
    """

    def __init__(self, head: RowHead, lanes: int) -> None:
        self.info, self.capabilities = head.info, head.capabilities
        self._head, self._lanes = head, lanes
        self._true: OrderedDict[int, dict[int, FloatArray]] = OrderedDict()
        self._fresh: dict[int, dict[int, FloatArray]] = {}  # the target's rows as they came
        self._sequences = [_HeadSequence() for _ in range(head.info.n_seq_max)]

    def feed(self, lane: int, index: int, rows: FloatArray) -> None:
        """Keep rows of the target, for a lane's tokens from `index` on."""
        self._true.setdefault(lane, {})
        self._true.move_to_end(lane)
        fresh = self._fresh.setdefault(lane, {})
        fresh.update(enumerate(rows, index))
        while len(fresh) > _KEEP_TRUE:
            del fresh[next(iter(fresh))]
        while len(self._true) > self._lanes:
            self._fresh.pop(self._true.popitem(last=False)[0], None)

    def last(self, lane: int) -> int:
        """Return the index of the last token whose row of the target is known; -1 for none."""
        return max(*self._true.get(lane, ()), *self._fresh.get(lane, ()), -1, -1)

    def _known(self, lane: int) -> dict[int, FloatArray]:
        """The hidden rows of a lane by index. They are encoded here, together, since no token may
        be proposed for long."""
        known = self._true.get(lane, {})
        if fresh := self._fresh.pop(lane, None):
            known.update(zip(fresh, self._head.encode(np.stack(list(fresh.values()))),
                             strict=True))
            while len(known) > _KEEP_TRUE:
                del known[next(iter(known))]
        return known

    def follow(self, seq_id: int, lane: int) -> int:
        """Use a lane's rows for a sequence; return the index of the first token that can now be
        computed better than it was, END for none."""
        one, known = self._sequences[seq_id], self._known(lane)
        one.lane = lane
        if not one.own:
            return min(known, default=END - 1) + 1
        return one.sure if one.sure - 1 in known else END

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray:
        """Evaluate rows; tokens that were left out have no logits."""
        del hidden, should_stop
        found: list[FloatArray] = []
        waiting: list[_WaitingRow] = []
        try:
            for token, index, output, (seq_id,) in zip(*rows.lists, rows.seq_ids, strict=True):
                one = self._sequences[seq_id]
                before = self._known(one.lane).get(index - 1)
                chained = before is None and any(
                    (row.seq_id, row.index) == (seq_id, index - 1) for row in waiting)
                # llama.cpp confuses rows where only some of a decode have outputs
                if waiting and (chained or waiting[-1].output != output):
                    found += self._flush(waiting)
                if before is not None:
                    starts = not one.own and all(row.seq_id != seq_id for row in waiting)
                    one.sure = index + 1 if starts or one.sure == index else one.sure
                else:
                    before = one.own.get(index - 1)
                if before is None:
                    if one.own:
                        self.seq_rm(seq_id, 0, END)
                else:
                    waiting.append(_WaitingRow(token, index, seq_id, output, before))
            found += self._flush(waiting)
        except BaseException:
            for seq_id, first in rows.first_positions().items():
                self.seq_rm(seq_id, first, END)
            raise
        return np.concatenate(found) if found else np.empty((0, self.info.n_vocab), np.float32)

    def _flush(self, waiting: list[_WaitingRow]) -> Iterable[FloatArray]:
        """Decode the rows that wait, and keep the head's own rows."""
        if not waiting:
            return ()
        logits = self._head.decode(
            make_rows([(row.token, row.index + self._head.shift, (row.seq_id,), row.output)
                       for row in waiting]), np.stack([row.hidden for row in waiting]))
        assert logits is not None
        for row, own in zip(waiting, self._head.tapped, strict=True):
            kept = self._sequences[row.seq_id].own
            kept[row.index] = own
            kept.pop(row.index - _KEEP_OWN, None)
        waiting.clear()
        return (logits,)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`; of a sequence's end
        alone."""
        self._head.seq_rm(seq_id, max(p0 + self._head.shift, 0), p1)
        one = self._sequences[seq_id]
        one.sure = min(one.sure, p0)
        one.own = {index: row for index, row in one.own.items() if index < p0}

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`; of a sequence's beginning alone."""
        self._head.seq_cp(src, dst, max(p0 + self._head.shift, 0), p1 + self._head.shift)
        one = self._sequences[src]
        self._sequences[dst] = _HeadSequence(one.lane, min(one.sure, p1), {
            index: row for index, row in one.own.items() if index < p1})

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        for other in range(len(self._sequences)):
            if other != seq_id:
                self.seq_rm(other, 0, END)

    def close(self) -> None:
        """Release the model and its cache."""
        self._head.close()


class TargetHead(DraftModel):
    """A proposer over a head of the target; arguments as for `DraftModel`."""

    def __init__(self, head: RowHead, n_vocab: int | None = None, *, paths: int = 1,
                 vocabulary: Vocabulary | None = None) -> None:
        self._rows = HeadRows(head, paths)
        super().__init__(self._rows, n_vocab, paths=paths, vocabulary=vocabulary)

    def feed(self, rows: FeedDraft) -> None:
        """Store rows of accepted tokens; those of a lane may come more than once."""
        self._rows.feed(rows.lane, rows.index, np.asarray(rows.rows, np.float32))

    def steps(self, job: StartDraft) -> Generator[int, None, tuple[Proposal, ...]]:
        """Evaluate a job; proposals have their distance from the target's last row."""
        found = yield from super().steps(job)
        first = self._chained(job)
        depths: list[int] = []
        for one in found:
            depths.append(first if one.parent < 0 else depths[one.parent] + 1)
        return tuple(structs.replace(one, depth=depth)
                     for one, depth in zip(found, depths, strict=True))

    def _chained(self, job: StartDraft) -> int:
        """How far the first proposal of a job is from the last row of the target, in tokens."""
        return max(job.base + len(job.suffix) - 1 - self._rows.last(job.lane), 1)

    def _catch_up(self, job: StartDraft) -> Generator[int, None, Ranking]:
        if self._rows.last(job.lane) < 0 or self._chained(job) > _MOST_CHAINED:
            return Ranking([], [])
        return (yield from super()._catch_up(job))

    def _at_once(self, job: StartDraft, first: int) -> int:
        """All whose hidden rows are the target's; but the last, which is asked, alone."""
        before_last = job.base + len(job.suffix) - 1
        known = min(self._rows.last(job.lane) + 2, before_last)
        return max(min(known - first, self.backend.info.n_batch), 1)

    def _choose_path(self, job: StartDraft) -> int:
        common = super()._choose_path(job)
        return min(common, self._rows.follow(self._here.seq_id, job.lane))


def make_head(setup: ProposerSetup) -> TargetHead:
    """Return a proposer over the head of a setup."""
    return TargetHead(cast("RowHead", setup.backend), setup.n_vocab, paths=setup.paths,
                      vocabulary=setup.vocabulary)


SPEC = ProposerSpec(
    "mtp", "the head for further tokens (MTP) that the target's file has", worker=make_head,
    options={"head_vocabulary": OwnOption(32768, Option(
        ("--head-vocabulary",), "int",
        "Tokens that the model's own head can propose, where its vocabulary has at least twice as "
        "many: the frequent ones, and those of the text; 0: all.",
        0, 1 << 20, changes_tokens=False))},
    resource="pipeinfer.strategies.resources:MtpHead", usual=2)

#: a head that was trained for the target afterwards (Li et al. 2025). It reads three rows of the
#: target, the inputs of layers that its file names.
EAGLE = ProposerSpec(
    "eagle3", "an EAGLE-3 head of the target (--eagle)", worker=make_head,
    options={"eagle": OwnOption("", Option(
        ("--eagle",), "str", "EAGLE-3 head of the model (GGUF, or user/repo[:quant] of the hub); "
        "it drafts from rows of its layers. With --proposer, add --proposer eagle3, too.",
        changes_tokens=False))},
    resource="pipeinfer.strategies.resources:EagleHead", usual=2)
