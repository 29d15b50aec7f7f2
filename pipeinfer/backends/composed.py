"""Backends made of other backends: one around another, shards of consecutive layers, slices.

Sequence operations go to all parts. Independent of transports and plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from pipeinfer.backends.base import Backend, Capabilities, apply, norms, tap
from pipeinfer.backends.llamacpp.eval_callback import PartSum
from pipeinfer.backends.team import Team
from pipeinfer.core.types import END, FloatArray, IntArray, Rows, SeqJoin
from pipeinfer.errors import BackendError, ClusterError, NoCells

Decode = Callable[[Rows, FloatArray | None, Callable[[], bool] | None], FloatArray | None]


class ComposedBackend:
    """A backend whose derived classes define `decode`. parts: in the order of their layers."""

    def __init__(self, parts: Sequence[Backend]) -> None:
        infos, able = [part.info for part in parts], [part.capabilities for part in parts]
        self._parts: Sequence[Backend] = list(parts)
        self._tapped = self._parts
        self._taps: list[Callable[[], FloatArray]] = []
        self.info = structs.replace(
            infos[0], layers=(infos[0].layers[0], infos[-1].layers[1]), last=infos[-1].last,
            n_vocab=infos[-1].n_vocab, n_ctx=min(info.n_ctx for info in infos),
            n_seq_max=min(info.n_seq_max for info in infos),
            n_batch=min(info.n_batch for info in infos),
            weight_bytes=sum(info.weight_bytes for info in infos),
            cache_bytes=sum(info.cache_bytes for info in infos))
        self.capabilities = Capabilities(
            free_positions=all(one.free_positions for one in able),
            separate_views=all(one.separate_views for one in able),
            embedding_rows=able[0].embedding_rows,
            stops_inside=any(one.stops_inside for one in able),
            takes_back=all(one.takes_back for one in able))

    def tap(self, layers: tuple[int, ...]) -> None:
        """Store the inputs of layers from now on."""
        asked = [(part, tap(part, layers)) for part in self._parts]
        self._taps = [rows for part, rows in asked if any(part is one for one in self._tapped)]

    @property
    def tapped(self) -> FloatArray:
        """The inputs of layers of the last decode."""
        return np.concatenate([rows() for rows in self._taps], axis=1)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`."""
        for part in self._parts:
            part.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`."""
        for part in self._parts:
            part.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        for part in self._parts:
            part.seq_keep(seq_id)

    def seq_join(self, src: int, dst: int, order: int = 1) -> None:
        """Add id `dst` to all cells of `src`. Raises BackendError where a part cannot."""
        for part in self._parts:
            apply(part, SeqJoin(src, dst, order))

    def close(self) -> None:
        """Release the model and its cache."""
        for part in self._parts:
            part.close()

    def _drop(self, rows: Rows, count: int | None = None) -> None:
        """Remove the rows' cells from the first `count` parts; some may have none."""
        whole = not self.capabilities.takes_back
        end = END if whole else int(rows.positions.max(initial=-1)) + 1
        for part in self._parts[:count]:
            for seq_id, first in rows.first_positions().items():
                part.seq_rm(seq_id, 0 if whole else first, end)


class ChainBackend(ComposedBackend):
    """Shards of consecutive layers: a stage that took over a neighbour's layers loads only those.

    Each part has to begin where the one before it ends; ValueError otherwise.
    """

    def __init__(self, parts: Sequence[Backend]) -> None:
        layers = [part.info.layers for part in parts]
        if not layers or any(a[1] != b[0] for a, b in itertools.pairwise(layers)):
            raise ValueError(f"the shards' layers {layers} are not contiguous")
        super().__init__(parts)

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        return self._through([part.decode for part in self._parts], rows, hidden, should_stop)

    def norms(self, rows: Rows, hidden: FloatArray | None = None) -> FloatArray | None:
        """Evaluate rows up to the norm before the output head, on a backend that has the last
        shard."""
        *before, last = self._parts
        return self._through([*(part.decode for part in before),
                              lambda rows, hidden, _: norms(last, rows, hidden)], rows, hidden)

    def _through(self, calls: Sequence[Decode], rows: Rows, hidden: FloatArray | None,
                 should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        result: FloatArray | None = hidden
        if not self.capabilities.takes_back:
            should_stop = None  # the first parts could not be brought back
        for turn, call in enumerate(calls):
            try:
                stopped = turn > 0 and should_stop is not None and should_stop()
                result = None if stopped else call(rows, result, should_stop)
            except BaseException:
                self._drop(rows, turn)
                raise
            if result is None:
                self._drop(rows, turn)
                return None
        return result


class Embedding(Protocol):
    """The embedding of a first stage made of slices."""

    def rows(self, tokens: IntArray) -> FloatArray:
        """Return the rows of tokens, float32[n, n_embd]. Raises BackendError for an id outside its
        range.
        """


class LearnedRows(ComposedBackend):
    """A first stage that also takes token ids beyond the vocabulary, whose rows are vectors.

    A batch of llama.cpp has either tokens or embeddings. So in a run with such a row, all others
    are looked up here, by ggml's own function, which leaves their bits as they are
    (measured: benchmarks/records/bita.md#bita-embedding-rows).

    inner: the stage
    embedding: of the vocabulary
    vectors: float32[k, n_embd], as they enter the first layer, for the ids from `n_vocab` on
    Raises BackendError for vectors of another size, and for a stage that is not the first.
    """

    def __init__(self, inner: Backend, embedding: Embedding, vectors: FloatArray) -> None:
        super().__init__([inner])
        if not self.info.first or vectors.ndim != 2 or vectors.shape[1] != self.info.n_embd:
            raise BackendError(f"vectors of shape {vectors.shape} for a stage of "
                               f"{self.info.n_embd} elements, which has to be the first")
        self._embedding = embedding
        self._vectors = np.ascontiguousarray(vectors, np.float32)

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        learned = rows.tokens - self.info.n_vocab
        if hidden is None and (beyond := learned >= 0).any():
            if int(learned.max()) >= len(self._vectors):
                raise BackendError(f"a token outside the vocabulary of {self.info.n_vocab} and "
                                   f"{len(self._vectors)} learned rows")
            hidden = np.empty((len(rows), self.info.n_embd), np.float32)
            hidden[beyond] = self._vectors[learned[beyond]]
            hidden[~beyond] = self._embedding.rows(rows.tokens[~beyond])
        return self._parts[0].decode(rows, hidden, should_stop)


class SliceBackend(Backend, Protocol):
    """A backend that holds a slice of its layers."""

    def sum_with(self, sums: PartSum | None) -> None:
        """Sum partial results with `sums` from now on; None: use each partial result as if it were
        the sum.
        """


class WideBackend(ComposedBackend):
    """The slices that one member of a wide stage holds; after each sum all have the same rows.

    Each slice is a file and a context of its own and computes in a thread of its own; the threads
    meet in every sum.

    slices: those held here, in the order of `team.shape.own`, each a chain of shards of consecutive
        layers
    team: the member's side of the all-reduce
    layers: `[start, stop)` of the stage
    n_layers_total: layers of the whole model
    embedding: on the first stage; None on others
    """

    _parts: Sequence[SliceBackend]

    def __init__(self, slices: Sequence[Sequence[SliceBackend]], team: Team,
                 layers: tuple[int, int], n_layers_total: int, embedding: Embedding | None) -> None:
        super().__init__([part for chain in slices for part in chain])
        # all are asked, as llama.cpp then sums up more rows in the last layer; one stores them
        self._slices, self._tapped = [list(chain) for chain in slices], list(slices[0])
        self._team, self._embedding = team, embedding
        takes_back = self.capabilities.takes_back
        self.info = structs.replace(self.info, layers=layers, first=layers[0] == 0,
                                    last=layers[1] == n_layers_total)
        self.capabilities = structs.replace(self.capabilities, separate_views=False,
                                            embedding_rows=True, stops_inside=takes_back)
        for index, chain in zip(team.shape.own, self._slices, strict=True):
            for shard in chain:
                shard.sum_with(team.part(index))
        self._threads = ThreadPoolExecutor(len(slices) - 1, "slice") if len(slices) > 1 else None

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`. Logits are complete at the leader; other members get an empty array
        of shape (0, n_vocab). Members must have begun the same run. Raises PeerFailed, too."""
        if self._embedding is not None and hidden is None:
            hidden = self._embedding.rows(rows.tokens)
        team = self._team
        team.arm(should_stop if self.capabilities.stops_inside else None)
        further = [self._threads.submit(self._run, turn, rows, hidden)
                   for turn in range(1, len(self._slices))] if self._threads else []
        error: BaseException | None = None
        results: list[FloatArray | None] = []
        try:
            results.append(self._run(0, rows, hidden))
        except BaseException as failure:
            error = failure
        for one in further:
            try:
                results.append(one.result())
            except BaseException as failure:
                error = error or failure
        left = any(result is None for result in results)
        if error is None and left:
            try:
                team.check()
            except BaseException as failure:
                error = failure
        if error is not None or left:
            self._drop(rows)
        if error is not None:
            raise error
        return None if left else results[0]

    def _run(self, turn: int, rows: Rows, hidden: FloatArray | None) -> FloatArray | None:
        """The result of one slice; None where it was stopped.

        Its cells are gone then, except those of shards before the one at which it was stopped.
        """
        team, index = self._team, self._team.shape.own[turn]
        try:
            result = hidden
            for shard in self._slices[turn]:
                result = shard.decode(rows, result)
                if result is None:
                    return None
            assert result is not None
            if not self.info.last:
                return result
            whole = team.gather(index, result)
        except BaseException:
            team.fail(index)
            raise
        leads = index == team.shape.holders[0][0]
        if whole is None and leads:
            return None
        return result[:0] if whole is None else whole

    def close(self) -> None:
        """End the threads. The slices stay open: the code that loaded them has to close them."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        for shard in self._parts:
            shard.sum_with(None)


class WideHead(WideBackend):
    """A prediction head made of the slices of one member; each has one layer and some of the
    output matrix.

    slices: see `target_head.RowHead`. team: as of `WideBackend`
    first: the attribute with the first of them; after the sums all have the same hidden rows
    """

    def __init__(self, slices: Sequence[Any], team: Team) -> None:
        layers = slices[0].info.layers
        super().__init__([[one] for one in slices], team, layers, layers[1], None)
        if most := team.shape.capacity // self.info.n_embd:  # of the buffers for sums
            self.info = structs.replace(self.info, n_batch=min(self.info.n_batch, most))
        self._heads, self.first = slices, slices[0]
        self._found: list[FloatArray] = [np.empty((0, 0), np.float32)] * len(slices)

    def step(self, number: int, rows: Rows, hidden: FloatArray | None
             ) -> tuple[npt.NDArray[Any], FloatArray]:
        """Evaluate `rows`, as `decode`; all members call this for the same rows.

        number: of the run
        Returns the tokens of which the member has rows of the output matrix, int[k], and their
        logits, float32[n, k].
        Raises NoCells, at all members alike, and ClusterError, which others receive as PeerFailed.
        """
        self._team.begin(number, cancelled=False)
        if self.decode(rows, hidden) is None:
            raise ClusterError("a run of the head was stopped")
        found = [one.of_slice(own) for one, own in zip(self._heads, self._found, strict=True)]
        return (np.concatenate([tokens for tokens, _ in found]),
                np.concatenate([logits for _, logits in found], axis=1))

    def _run(self, turn: int, rows: Rows, hidden: FloatArray | None) -> FloatArray | None:
        try:
            found = self._slices[turn][0].decode(rows, hidden)
        except NoCells:
            raise
        except Exception as error:
            self._team.fail(self._team.shape.own[turn])
            raise ClusterError(f"a slice of the head: {error}") from error
        if found is not None:
            self._found[turn] = found
        return found
