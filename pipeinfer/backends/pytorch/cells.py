"""The cells of a cache: their sequence ids, and the order in which rows attend to them.

Cells have a position and a set of sequence ids; every sequence operation edits these, never keys or
values. The cells that a row attends to are listed by position, not by place in memory, so that the
order of all sums depends on the path alone. So cells may lie anywhere, and dead cells are free at
once.

Uses numpy only; independent of models, tensors of keys, and runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.core.types import ALL_SEQS, Rows
from pipeinfer.errors import BackendError

Indices = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

BLOCK = 64  #: lists of cells are padded to a multiple, so that equal paths give equal shapes


class Group(Struct, frozen=True):
    """Rows that share one list: row `rows[i]` attends to the first `lengths[i]` of `cells`."""

    rows: list[int]
    cells: Indices
    lengths: list[int]


class _Sorted(Struct, frozen=True):
    """The cells of a view by position (learned prefix cells first), and what exempts them."""

    cells: Indices
    pos: Indices
    exempt: Mask
    pinned: Mask
    plain: bool  #: nothing exempt: what a row sees is the beginning of the list


class CellTable:
    """Positions and id sets of `n_cells` cells, for ids `0..n_seqs-1`.

    A *joined* cell is exempt from the position test: every row that attends to one of its ids sees
    it. A *pinned* one holds a learned prefix: it comes before all others, no sequence operation
    changes it, and windows do not hide it.
    """

    def __init__(self, n_cells: int, n_seqs: int) -> None:
        self.n_cells, self.n_seqs = n_cells, n_seqs
        self._pos = np.full(n_cells, -1, np.int64)
        self._sets = np.zeros((n_cells, -(-n_seqs // 64)), np.uint64)
        self._joined = np.zeros(n_cells, np.int64)  #: order of the join, 0 none
        self._pinned = np.zeros(n_cells, np.bool_)
        self._born = np.zeros(n_cells, np.int64)  #: order of arrival, the last tie-break
        self._clock = 0

    # --- claiming and freeing -----------------------------------------------------------------

    def claim(self, rows: Rows) -> Indices:
        """Take a cell for each row.

        Raises BackendError, and claims nothing, for ids outside the table and when too few cells
        are free.
        """
        stores = [self._bits(ids, i) for i, ids in enumerate(rows.seq_ids)]
        cells = self._take(len(rows), f"no free cells for {len(rows)} rows")
        self._pos[cells] = rows.positions
        self._sets[cells] = stores
        return cells

    def pin(self, count: int, seq_ids: Sequence[int]) -> Indices:
        """Take cells for a learned prefix of `count` vectors under `seq_ids`.

        Raises BackendError as `claim` does.
        """
        store = self._bits(seq_ids, 0)
        cells = self._take(count, f"no free cells for a prefix of {count} vectors")
        self._pos[cells], self._sets[cells], self._pinned[cells] = 0, store, True
        return cells

    def free(self, cells: Indices) -> None:
        """Free `cells`: they have no position, sequence ids or pins any more."""
        self._pos[cells], self._sets[cells] = -1, 0
        self._joined[cells], self._pinned[cells] = 0, False

    def _take(self, count: int, problem: str) -> Indices:
        free = np.flatnonzero(self._pos < 0)[:count]
        if len(free) < count:
            raise BackendError(f"{problem} in a cache of {self.n_cells} cells; raise -c")
        self._born[free] = np.arange(self._clock, self._clock + count)
        self._clock += count
        return free

    def _bits(self, ids: Sequence[int], row: int) -> Bits:
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= self.n_seqs:
            raise BackendError(f"row {row} has bad sequence ids {tuple(ids)}")
        bits = np.zeros(self._sets.shape[1], np.uint64)
        for seq_id in ids:
            bits[seq_id >> 6] |= np.uint64(1 << (seq_id & 63))
        return bits

    # --- sequence operations ------------------------------------------------------------------

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove the id (ALL_SEQS: every id) from cells in `[p0, p1)`; free those without one.

        Joined cells belong to the start of a sequence: only a range that begins at 0 includes them.
        """
        inside = self._within(p0, p1)
        if seq_id == ALL_SEQS:
            self._sets[inside] = 0
        elif 0 <= seq_id < self.n_seqs:
            word, bit = seq_id >> 6, np.uint64(1 << (seq_id & 63))
            self._sets[inside, word] &= ~bit
        self._sweep()

    def copy(self, src: int, dst: int, p0: int, p1: int) -> Indices:
        """Add `dst` to the cells of `src` in `[p0, p1)`; returns those that did not have it."""
        if src == dst:
            return np.zeros(0, np.int64)
        inside = self._within(p0, p1) & self._has(src)
        added = np.flatnonzero(inside & ~self._has(dst))
        self._sets[added] |= self._bits((dst,), 0)
        return added

    def join(self, src: int, dst: int, order: int) -> None:
        """Add `dst` to all cells of `src`, visible whatever the positions; order: as in
        `core.SeqJoin`.
        """
        added = self.copy(src, dst, 0, np.iinfo(np.int64).max)
        self._joined[added[self._joined[added] == 0]] = order

    def keep(self, seq_id: int) -> None:
        """Remove every other id and free the cells without this one."""
        bits = self._bits((seq_id,), 0)
        loose = ~self._pinned
        self._sets[loose] &= bits
        self._sweep()

    def _within(self, p0: int, p1: int) -> Mask:
        found: Mask = (self._pos >= max(p0, 0)) & (self._pos < p1) & (self._joined == 0)
        if p0 <= 0:
            found |= (self._joined > 0) & (self._pos >= 0)
        return found & ~self._pinned

    def _has(self, seq_id: int) -> Mask:
        bit = np.uint64(1 << (seq_id & 63))
        found: Mask = (self._sets[:, seq_id >> 6] & bit) != 0
        return found

    def _sweep(self) -> None:
        self.free(np.flatnonzero((self._pos >= 0) & ~self._sets.any(axis=1)))

    # --- questions ----------------------------------------------------------------------------

    def bounds(self, seq_id: int) -> tuple[int, int] | None:
        """Return the lowest and highest position of the id's cells; None without cells."""
        found = self._pos[self._has(seq_id) & ~self._pinned]
        return (int(found.min()), int(found.max())) if len(found) else None

    def listing(self) -> list[tuple[int, frozenset[int]]]:
        """Return every cell in use as (position, ids), sorted."""
        pairs = [
            (int(self._pos[cell]),
             frozenset(i for i in range(self.n_seqs)
                       if int(self._sets[cell, i >> 6]) >> (i & 63) & 1))
            for cell in np.flatnonzero(self._pos >= 0)
        ]
        return sorted(pairs, key=lambda pair: (pair[0], sorted(pair[1])))

    # --- what rows see ------------------------------------------------------------------------

    def groups(self, rows: Rows, window: int | None) -> list[Group]:
        """Return the lists of cells that the rows (whose cells are claimed) attend to, by position.

        Rows of a view share a list when each sees a beginning of it that is padded to the same
        multiple of BLOCK; so the shape of what a row computes does not depend on other rows.
        window: a row sees cells less than so many positions back; None: all
        Raises BackendError when a row sees no cell.
        """
        orders = self._orders(rows)
        shared: dict[tuple[tuple[int, ...], int], Group] = {}
        groups: list[Group] = []
        for i, (view, pos) in enumerate(zip(views_of(rows), rows.positions.tolist(), strict=True)):
            order = orders[view]
            if order.plain and (window is None or not len(order.pos)
                                or pos - order.pos[0] < window):
                length = int(np.searchsorted(order.pos, pos, "right"))
                seen = order.cells[:length]
                key = (view, -(-length // BLOCK))
                if key in shared:
                    group = shared[key]
                    if length > len(group.cells):
                        shared[key] = group = Group(group.rows, seen, group.lengths)
                    group.rows.append(i)
                    group.lengths.append(length)
                    continue
                group = Group([i], seen, [length])
                if length:
                    shared[key] = group
                    continue
            else:
                seen = order.cells[self._seen(order, pos, window)]
                group = Group([i], seen, [len(seen)])
            if not len(group.cells):
                raise BackendError(f"row {i} sees no cell, not even its own")
            groups.append(group)
        return [*shared.values(), *groups]

    def union(self, rows: Rows, window: int | None) -> tuple[Indices, Mask]:
        """Return all cells that any of the rows sees, by position, and bool[n, cells]: which row
        sees which.

        window: as for `groups`
        Raises BackendError when a row sees no cell.
        """
        orders = self._orders(rows)
        seen = np.zeros((len(rows), self.n_cells), np.bool_)
        views = views_of(rows)
        for i, (view, pos) in enumerate(zip(views, rows.positions.tolist(), strict=True)):
            order = orders[view]
            seen[i, order.cells[self._seen(order, pos, window)]] = True
        blind = np.flatnonzero(~seen.any(axis=1))
        if len(blind):
            raise BackendError(f"row {blind[0]} sees no cell, not even its own")
        cells = self._by_position(np.flatnonzero(seen.any(axis=0)))
        return cells, seen[:, cells]

    def _orders(self, rows: Rows) -> dict[tuple[int, ...], _Sorted]:
        orders: dict[tuple[int, ...], _Sorted] = {}
        for i, view in enumerate(views_of(rows)):
            if view not in orders:
                orders[view] = self._order(self._bits(view, i))
        return orders

    def _order(self, view: Bits) -> _Sorted:
        cells = self._by_position(np.flatnonzero((self._sets & view).any(axis=1)))
        pinned, joined = self._pinned[cells], self._joined[cells] > 0
        plain = not joined.any() and not pinned.any()
        return _Sorted(cells, self._pos[cells], joined, pinned, plain)

    def _by_position(self, cells: Indices) -> Indices:
        keys = self._pos[cells] - self._pinned[cells]
        if (keys[1:] > keys[:-1]).all():
            return cells
        return cells[np.lexsort((self._born[cells], self._joined[cells], keys))]

    @staticmethod
    def _seen(order: _Sorted, pos: int, window: int | None) -> Mask:
        seen: Mask = (order.pos <= pos) | order.exempt
        if window is not None:
            seen &= pos - order.pos < window
        return seen | order.pinned


def views_of(rows: Rows) -> tuple[tuple[int, ...], ...]:
    """Return the ids that each row attends to."""
    return rows.seq_ids if rows.views is None else rows.views
