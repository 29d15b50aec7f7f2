"""The slices that one member of a wide stage holds, as one backend.

Each slice is a file and a context of its own and computes in a thread of its own; the threads meet
in every sum. After each sum all slices have the same residual rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from pipeinfer.backends.base import Backend, Capabilities, apply, tap
from pipeinfer.backends.llamacpp.layer_probe import PartSum
from pipeinfer.backends.team import Team
from pipeinfer.core.types import END, FloatArray, IntArray, Rows, SeqJoin
from pipeinfer.errors import ClusterError, NoCells


class SliceBackend(Backend, Protocol):
    """A backend that holds a slice of its layers."""

    def sum_with(self, sums: PartSum | None) -> None:
        """Sum partial results with `sums` from now on; None: use each partial result as if it were
        the sum.
        """


class Embedding(Protocol):
    """The embedding of a first stage made of slices."""

    def rows(self, tokens: IntArray) -> FloatArray:
        """Return the rows of tokens, float32[n, n_embd]. Raises BackendError for an id outside its
        range.
        """


class WideBackend:
    """A backend made of the slices of one member.

    slices: those held here, in the order of `team.shape.own`, each a chain of shards of consecutive
        layers
    team: the member's side of the all-reduce
    layers: `[start, stop)` of the stage
    n_layers_total: layers of the whole model
    embedding: on the first stage; None on others
    """

    def __init__(self, slices: Sequence[Sequence[SliceBackend]], team: Team,
                 layers: tuple[int, int], n_layers_total: int, embedding: Embedding | None) -> None:
        self._slices = [list(chain) for chain in slices]
        self._team, self._embedding = team, embedding
        self._taps: list[Callable[[], FloatArray]] = []
        infos = [part.info for chain in slices for part in chain]
        self.info = structs.replace(
            infos[0], layers=layers, first=layers[0] == 0, last=layers[1] == n_layers_total,
            n_vocab=infos[-1].n_vocab, n_ctx=min(info.n_ctx for info in infos),
            weight_bytes=sum(p.info.weight_bytes for chain in slices for p in chain),
            cache_bytes=sum(p.info.cache_bytes for chain in slices for p in chain))
        able = [part.capabilities for chain in slices for part in chain]
        takes_back = all(one.takes_back for one in able)
        self.capabilities = Capabilities(
            free_positions=all(one.free_positions for one in able), separate_views=False,
            embedding_rows=True, stops_inside=takes_back, takes_back=takes_back)
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

    def tap(self, layers: tuple[int, ...]) -> None:
        """Store inputs of layers: all slices have the same rows after a sum, so one stores them.
        All have to be asked, as llama.cpp then sums up more rows in the last layer."""
        asked = [[tap(shard, layers) for shard in chain] for chain in self._slices]
        self._taps = asked[0]

    @property
    def tapped(self) -> FloatArray:
        """Store the inputs of layers from now on."""
        return np.concatenate([rows() for rows in self._taps], axis=1)

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

    def _drop(self, rows: Rows) -> None:
        """Remove the rows' cells from all shards; some may have none."""
        whole = not self.capabilities.takes_back
        end = END if whole else int(rows.positions.max(initial=-1)) + 1
        for shard in self._all():
            for seq_id, first in rows.first_positions().items():
                shard.seq_rm(seq_id, 0 if whole else first, end)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`."""
        for shard in self._all():
            shard.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`."""
        for shard in self._all():
            shard.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        for shard in self._all():
            shard.seq_keep(seq_id)

    def seq_join(self, src: int, dst: int, order: int = 1) -> None:
        """Add id `dst` to all cells of `src`, as *joined* cells. Raises BackendError where a slice
        cannot."""
        for shard in self._all():
            apply(shard, SeqJoin(src, dst, order))

    def close(self) -> None:
        """End the threads. The slices stay open: the code that loaded them has to close them."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        for shard in self._all():
            shard.sum_with(None)

    def _all(self) -> list[SliceBackend]:
        return [shard for chain in self._slices for shard in chain]


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
