"""Attention of Hugging Face layers over cells: keys and values, and the cells each row attends to.

transformers passes every layer's rotated queries, keys and values to one registered function. It
puts the keys and values of the decode's rows into their cells and lets each row attend over the
list of cells that `cells` made for it. Independent of model families beyond the arguments that
layers pass (scaling, soft cap, window), and of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch.nn.functional import scaled_dot_product_attention

from pipeinfer.backends.pytorch.cells import BLOCK, CellTable, Group, Indices
from pipeinfer.core.types import Rows

IMPLEMENTATION = "pipeinfer_cells"  #: the name under which `attend` is registered
_GATHERED = 1 << 14  #: most cells that are copied to serve rows with different lists in one call


class CellStore:
    """Keys and values of a shard's layers: two tensors [cells, kv heads, head size] each."""

    def __init__(
        self, layers: Sequence[int], n_cells: int, heads: Callable[[int], tuple[int, int]],
        dtype: Any, device: Any,
    ) -> None:
        """heads: (kv heads, head size) of a layer."""
        self.keys: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        for layer in layers:
            shape = (n_cells, *heads(layer))
            self.keys[layer] = torch.zeros(shape, dtype=dtype, device=device)
            self.values[layer] = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values, in bytes."""
        return sum(t.numel() * t.element_size()
                   for table in (self.keys, self.values) for t in table.values())


class AttentionCall(Struct, frozen=True):
    """One attention call.

    rows: which of the decode's rows; None: all, in order
    cells: a slice, indices [L] that all rows share, or indices [n, L]
    mask: added to the scores, [n, 1, 1, L], or [1, 1, n, L] when `wide`
    wide: whether all rows are computed over all cells
    """

    rows: Any
    cells: Any
    mask: Any
    wide: bool


class Reading(Struct):
    """The data of one decode of `n` rows that attention needs.

    taken: the rows' own cells, a slice where they lie together
    calls: by window, made at the first layer with that window
    """

    table: CellTable
    store: CellStore
    rows: Rows
    taken: Any
    wide: bool
    dtype: Any
    device: Any
    calls: dict[int | None, list[AttentionCall]] = field(default_factory=dict)

    def of(self, window: int | None) -> list[AttentionCall]:
        """Return the calls for layers with this window."""
        found = self.calls.get(window)
        if found is None:
            found = self._wide(window) if self.wide else self._narrow(window)
            self.calls[window] = found
        return found

    def _wide(self, window: int | None) -> list[AttentionCall]:
        cells, seen = self.table.union(self.rows, window)
        return [AttentionCall(None, self._place(cells, len(cells)), self._mask(seen)[None, None],
                              True)]

    def _narrow(self, window: int | None) -> list[AttentionCall]:
        by_length: dict[int, list[Group]] = {}
        for group in self.table.groups(self.rows, window):
            by_length.setdefault(-(-len(group.cells) // BLOCK) * BLOCK, []).append(group)
        calls = []
        for length, groups in by_length.items():
            for some in _batched(groups, max(1, _GATHERED // length)):
                calls.append(self._gathered(some, length) if len(some) > 1
                             else self._shared(some[0], length))
        return calls

    def _shared(self, group: Group, length: int) -> AttentionCall:
        seen = np.arange(length) < np.array(group.lengths)[:, None]
        return AttentionCall(self._which(group.rows), self._place(group.cells, length),
                    self._mask(seen)[:, None, None], False)

    def _gathered(self, groups: list[Group], length: int) -> AttentionCall:
        cells = np.empty((sum(len(group.rows) for group in groups), length), np.int64)
        lengths: list[int] = []
        rows: list[int] = []
        for group in groups:
            cells[len(rows) : len(rows) + len(group.rows)] = _padded(group.cells, length)
            rows += group.rows
            lengths += group.lengths
        seen = np.arange(length) < np.array(lengths)[:, None]
        return AttentionCall(self._which(rows), self._tensor(cells),
                             self._mask(seen)[:, None, None], False)

    def _which(self, rows: list[int]) -> Any:
        return None if rows == list(range(len(self.rows))) else self._tensor(np.array(rows))

    def _place(self, cells: Indices, length: int) -> Any:
        """The cells as a slice where they lie together with room for the padding behind them."""
        start = int(cells[0])
        if start + length <= self.table.n_cells and (np.diff(cells) == 1).all():
            return slice(start, start + length)
        return self._tensor(_padded(cells, length))

    def _mask(self, seen: Any) -> Any:
        mask = torch.zeros(seen.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return mask.to(self.device)

    def _tensor(self, array: Any) -> Any:
        return torch.from_numpy(array).to(self.device)


def reading(
    table: CellTable, store: CellStore, rows: Rows, cells: Indices, *, wide: bool, dtype: Any,
    device: Any,
) -> Reading:
    """Return the reading of a decode whose rows have claimed `cells`."""
    start = int(cells[0])
    together = (np.diff(cells) == 1).all()
    taken = (slice(start, start + len(cells)) if together
             else torch.from_numpy(np.ascontiguousarray(cells)).to(device))
    return Reading(table, store, rows, taken, wide, dtype, device)


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float,
    dropout: float = 0.0, *, reading: Reading, softcap: float | None = None,
    sliding_window: int | None = None, **_: Any,
) -> tuple[Any, None]:
    """Compute attention in place of transformers' own function.

    query: [1, heads, m, d]
    key, value: [1, kv heads, m, d], of which the first n rows are real
    Returns [1, m, heads, d].
    """
    del attention_mask, dropout
    n = len(reading.rows)
    keys, values = reading.store.keys[module.layer_idx], reading.store.values[module.layer_idx]
    keys[reading.taken] = key[0, :, :n].transpose(0, 1)
    values[reading.taken] = value[0, :, :n].transpose(0, 1)
    out = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
    for call in reading.of(sliding_window):
        run = _wide if call.wide else _narrow
        result = run(query[0, :, :n], keys, values, call, scaling, softcap)
        if call.rows is None:
            out[0, :n] = result
        else:
            out[0, call.rows] = result
    return out, None


def _narrow(query: Any, keys: Any, values: Any, call: AttentionCall, scaling: float,
            softcap: float | None) -> Any:
    """Row by row: the bits of a row do not depend on how many there are. [n, heads, d]."""
    rows = query.transpose(0, 1)
    if call.rows is not None:
        rows = rows[call.rows]
    n, heads, size = rows.shape
    rows = rows.reshape(n, keys.shape[1], heads // keys.shape[1], size)
    k, v = keys[call.cells], values[call.cells]
    if k.dim() == 3:
        k, v = k[None].expand(n, *k.shape), v[None].expand(n, *v.shape)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if softcap is None:
        result = _attention(rows, k, v, call.mask, scaling, None)
    else:  # the number of matrices in a batched product decides its bits on some processors
        result = torch.cat([
            _attention(rows[i : i + 1], k[i : i + 1], v[i : i + 1], call.mask[i : i + 1], scaling,
                       softcap) for i in range(n)])
    return result.reshape(n, heads, size)


def _wide(query: Any, keys: Any, values: Any, call: AttentionCall, scaling: float,
          softcap: float | None) -> Any:
    """All rows over all cells that any of them sees, with a mask. [n, heads, d]."""
    k, v = (table[call.cells].transpose(0, 1)[None] for table in (keys, values))
    repeat = query.shape[0] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    result = _attention(query[None], k, v, call.mask, scaling, softcap)
    return result[0].transpose(0, 1)


def _attention(query: Any, k: Any, v: Any, mask: Any, scaling: float,
               softcap: float | None) -> Any:
    if softcap is None:
        return scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(query, k.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, v)


def _batched(groups: Sequence[Group], rows: int) -> Iterator[list[Group]]:
    """The groups in order, as many at a time as have this many rows together, at least one."""
    some: list[Group] = []
    n_rows = 0
    for group in groups:
        if some and n_rows + len(group.rows) > rows:
            yield some
            some, n_rows = [], 0
        some.append(group)
        n_rows += len(group.rows)
    yield some


def _padded(cells: Indices, length: int) -> Indices:
    """`cells` followed by its last one (masked, but surely finite) up to `length`."""
    filled = np.full(length, cells[-1], np.int64)
    filled[: len(cells)] = cells
    return filled
