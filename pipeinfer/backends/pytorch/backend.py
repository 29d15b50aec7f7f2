"""Runs decoder layers with torch: transformers' own layer code over a cache of cells.

A shard holds its own layers, the embedding on the first stage, the final norm and the output head
on the last. Positions are free, rows may attend to other ids than they are stored under, a row may
be given as a vector, a decode stops between any two layers, and learned prefixes can be put before
all cells.

Independent of runs, ranks and the distribution of layers. Several backends may exist in one
process, each used by one thread at a time; they share torch's number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipeinfer.backends.base import Capabilities, ShardInfo
from pipeinfer.backends.llamacpp.eval_callback import PartSum
from pipeinfer.backends.pytorch.attention import CellStore, Reading, reading
from pipeinfer.backends.pytorch.cells import CellTable
from pipeinfer.backends.pytorch.linear import DecodeAborted, Summing, Tiling, sum_up, tile
from pipeinfer.backends.pytorch.options import TorchOptions
from pipeinfer.backends.pytorch.weights import Shard, load_shard
from pipeinfer.core.types import REPLAYED_ROWS, FloatArray, Rows
from pipeinfer.errors import BackendError
from pipeinfer.models.slice_parts import Slice

__all__ = ["TorchBackend", "TorchOptions"]


class TorchBackend:
    """One shard, or a whole model, on torch; `backends.base.Backend` has the contract."""

    def __init__(
        self, shard: Shard, info: ShardInfo, options: TorchOptions, store: CellStore
    ) -> None:
        self.info, self.options = info, options
        self.capabilities = Capabilities(
            free_positions=True, separate_views=True, embedding_rows=True, stops_inside=True)
        #: rows that are computed as single ones are; see `exact_width.exact_width`
        self.exact_limit = options.rows
        self._shard: Shard | None = shard
        self._store = store
        self._table = CellTable(info.n_ctx, info.n_seq_max)
        self._tiling = Tiling(options.tile or 0)
        self._summing = Summing()
        self._device = torch.device(options.device)
        self._dtype = getattr(torch, options.dtype)
        self._extra: Any = None  #: vectors of token ids beyond the vocabulary
        for module in shard.modules():
            tile(module, self._tiling)
        if shard.piece is not None:
            for index, layer in enumerate(shard.decoder, shard.layers[0]):
                sum_up(layer, index, self._summing)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, layers: tuple[int, int] | None = None, n_ctx: int,
        n_seq_max: int, n_batch: int, n_threads: int, options: TorchOptions | None = None,
        piece: Slice | None = None,
    ) -> TorchBackend:
        """Load layers of a GGUF file or a Hugging Face folder.

        path: of the model
        layers: `[start, stop)`; None: all
        n_ctx: cells of the cache
        n_seq_max: sequence ids
        n_batch: maximum rows of a decode
        n_threads: torch's threads in the whole process; 0: unchanged
        options: of torch
        piece: the slice of the layers to load, which has no embedding (`embedding.open_embedding`);
            None: the whole layers
        Only the bytes of these layers are read, and of the embedding or head where they belong.
        Raises ModelError for files that cannot be used, UnsupportedArchitecture, PlanError for an
        impossible range, and BackendError when memory does not suffice.
        """
        options = (options or TorchOptions()).resolved(torch.cuda.is_available())
        if min(n_ctx, n_seq_max, n_batch) < 1:
            raise BackendError(f"{n_ctx} cells, {n_seq_max} sequences and {n_batch} rows: each "
                               "number must be at least 1")
        if n_threads:
            torch.set_num_threads(n_threads)
        dtype = getattr(torch, options.dtype)
        try:
            shard = load_shard(path, layers, dtype, torch.device(options.device), piece)
            store = CellStore(range(*shard.layers), n_ctx, shard.heads, dtype,
                              torch.device(options.device))
        except RuntimeError as error:
            raise _backend_error(f"cannot load {os.fspath(path)}", error) from error
        start, stop = shard.layers
        info = ShardInfo(
            architecture=shard.architecture, layers=shard.layers, n_layers_total=shard.n_layers,
            first=start == 0 and piece is None, last=stop == shard.n_layers, n_embd=shard.n_embd,
            n_vocab=shard.n_vocab, n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch,
            weight_bytes=shard.weight_bytes, cache_bytes=store.nbytes,
        )
        return cls(shard, info, options, store)

    def sum_with(self, sums: PartSum | None) -> None:
        """Sum partial results with `sums` from now on; None: use each partial result as if it were
        the sum."""
        self._summing.sums = sums

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`. A hidden row on the first shard is what enters its first layer
        (an embedding as the model scales it). Positions are free."""
        shard, n, info = self._shard, len(rows), self.info
        if shard is None:
            raise BackendError("decode on a closed backend")
        if not 0 < n <= info.n_batch:
            raise BackendError(f"a decode of {n} rows: this backend takes 1 to {info.n_batch}")
        if hidden is None and not info.first:
            raise BackendError("this shard needs the previous shard's hidden rows")
        if hidden is not None and hidden.shape != (n, info.n_embd):
            raise BackendError(f"hidden rows of shape {hidden.shape}, not ({n}, {info.n_embd})")
        if hidden is None:
            self._check_tokens(rows)
        if (rows.positions < 0).any():
            raise BackendError("a row has a negative position")
        cells = self._table.claim(rows)
        done = False
        try:
            # pieces of prompts are always cut alike; other decodes of so many rows have outputs
            wide = bool(n > self.options.rows
                        or (n > REPLAYED_ROWS and np.count_nonzero(rows.outputs) < 2))
            self._tiling.active = self._tiling.rows > 0 and not wide
            self._summing.rows = n
            with torch.inference_mode():
                read = reading(self._table, self._store, rows, cells, wide=wide,
                               dtype=self._dtype, device=self._device)
                stream = self._forward(shard, rows, hidden, read, should_stop)
                if stream is None:
                    return None
                result = self._guard(self._finish, shard, rows, stream)
            done = True
            return result  # type: ignore[no-any-return]
        except DecodeAborted:
            return None
        finally:
            if not done:
                self._table.free(cells)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`. Cells of a learned prefix
        stay."""
        if p0 < p1 and self._shard is not None:
            self._table.remove(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to cells of `src`."""
        if p0 >= p1 or src == dst or self._shard is None:
            return
        self._table.copy(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`. Cells of a
        learned prefix stay."""
        if self._shard is not None:
            self._table.keep(seq_id)

    def seq_join(self, src: int, dst: int, order: int = 1) -> None:
        """Add `dst` to all cells of `src`.

        Cells that did not have it are from now on seen by every row that attends to one of their
        ids, also from lower positions. Those at the same position are sorted by `order`.
        """
        if self._shard is not None:
            self._table.join(src, dst, order)

    def preload(
        self, prefix: Mapping[int, tuple[Any, Any]], seq_ids: Sequence[int]
    ) -> None:
        """Put learned keys and values before all cells of `seq_ids`.

        prefix: for each layer of this shard (others are ignored) its keys and values, both [count,
            kv heads, head size]; keys are used as they are, without rotation
        seq_ids: rows that attend to one of these see the prefix from every position
        The prefix takes `count` cells, and stays until the backend is closed. Raises BackendError
        for missing layers, wrong shapes or too few cells.
        """
        if self._shard is None:
            raise BackendError("preload on a closed backend")
        own = range(*self.info.layers)
        missing = [layer for layer in own if layer not in prefix]
        if missing:
            raise BackendError(f"the prefix has no keys and values for layers {missing}")
        tensors = {layer: tuple(torch.as_tensor(t, dtype=self._dtype, device=self._device)
                                for t in prefix[layer]) for layer in own}
        count = len(tensors[own[0]][0])
        for layer, pair in tensors.items():
            shape = (count, *self._shard.heads(layer))
            if any(tuple(t.shape) != shape for t in pair):
                raise BackendError(f"the prefix of layer {layer} has shapes "
                                   f"{[tuple(t.shape) for t in pair]}, not {shape}")
        cells = self._table.pin(count, seq_ids)
        for layer, (keys, values) in tensors.items():
            self._store.keys[layer][cells] = keys
            self._store.values[layer][cells] = values

    def add_embeddings(self, vectors: FloatArray) -> int:
        """Add token ids with these vectors, after `n_vocab` and those added before; return the
        first id.

        vectors: float32[k, n_embd], as they enter the first layer
        Raises BackendError for another shape, and on a shard that is not the first.
        """
        if not self.info.first or vectors.ndim != 2 or vectors.shape[1] != self.info.n_embd:
            raise BackendError(f"embeddings of shape {vectors.shape} for a shard that "
                               + ("takes " if self.info.first else "has no embedding of ")
                               + f"{self.info.n_embd} elements")
        added = torch.tensor(vectors, dtype=self._dtype, device=self._device)
        first = self.info.n_vocab + self._n_extra
        self._extra = added if self._extra is None else torch.cat([self._extra, added])
        return first

    def close(self) -> None:
        """Release the model and its cache."""
        self._shard, self._extra = None, None
        self._store.keys.clear()
        self._store.values.clear()

    def seq_bounds(self, seq_id: int) -> tuple[int, int] | None:
        """Return the lowest and highest position of the id's cells; None without cells."""
        return self._table.bounds(seq_id)

    def cells(self) -> list[tuple[int, frozenset[int]]]:
        """Return every cell in use as (position, ids), sorted."""
        return self._table.listing()

    # --- computing ----------------------------------------------------------------------------

    def _forward(
        self, shard: Shard, rows: Rows, hidden: FloatArray | None, read: Reading,
        should_stop: Callable[[], bool] | None,
    ) -> Any:
        """The residual stream after the last layer, [1, m, n_embd]; None when stopped."""
        stream, positions = self._guard(self._enter, shard, rows, hidden)
        angles = self._guard(shard.angles, stream, positions)
        final = len(shard.decoder) - 1
        for i, layer in enumerate(shard.decoder):
            stream = self._guard(self._layer, layer, stream, positions, angles[i], read)
            work_left = self.info.last or i < final
            if work_left and should_stop is not None and should_stop():
                return None
        return stream

    @staticmethod
    def _layer(layer: Any, stream: Any, positions: Any, angles: Any, read: Reading) -> Any:
        out = layer(stream, attention_mask=None, position_ids=positions,
                    position_embeddings=angles, reading=read)
        return out[0] if isinstance(out, tuple) else out

    def _enter(self, shard: Shard, rows: Rows, hidden: FloatArray | None) -> tuple[Any, Any]:
        """Padded inputs: the stream [1, m, n_embd], positions [1, m]."""
        n = len(rows)
        m = self._tiling.padded(n)
        positions = np.zeros((1, m), np.int64)
        positions[0, :n] = rows.positions
        if hidden is not None:
            padded = np.zeros((1, m, self.info.n_embd), np.float32)
            padded[0, :n] = hidden
            stream = torch.from_numpy(padded).to(self._device, self._dtype)
        else:
            tokens = np.zeros((1, m), np.int64)
            tokens[0, :n] = rows.tokens
            added = tokens >= self.info.n_vocab
            ids = torch.from_numpy(np.where(added, 0, tokens)).to(self._device)
            stream = shard.embedding(ids)
            if added.any():
                stream = stream.clone()
                stream[torch.from_numpy(added)] = self._extra[tokens[added] - self.info.n_vocab]
        return stream, torch.from_numpy(positions).to(self._device)

    def _finish(self, shard: Shard, rows: Rows, stream: Any) -> FloatArray:
        n = len(rows)
        if not self.info.last:
            return np.ascontiguousarray(stream[0, :n].float().cpu().numpy())
        wanted = np.flatnonzero(rows.outputs)
        k = len(wanted)
        if not k:
            return np.zeros((0, shard.head.out_features), np.float32)
        self._tiling.active = self._tiling.rows > 0 and k <= self.options.rows
        m = self._tiling.padded(k)
        picked = stream.new_zeros((1, m, stream.shape[-1]))
        picked[0, :k] = stream[0, torch.from_numpy(wanted).to(self._device)]
        logits = shard.logits(picked)[0, :k].float().cpu().numpy()
        return np.ascontiguousarray(logits)

    @staticmethod
    def _guard(compute: Callable[..., Any], *args: Any) -> Any:
        """Return `compute(*args)`; raise torch's errors (memory, devices) as BackendError."""
        try:
            return compute(*args)
        except RuntimeError as error:
            raise _backend_error("torch could not compute this decode", error) from error

    @property
    def _n_extra(self) -> int:
        return 0 if self._extra is None else len(self._extra)

    def _check_tokens(self, rows: Rows) -> None:
        top = self.info.n_vocab + self._n_extra
        if ((rows.tokens < 0) | (rows.tokens >= top)).any():
            raise BackendError("a token id is outside the vocabulary")


def _backend_error(what: str, error: RuntimeError) -> BackendError:
    return BackendError(f"{what}: {' '.join(str(error).split())[:300]}")
