"""A shard on a device, whose short decodes all have the same number of rows.

Kernels of a device are chosen by the number of rows and by n_kv, the cells that attention reads in
blocks of 256, and they sum over cells as these lie in memory. So every decode of at most `width`
rows is filled up to `width` with rows behind them, which are removed after it, and each sequence
has a part of the cache for itself, a stream of llama.cpp's. Rows are chains: the cell of a row is
its position, whatever was decoded and removed before. What a row is computed with then depends on
its position alone, but for its place among the rows and for the other rows. `known_padding`
measures that neither of these changes a bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from typing_extensions import override

from pipeinfer.backends.exact_width import Progress, Widths, curve_of
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import ALL_SEQS, CURVE_ROWS, END, FloatArray, Rows, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.models.shard_cache import cache_directory, recall, remember, turn

_BLOCK = 256  #: cells by which n_kv grows
#: tokens before the rows that are compared; rows behind the third cross a block of cells, and some
#: kernels split a row's cells from 512 on
_CONTEXTS = (0, 23, 247, 560)
_ACCEPTED = 0.7  #: share of a draft's tokens that is expected to be accepted
_ROUNDS = 3  #: of the times
_SEARCH = 1  #: version of the search


class PaddedBackend(LlamaCppBackend):
    """A backend with padded runs. With `options.streams` off it is a LlamaCppBackend.

    width: rows of each decode of at most so many; 0: decodes are left as they are
    """

    width = 0

    @override
    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        if not self.width or self._until_norm or rows.media is not None:
            whole = super().decode(rows, hidden, should_stop)
            if rows.media is not None and self._taps is not None:
                self._tapped = [super().tapped.copy()]
            return whole
        found, tapped = [], []
        for start, stop in self._parts(rows):
            given = None if hidden is None else hidden[start:stop]
            part = self._decode_part(rows, start, stop, given, should_stop)
            if part is None:
                self._drop(rows)
                return None
            # the next decode overwrites what this one has lent
            found.append(part.copy() if stop < len(rows) else part)
            if self._taps is not None:
                tapped.append(super().tapped[: stop - start].copy())
        self._tapped = tapped
        return found[0] if len(found) == 1 else np.concatenate(found)

    @property
    @override
    def tapped(self) -> FloatArray:
        return np.concatenate(self._tapped) if self.width else super().tapped

    def _decode_part(self, rows: Rows, start: int, stop: int, hidden: FloatArray | None,
                     should_stop: Callable[[], bool] | None) -> FloatArray | None:
        """Decode rows of one sequence, `[start, stop)`, with padding where there are few."""
        count, (tokens, positions, outputs) = stop - start, rows.lists
        more, ids = max(self.width - count, 0), rows.seq_ids[start]
        short, end = count <= self.width, positions[stop - 1] + 1
        part = make_rows([
            *((tokens[i], positions[i], ids, outputs[i] or short) for i in range(start, stop)),
            *((0, end + i, ids, True) for i in range(more))])
        if hidden is not None and more:
            hidden = np.concatenate([hidden, np.zeros((more, hidden.shape[1]), np.float32)])
        result = super().decode(part, hidden, should_stop)
        if more and result is not None:
            self.seq_rm(ids[0], end, END)
        if result is None or not short:
            return result
        return result[[i for i in range(count) if outputs[start + i] or not self.info.last]] \
            if count < len(result) or not all(outputs[start:stop]) else result

    def _parts(self, rows: Rows) -> Iterator[tuple[int, int]]:
        """Cut rows where another sequence begins, and few rows also where the number of cells that
        they attend to alone, with their padding, grows by a block."""
        start, positions, count = 0, rows.lists.positions, len(rows)
        while start < count:
            ids = rows.seq_ids[start]
            if len(ids) != 1:
                raise BackendError(f"a row in the sequences {ids}: on a device each row is in one")
            stop = start + 1
            while stop < count and rows.seq_ids[stop] == ids:
                stop += 1
            if stop - start <= self.width:
                block = (positions[start] + self.width - 1) // _BLOCK
                stop = min(stop, start + (block + 1) * _BLOCK - self.width + 1 - positions[start])
            yield start, stop
            start = stop

    @override
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Copy the stream of `src`: `dst` has the same tokens before `p0`, if any."""
        if not self.options.streams:
            super().seq_cp(src, dst, p0, p1)
        elif p0 < p1 and src != dst and self.seq_bounds(src) is not None:
            binding.llama_memory_seq_cp(self._memory, src, dst, -1, -1)
            self.seq_rm(dst, p1, END)

    @override
    def seq_keep(self, seq_id: int) -> None:
        if not self.options.streams:
            super().seq_keep(seq_id)
            return
        for other in range(self.info.n_seq_max):
            if other != seq_id:
                self.seq_rm(other, 0, END)


def known_padding(backend: PaddedBackend, identity: Sequence[object], wanted: int = 0,
                  limit: int = 16, progress: Progress | None = None) -> Widths:
    """Choose to how many rows short decodes are padded, and set that as the backend's width.

    backend: with streams; its cache must be empty, and is empty afterwards
    identity: what times depend on besides the backend's options: the file, the device, the library
    wanted: so many rows, or 1 if their bits differ; 0: as many as promise most tokens in a time
    limit: most rows
    progress: called with (widths tried, limit)
    Returns R, which is the width, and what runs up to it cost: as much as each other. Results are
    stored in the shard cache: times for all stages of the file, which then have one width.
    """
    limit = min(limit, backend.exact_limit, backend.info.n_batch)
    rows, cost = 1, 1.0
    backend.width = 0
    if min(wanted or limit, limit) > 1:
        options = structs.replace(backend.options, layer_callbacks=True)  # stages differ in that
        tried = (wanted,) if wanted else CURVE_ROWS
        own = [_SEARCH, identity, structs.asdict(options)]
        times = _stored([*own, tried], lambda: list(curve_of(backend, _ROUNDS, progress, tried)),
                        len(tried), progress)
        costs = dict(zip(tried, times, strict=True))
        own += [backend.info.layers, backend.most_threads]
        for count in tried if wanted else by_gain(costs):
            if count <= limit and _stored([*own, count], partial(
                    holds, backend, count, progress), 0, progress):
                rows, cost = count, costs[count]
                break
    backend.width = rows
    return Widths(rows, tuple(float(-(-one // rows)) for one in CURVE_ROWS), rows, cost)


def _stored(identity: Sequence[object], find: Callable[[], Any], times: int,
            progress: Progress | None) -> Any:
    """Return what `find` returned in an earlier process, or returns now: so many times, or a
    verdict."""
    text = json.dumps(identity, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    path = cache_directory() / f"padding-{digest}"
    with turn(path, lambda: progress and progress(0, 1)):
        found = recall(path)
        good = isinstance(found, bool) if not times else (
            isinstance(found, list) and len(found) == times
            and all(isinstance(one, float) and one > 0 for one in found))
        if not good:
            found = find()
            remember(path, found)
    return found


def by_gain(costs: dict[int, float]) -> list[int]:
    """Return the numbers of rows that promise more tokens in a time than single rows, the best
    first. costs: their times relative to one row."""
    tokens = {rows: (1 - _ACCEPTED ** rows) / (1 - _ACCEPTED) for rows in costs}
    return sorted((rows for rows, cost in costs.items() if tokens[rows] > cost),
                  key=lambda rows: -tokens[rows] / costs[rows])


def holds(backend: PaddedBackend, rows: int, progress: Progress | None = None) -> bool:
    """Return whether a chain of so many rows has the bits of single rows, each padded to as many:
    at once, after a wrong half, and in a copy of the sequence.

    progress: called with (rows, rows) before every decode
    """
    room = backend.info.n_ctx // backend.info.n_seq_max - 2 * rows
    rng = np.random.default_rng(rows)
    backend.width = rows
    try:
        return all(_holds_behind(backend, context, rng, progress) for context in _CONTEXTS
                   if context <= room)
    finally:
        backend.width = 0
        backend.seq_rm(ALL_SEQS, 0, END)


def _holds_behind(backend: PaddedBackend, context: int, rng: np.random.Generator,
                  progress: Progress | None) -> bool:
    rows, info, half = backend.width, backend.info, backend.width // 2
    backend.seq_rm(ALL_SEQS, 0, END)
    tokens = rng.integers(0, info.n_vocab, context + 2 * rows).tolist()
    # channels of a trained model's residual stream differ in scale by orders
    hidden = None if info.first else (
        rng.standard_normal((len(tokens), info.n_embd)) *
        np.exp(rng.standard_normal(info.n_embd))).astype(np.float32)

    def decode(start: int, stop: int, seq_id: int = 0, at: int | None = None) -> FloatArray:
        """Rows of these numbers, at their positions or from `at` on."""
        if progress is not None:
            progress(rows, rows)
        first, few = start if at is None else at, stop - start <= rows
        found = backend.decode(make_rows([
            (tokens[i], first + i - start, (seq_id,), few) for i in range(start, stop)]),
            None if hidden is None else hidden[start:stop])
        assert found is not None  # nothing stops it
        return found.copy()

    for start in range(0, context, info.n_batch):
        decode(start, min(start + info.n_batch, context))
    last = info.n_seq_max - 1
    backend.seq_cp(0, last, 0, context)
    chain = range(context, context + rows)
    singles = np.concatenate([decode(i, i + 1) for i in chain])
    backend.seq_rm(0, context, END)
    found = [decode(context, context + rows, last)] if last else []
    before = decode(context, context + half)
    decode(context + rows, context + 2 * rows - half, at=context + half)
    backend.seq_rm(0, context + half, END)
    found.append(np.concatenate([before, decode(context + half, context + rows)]))
    backend.seq_rm(0, context, END)
    found.append(decode(context, context + rows))
    return all(one.tobytes() == singles.tobytes() for one in found)
