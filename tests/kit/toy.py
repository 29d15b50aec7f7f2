"""A tiny deterministic language model in numpy with real cache semantics, for tests and emulation.

Real attention over the cells that a row sees, several layers so that it splits into stages, and
logits that are the same bits for the same path whatever was decoded beside it: rows are computed
one by one, each over its visible cells in order of position. The residual stream is rounded to
float32 after every layer, so a pipeline gives the same bits as the whole model.

Nothing here knows runs, ranks or tokens' meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer.backends.base import NO_VIEWS, Capabilities, ShardInfo
from pipeinfer.core.types import ALL_SEQS, FloatArray, Rows
from pipeinfer.errors import BackendError
from tests.kit.sequence_rules import check_continued, check_ids, check_shared

Matrix = npt.NDArray[np.float64]


class ToySpec(Struct, frozen=True):
    """Which toy model. Equal specs are equal models.

    agreement below 1 makes it a draft of the model with agreement 1: at the share of 1 -
    agreement of all (token, position) pairs its arg-max is a wrong token, elsewhere its logits
    are the target's own.
    """

    n_vocab: int = 64
    n_layers: int = 4
    n_embd: int = 16
    seed: int = 0
    agreement: float = 1.0


def draft_of(spec: ToySpec, agreement: float = 0.8) -> ToySpec:
    """A draft for `spec` whose greedy choice agrees with it at about the given rate."""
    return structs.replace(spec, agreement=agreement)


class _Layer(Struct, frozen=True):
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    up: Matrix
    down: Matrix


@lru_cache(maxsize=32)
def _weights(
    n_vocab: int, n_layers: int, width: int, seed: int
) -> tuple[Matrix, tuple[_Layer, ...], Matrix]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> Matrix:
        return np.asarray(rng.standard_normal((rows, columns)) * (gain / np.sqrt(columns)))

    embedding = rng.standard_normal((n_vocab, width))
    layers = tuple(
        _Layer(
            matrix(width, width, 1.5),
            matrix(width, width, 1.5),
            matrix(width, width, 1.5),
            matrix(width, width, 1.0),
            matrix(2 * width, width, 1.0),
            matrix(width, 2 * width, 1.0),
        )
        for _ in range(n_layers)
    )
    return embedding, layers, matrix(n_vocab, width, 3.0)


def _normed(x: Matrix) -> Matrix:
    scaled: Matrix = x / np.sqrt(x.dot(x) / len(x) + 1e-6)
    return scaled


class ToyBackend:
    """One shard of a toy model. See `backends.base.Backend` for the contract of each call.

    It refuses what llama.cpp refuses (gaps in a sequence) and what that silently computes wrongly
    (two cells of an id at one position).

    log: the tokens of every decode, as ("decode", tokens); None unless asked for.
    """

    def __init__(self, spec: ToySpec, info: ShardInfo, log: list[tuple[Any, ...]] | None) -> None:
        self.spec, self.info, self.log = spec, info, log
        self.capabilities = Capabilities(
            free_positions=False,
            separate_views=False,
            embedding_rows=True,
            stops_inside=True,
        )
        self._embedding, layers, self._head = _weights(
            spec.n_vocab, spec.n_layers, spec.n_embd, spec.seed
        )
        self._layers = layers[info.layers[0] : info.layers[1]]
        shape = (len(self._layers), info.n_ctx, spec.n_embd)
        self._keys, self._values = np.zeros(shape), np.zeros(shape)
        self._pos = np.full(info.n_ctx, -1, np.int64)
        self._member = np.zeros((info.n_seq_max, info.n_ctx), np.bool_)
        self._rates = 1e4 ** (-np.arange(spec.n_embd // 2) / (spec.n_embd // 2))
        self._closed = False

    @classmethod
    def load(
        cls,
        spec: ToySpec | None = None,
        start: int = 0,
        stop: int | None = None,
        *,
        n_ctx: int = 512,
        n_seq_max: int = 64,
        n_batch: int = 64,
        log: bool = False,
    ) -> ToyBackend:
        """The layers `[start, stop)` of `spec`, by default all of them."""
        spec = spec or ToySpec()
        stop = spec.n_layers if stop is None else stop
        assert 0 <= start < stop <= spec.n_layers
        info = ShardInfo(
            architecture="toy",
            layers=(start, stop),
            n_layers_total=spec.n_layers,
            first=start == 0,
            last=stop == spec.n_layers,
            n_embd=spec.n_embd,
            n_vocab=spec.n_vocab,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            weight_bytes=(stop - start) * 8 * spec.n_embd**2 * 8,
            cache_bytes=(stop - start) * n_ctx * spec.n_embd * 16,
        )
        return cls(spec, info, [] if log else None)

    def decode(
        self,
        rows: Rows,
        hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """See `Backend.decode`."""
        if self.log is not None:
            self.log.append(("decode", rows.tokens.tolist()))
        cells, result = self._claim(rows, hidden), None
        try:
            result = self._compute(rows, hidden, should_stop, cells)
            return result
        finally:
            if result is None:
                self._free(cells)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """See `Backend.seq_rm`."""
        inside = (self._pos >= p0) & (self._pos < p1)
        if seq_id == ALL_SEQS:
            self._member[:, inside] = False
        else:
            self._member[seq_id, inside] = False
        self._sweep()

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """See `Backend.seq_cp`. BackendError when `dst` would hold a position twice."""
        inside = self._member[src] & (self._pos >= p0) & (self._pos < p1)
        added = self._pos[inside & ~self._member[dst]]
        twice = np.intersect1d(added, self._pos[self._member[dst]])
        if len(twice):
            raise BackendError(f"seq_cp {src} -> {dst} over [{p0}, {p1}): {dst} already has a cell "
                               f"at position {twice[0]}")
        self._member[dst] |= inside

    def seq_keep(self, seq_id: int) -> None:
        """See `Backend.seq_keep`."""
        kept = self._member[seq_id].copy()
        self._member[:] = False
        self._member[seq_id] = kept
        self._sweep()

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True

    def seq_bounds(self, seq_id: int) -> tuple[int, int] | None:
        """Lowest and highest position of the id's cells, None without cells."""
        positions = self._pos[self._member[seq_id]]
        return (int(positions.min()), int(positions.max())) if len(positions) else None

    def used_cells(self) -> int:
        """How many cells of the cache are taken."""
        return int(np.count_nonzero(self._pos >= 0))

    def cells(self) -> list[tuple[int, frozenset[int]]]:
        """Every taken cell as (position, ids), sorted."""
        taken = np.flatnonzero(self._pos >= 0)
        pairs = [
            (int(self._pos[c]), frozenset(np.flatnonzero(self._member[:, c]).tolist()))
            for c in taken
        ]
        return sorted(pairs, key=lambda pair: (pair[0], sorted(pair[1])))

    def _sweep(self) -> None:
        """Free the cells that no id holds."""
        self._pos[~self._member.any(axis=0)] = -1

    def _free(self, cells: list[int]) -> None:
        self._member[:, cells] = False
        self._pos[cells] = -1

    def _claim(self, rows: Rows, hidden: FloatArray | None) -> list[int]:
        """Check the rows and give each a cell; on an error nothing is claimed."""
        n, info = len(rows), self.info
        if self._closed:
            raise BackendError("decode on a closed backend")
        if not 0 < n <= info.n_batch:
            raise BackendError(f"a decode of {n} rows: this backend takes 1 to {info.n_batch}")
        if rows.views is not None:
            raise BackendError(NO_VIEWS)
        if hidden is None and not info.first:
            raise BackendError("this shard needs the previous shard's hidden rows")
        if hidden is not None and hidden.shape != (n, info.n_embd):
            raise BackendError(f"hidden rows of shape {hidden.shape}, not ({n}, {info.n_embd})")
        tokens = rows.tokens if hidden is None else rows.tokens[:0]
        if ((tokens < 0) | (tokens >= info.n_vocab)).any():
            raise BackendError("a token id is outside the vocabulary")
        check_ids(rows, info.n_seq_max)
        check_continued(rows, self.seq_bounds)
        check_shared(rows)
        free = np.flatnonzero(self._pos < 0)
        if len(free) < n:
            raise BackendError(f"no free cells for {n} rows in a cache of {info.n_ctx} cells; "
                               "raise -c")
        cells: list[int] = free[:n].tolist()
        for cell, pos, ids in zip(cells, rows.positions.tolist(), rows.seq_ids, strict=True):
            self._pos[cell] = pos
            self._member[list(ids), cell] = True
        return cells

    def _compute(
        self,
        rows: Rows,
        hidden: FloatArray | None,
        should_stop: Callable[[], bool] | None,
        cells: list[int],
    ) -> FloatArray | None:
        positions = rows.positions.tolist()
        if self.info.first:
            table = self._embedding[rows.tokens] if hidden is None else hidden.astype(np.float64)
            placed = [x + self._position(p) for x, p in zip(table, positions, strict=True)]
            stream = np.stack(placed).astype(np.float32)
        else:
            stream = np.array(hidden, np.float32)
        for i, layer in enumerate(self._layers):
            for j, mixed in enumerate(self._attended(i, rows, stream, cells)):
                row = stream[j] + layer.output.dot(mixed)
                stream[j] = row + layer.down.dot(np.tanh(layer.up.dot(_normed(row))))
            work_left = self.info.last or i + 1 < len(self._layers)
            if work_left and should_stop is not None and should_stop():
                return None
        if not self.info.last:
            return stream
        return self._logits(rows, stream)

    def _attended(self, index: int, rows: Rows, stream: FloatArray, cells: list[int]
                  ) -> list[Matrix]:
        """Store the keys and values of one layer; what each row reads of those that it sees."""
        layer, found = self._layers[index], []
        inputs = [_normed(row.astype(np.float64)) for row in stream]
        for x, cell in zip(inputs, cells, strict=True):
            self._keys[index, cell] = layer.key.dot(x)
            self._values[index, cell] = layer.value.dot(x)
        for x, pos, ids in zip(inputs, rows.positions.tolist(), rows.seq_ids, strict=True):
            seen = self._visible(pos, ids[0])
            scores = self._keys[index, seen].dot(layer.query.dot(x)) / np.sqrt(len(x))
            weights = np.exp(scores - scores.max())
            found.append(weights.dot(self._values[index, seen]) / weights.sum())
        return found

    def _visible(self, pos: int, view: int) -> npt.NDArray[np.intp]:
        """Cells that a row at `pos` looking through `view` sees, in order of position."""
        cells = np.flatnonzero(self._member[view] & (self._pos <= pos))
        return cells[np.argsort(self._pos[cells], kind="stable")]

    def _position(self, pos: int) -> Matrix:
        angles = pos * self._rates
        return np.concatenate([np.sin(angles), np.cos(angles)])

    def _logits(self, rows: Rows, stream: FloatArray) -> FloatArray:
        wanted = np.flatnonzero(rows.outputs)
        out = np.empty((len(wanted), self.spec.n_vocab), np.float32)
        for k, j in enumerate(wanted.tolist()):
            out[k] = self._head.dot(_normed(stream[j].astype(np.float64)))
            if self.spec.agreement < 1.0 and self._disagrees(
                int(rows.tokens[j]), int(rows.positions[j])
            ):
                out[k] = np.roll(out[k], 1)
        return out

    def _disagrees(self, token: int, pos: int) -> bool:
        """A fixed coin for each (token, position)."""
        mixed = (token * 0x9E3779B1 + pos * 0x85EBCA77 + self.spec.seed * 0xC2B2AE3D) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 15)) / 2**32 >= self.spec.agreement
