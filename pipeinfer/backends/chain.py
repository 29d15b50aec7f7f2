"""Several shards of consecutive layers as one backend.

A stage that took over a neighbour's layers loads only those, in addition to its own shard.
Independent of transports and plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from pipeinfer.backends.base import Backend, Capabilities, apply, norms, tap
from pipeinfer.core.types import END, FloatArray, Rows, SeqJoin


class ChainBackend:
    """A backend made of `parts` in the order of their layers.

    Each part has to begin where the one before it ends; ValueError otherwise.
    """

    def __init__(self, parts: Sequence[Backend]) -> None:
        infos = [part.info for part in parts]
        if not infos or any(a.layers[1] != b.layers[0]
                            for a, b in itertools.pairwise(infos)):
            raise ValueError(f"the shards' layers {[info.layers for info in infos]} are not "
                             "contiguous")
        self._parts = list(parts)
        self._taps: list[Callable[[], FloatArray]] = []
        self.info = structs.replace(
            infos[0], layers=(infos[0].layers[0], infos[-1].layers[1]), last=infos[-1].last,
            n_vocab=infos[-1].n_vocab, n_ctx=min(info.n_ctx for info in infos),
            n_seq_max=min(info.n_seq_max for info in infos),
            n_batch=min(info.n_batch for info in infos),
            weight_bytes=sum(info.weight_bytes for info in infos),
            cache_bytes=sum(info.cache_bytes for info in infos))
        able = [part.capabilities for part in parts]
        self.capabilities = Capabilities(
            free_positions=all(one.free_positions for one in able),
            separate_views=all(one.separate_views for one in able),
            embedding_rows=able[0].embedding_rows,
            stops_inside=any(one.stops_inside for one in able),
            takes_back=all(one.takes_back for one in able))

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

    def tap(self, layers: tuple[int, ...]) -> None:
        """Store the inputs of layers from now on."""
        self._taps = [tap(part, layers) for part in self._parts]

    @property
    def tapped(self) -> FloatArray:
        """Store the inputs of layers from now on."""
        return np.concatenate([rows() for rows in self._taps], axis=1)

    def _through(self, calls: Sequence[Callable[..., FloatArray | None]], rows: Rows,
                 hidden: FloatArray | None, should_stop: Callable[[], bool] | None = None
                 ) -> FloatArray | None:
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
        """Add id `dst` to all cells of `src`, as *joined* cells. Raises BackendError where a part
        cannot."""
        for part in self._parts:
            apply(part, SeqJoin(src, dst, order))

    def close(self) -> None:
        """Release the model and its cache."""
        for part in self._parts:
            part.close()

    def _drop(self, rows: Rows, count: int) -> None:
        """Remove the rows' cells from the first `count` parts, which had computed them."""
        end = int(rows.positions.max(initial=-1)) + 1
        whole = not self.capabilities.takes_back
        for part in self._parts[:count]:
            for seq_id, first in rows.first_positions().items():
                part.seq_rm(seq_id, *((0, END) if whole else (first, end)))
