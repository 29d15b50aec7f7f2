"""Proposals of a draft that predicts a whole block at once: DFlash, DFlash2, DSpark (Chen et al.
2026).

Its cache has rows of the target alone, one for each verified token. One evaluation of the next
token and of masks behind it gives several tokens; its cells are removed at once. So nothing is
computed again when proposals are rejected. Below proposals in flight the rest of the block is
proposed, where they are what the block predicts; else nothing, until rows arrive. Independent of
llama.cpp and threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
from msgspec import Struct, field

from pipeinfer.backends.base import Backend
from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.types import END, FloatArray
from pipeinfer.errors import BackendError
from pipeinfer.strategies.proposers.draft_model import DraftModel, Ranking
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

if TYPE_CHECKING:
    from pipeinfer.models.heads import BlockShape
    from pipeinfer.models.text.vocabulary import Vocabulary

_T = TypeVar("_T")
_WAITING = 1024  #: most rows of a lane that wait for the next job


class BlockBackend(Backend, Protocol):
    """A draft that evaluates blocks behind rows of the target.

    shape: of its blocks
    """

    shape: BlockShape

    def insert(self, seq_id: int, first: int, rows: FloatArray) -> None:
        """Make cells of rows of the target, float32[n, t], at positions from `first` on. Raises
        BackendError without a place for all, and leaves none."""

    def block(self, seq_id: int, first: int, token: int) -> tuple[FloatArray, FloatArray | None]:
        """Evaluate a block behind the rows of a sequence, and remove its cells.

        first: position of `token`, which follows those rows
        Returns the logits of the places that predict, float32[n, n_vocab], and how often each is
        right, float32[n]; None where the draft does not estimate that. Raises BackendError.
        """


class _Lane(Struct):
    """A lane's sequence. Positions `[start, stop)` have cells; rows from `stop` on wait."""

    seq_id: int
    start: int
    stop: int
    waiting: list[FloatArray] = field(default_factory=list)

    @property
    def seen(self) -> int:
        """The index behind the last row."""
        return self.stop + sum(map(len, self.waiting))


class _Block(Struct):
    """An evaluated block.

    key: what it was evaluated from
    logits, sure: of its places, as `BlockBackend.block` returns them
    rankings: of the first places
    end: places behind this one predict nothing
    """

    key: tuple[int, ...] = ()
    logits: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    sure: FloatArray | None = None
    rankings: list[Ranking] = field(default_factory=list)
    end: int = 0


class BlockDraft(DraftModel):
    """A proposer over a draft of blocks; arguments as for `DraftModel`. lanes: how many are kept"""

    def __init__(self, backend: BlockBackend, n_vocab: int | None = None, *, lanes: int = 1,
                 vocabulary: Vocabulary | None = None) -> None:
        super().__init__(backend, n_vocab, vocabulary=vocabulary)
        self._draft, self._most = backend, lanes
        self._lanes: OrderedDict[int, _Lane] = OrderedDict()
        self._block = _Block()

    def feed(self, rows: FeedDraft) -> None:
        """Keep rows of accepted tokens; those of a lane may come more than once."""
        one = self._lanes.get(rows.lane)
        if one is None:
            seq_id = len(self._lanes)
            if seq_id >= self._most:
                _, old = self._lanes.popitem(last=False)
                seq_id = old.seq_id
                self._draft.seq_rm(seq_id, 0, END)
            one = self._lanes[rows.lane] = _Lane(seq_id, rows.index, rows.index)
        self._lanes.move_to_end(rows.lane)
        new = rows.rows[-_WAITING:]
        first = rows.index + len(rows.rows) - len(new)
        if first < one.seen:  # again, or of another text
            one.waiting = [np.concatenate(one.waiting)[: max(first - one.stop, 0)]] \
                if one.waiting else []
            self._remove(one, first)
        if first > one.seen or one.seen - one.stop + len(new) > _WAITING:
            self._remove(one, 0)
            one.start, one.stop, one.waiting = first, first, []
        one.waiting.append(new)

    def _remove(self, one: _Lane, first: int) -> None:
        """Remove a lane's cells at positions from `first` on."""
        self._draft.seq_rm(one.seq_id, first, END)
        one.stop = min(one.stop, first)
        one.start = min(one.start, one.stop)
        self._block = _Block()

    def steps(self, job: StartDraft) -> Generator[int, None, tuple[Proposal, ...]]:
        """Execute a job, yielding before each evaluation the number of rows that it has."""
        one = self._lanes.get(job.lane)
        if one is None or job.free_only:
            return ()
        yield from self._insert(one)
        path, begun = [*job.accepted[one.stop : job.base], *job.suffix], one.stop
        if one.start == begun or begun > job.base or not path or not job.max_tokens or \
                max(path) >= self.backend.info.n_vocab:
            return ()
        key = (job.lane, one.start, begun, path[0])
        if key != self._block.key:
            yield self._draft.shape.size
            logits, sure = self._in_place(
                one, partial(self._draft.block, one.seq_id, begun, path[0]))
            self.rows_evaluated += self._draft.shape.size
            self._block = _Block(key, logits, sure, end=len(logits))
        for place, token in enumerate(path[1:]):
            found = self._ranking(job, begun, place)
            if found is None or found.ids[0] != token:
                return ()
        return self._named(job, begun, len(path) - 1)

    def _insert(self, one: _Lane) -> Generator[int, None, None]:
        """Make cells of a lane's waiting rows."""
        most = self.backend.info.n_batch
        while one.waiting:
            rows = np.concatenate(one.waiting)
            part = np.asarray(rows[:most], np.float32)
            yield len(part)
            self._in_place(one, partial(self._draft.insert, one.seq_id, one.stop, part))
            one.stop, one.waiting = one.stop + len(part), [rows[most:]] * (len(rows) > most)

    def _in_place(self, one: _Lane, work: Callable[[], _T]) -> _T:
        """Call `work`; while the cache is full, drop other lanes' rows, the oldest first."""
        for other in self._lanes.values():
            if other is not one and other.start < other.stop:
                try:
                    return work()
                except BackendError:
                    self._draft.seq_rm(other.seq_id, 0, END)
                    other.start = other.stop
        return work()

    def _ranking(self, job: StartDraft, begun: int, place: int) -> Ranking | None:
        """Return what a place of the block predicts; None where it predicts nothing."""
        block = self._block
        while len(block.rankings) <= place:
            k = len(block.rankings)
            if k >= block.end:
                return None
            chain = [one.ids[0] for one in block.rankings]
            history = [*job.accepted[:begun], block.key[-1], *chain] \
                if job.params.reads_path else chain
            found = self._rank(job, block.logits[k], np.array(history, np.int32), begun + k)
            likeliest = found.ids[:1] == [int(block.logits[k, : self._n_vocab].argmax())]
            if not found.ids or (self._draft.shape.chained and not likeliest):
                block.end = k + len(found.ids[:1])  # later places follow another token
            if block.sure is not None and likeliest:
                sure = float(block.sure[k])
                found = Ranking(found.ids, [
                    sure, *(min(one, 1.0 - sure) for one in found.confidences[1:])])
            if found.ids:
                block.rankings.append(found)
        return block.rankings[place]

    def _named(self, job: StartDraft, begun: int, first: int) -> tuple[Proposal, ...]:
        """Return a chain of the block's places from `first` on, and its alternatives."""
        chain: list[Proposal] = []
        others: list[Proposal] = []
        chance = 1.0
        while len(chain) < min(job.max_tokens, job.max_depth) and chance >= job.chain_min:
            above, place = len(chain) - 1, first + len(chain)
            found = self._ranking(job, begun, place)
            # what is estimated for each place needs no calibration by distance
            depth = 0 if self._block.sure is not None else place + 1
            for rank, (token, sure) in enumerate(zip(found.ids, found.confidences, strict=True)
                                                 if found is not None else ()):
                if rank > job.alternatives or token in job.stop_ids or \
                        sure < (job.p_split if rank else job.p_min):
                    break
                (others if rank else chain).append(
                    Proposal(above, token, sure, alternative=rank > 0, paid=True, depth=depth))
            if len(chain) == above + 1:
                break
            chance *= job.chance(chain[-1].confidence, len(job.suffix) + len(chain))
        return (*chain, *others)


def _make(setup: ProposerSetup) -> BlockDraft:
    return BlockDraft(cast("BlockBackend", setup.backend), setup.n_vocab, lanes=setup.paths,
                      vocabulary=setup.vocabulary)


SPEC = ProposerSpec("dflash", "a DFlash, DFlash2 or DSpark draft of the target (-md)", worker=_make,
                    resource="pipeinfer.strategies.resources:BlockHead", usual=2)
