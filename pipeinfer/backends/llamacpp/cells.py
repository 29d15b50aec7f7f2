"""Keeps the cells of every sequence in order of position inside llama.cpp's cache.

Attention sums over a sequence's cells in the order in which they lie in memory, and floating-point
sums depend on their order: the same tokens in permuted cells give other bits. llama.cpp puts new
rows into the lowest free cells, so a hole that a dropped branch leaves below living cells would
later be filled with newer positions. To prevent this, cells that die *below* a living cell are not
freed but copied to one more sequence id, the grave, which no row attends to. Cells that die above
all living ones (the only case without side branches) are freed at once. When the cache is full, the
grave is emptied and the living cells are moved together, in their order.

`CellOrder` is a model of llama.cpp's allocation, checked against it by tests; `OccupiedCells`
applies it to the real cache. Layers with a sliding window have a cache of their own. There
llama.cpp treats a cell as free if it is behind the window and only one id holds it, so a second
grave holds dead cells, and after a restored state living ones have a second id, the guard, while
llama.cpp looks for free cells.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeinfer.backends.base import ShardInfo
from pipeinfer.backends.llamacpp.places import Places
from pipeinfer.core.types import ALL_SEQS, END, Rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.llama.library import last_log

Cells = npt.NDArray[np.int32]
T = TypeVar("T")


class CellOrder:
    """Which cell holds which position of which id.

    The caller must pass every operation on the real cache to `remove` and `copy`, and every decode
    that succeeded to `place`.
    in_order: whether the cells of every sequence still lie in order of position
    """

    def __init__(self, n_cells: int, n_seqs: int) -> None:
        self.n_cells, self.n_seqs = n_cells, n_seqs
        self.in_order = True
        self._low = [0] * n_seqs  #: position of the first entry of an id's row
        self._length = [0] * n_seqs
        self._cells = np.empty((n_seqs, n_cells), np.int32)  #: rows; -1 where a cell is missing
        self._references = np.zeros(n_cells, np.int32)  #: how many ids hold the cell
        # for single cells, for which numpy is slow
        self._cell_memory = self._cells.data
        self._reference_memory = self._references.data
        self._held_bytes = bytearray(n_cells)
        #: not free in llama.cpp's eyes; the same memory, as an array
        self._held = np.frombuffer(self._held_bytes, np.bool_)

    @property
    def n_buried(self) -> int:
        """The number of cells that only the grave holds."""
        return int(np.count_nonzero(self._held)) - int(np.count_nonzero(self._references))

    def used_ids(self) -> list[int]:
        """The ids that hold cells."""
        return [seq_id for seq_id, length in enumerate(self._length) if length]

    def place(self, rows: Rows) -> None:
        """Record that llama.cpp took the lowest free cells for these rows, in row order."""
        cell, held = -1, self._held_bytes
        for pos, ids in zip(rows.lists.positions, rows.seq_ids, strict=True):
            cell = held.index(0, cell + 1)
            held[cell] = 1
            self._reference_memory[cell] = len(ids)
            for seq_id in ids:
                self._put(seq_id, pos, cell)

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Record that `dst` got the cells of `src` in `[p0, p1)`."""
        start, stop = self._span(src, p0, p1)
        if start >= stop:
            return
        low = self._low[src]
        row = self._cells[src, start - low : stop - low]
        length = self._length[dst]
        if not length:
            self._low[dst] = start
        if self._low[dst] + length == start:  # the usual case, in one go
            self._cells[dst, length : length + len(row)] = row
            self._length[dst] = length + len(row)
            self._references[row[row >= 0]] += 1
            return
        for pos, cell in zip(range(start, stop), row.tolist(), strict=True):
            if cell >= 0:
                self._put(dst, pos, cell)
                self._references[cell] += 1

    def remove(self, seq_id: int, p0: int, p1: int) -> list[tuple[int, int]]:
        """Record that `seq_id` leaves `[p0, p1)`; return position ranges to copy to the grave
        *before* that.

        Without such ranges the id can be removed at once.
        """
        start, stop = self._span(seq_id, p0, p1)
        if start >= stop:
            return []
        low = self._low[seq_id]
        row = self._cells[seq_id, start - low : stop - low].copy()
        taken = row[row >= 0]
        self._references[taken] -= 1
        self._cells[seq_id, start - low : stop - low] = -1
        self._trim(seq_id)
        dying = taken[self._references[taken] == 0]
        if not len(dying):
            return []
        living = np.flatnonzero(self._references)
        if not len(living) or dying.min() > living[-1] or not self.in_order:
            self._held[dying] = False
            return []
        dead = np.zeros(len(row), np.bool_)
        dead[row >= 0] = self._references[taken] == 0
        edges = np.flatnonzero(np.diff(np.concatenate([[0], dead.view(np.int8), [0]])))
        return [(start + int(a), start + int(b)) for a, b in edges.reshape(-1, 2)]

    def is_empty(self) -> bool:
        """Whether no id holds a cell, so that the grave can be emptied without harm."""
        return not self._references.any()

    def empty_grave(self) -> None:
        """Record that the grave's cells were freed, and that nothing else was done."""
        self.in_order = self.is_empty()
        self._held[:] = self._references > 0

    def compact(self) -> None:
        """Record that the grave's cells were freed and the others moved to the front, in order."""
        living = np.flatnonzero(self._references)
        moved = np.full(self.n_cells + 1, -1, np.int32)  # the last entry: a missing cell stays so
        moved[living] = np.arange(len(living))
        for seq_id in self.used_ids():
            row = self._cells[seq_id, : self._length[seq_id]]
            row[:] = moved[row]
        self._references[: len(living)] = self._references[living]
        self._references[len(living) :] = 0
        self._held[:] = self._references > 0

    def _span(self, seq_id: int, p0: int, p1: int) -> tuple[int, int]:
        low = self._low[seq_id]
        return max(p0, low), min(END if p1 < 0 else p1, low + self._length[seq_id])

    def _put(self, seq_id: int, pos: int, cell: int) -> None:
        if not self._length[seq_id]:
            self._low[seq_id] = pos
        index = pos - self._low[seq_id]
        length = self._length[seq_id]
        if index == length < self.n_cells:  # the usual case
            self._cell_memory[seq_id, index] = cell
            self._length[seq_id] = length + 1
            return
        if max(length - index, index) >= self.n_cells:  # too far apart to be recorded
            self.in_order = False
            return
        if index < 0:  # below what the id holds: shift its row
            row = self._cells[seq_id, :length].copy()
            self._cells[seq_id, :-index] = -1
            self._cells[seq_id, -index : length - index] = row
            self._low[seq_id], self._length[seq_id] = pos, length - index
            index = 0
        length = self._length[seq_id]
        if index > length:
            self._cells[seq_id, length:index] = -1
        self._cells[seq_id, index] = cell
        self._length[seq_id] = max(length, index + 1)

    def _trim(self, seq_id: int) -> None:
        """Drop empty entries at both ends of the id's row."""
        length = self._length[seq_id]
        full = np.flatnonzero(self._cells[seq_id, :length] >= 0)
        if not len(full):
            self._length[seq_id] = 0
            return
        first, last = int(full[0]), int(full[-1]) + 1
        if first:
            self._cells[seq_id, : last - first] = self._cells[seq_id, first:last].copy()
            self._low[seq_id] += first
        self._length[seq_id] = last - first


class OccupiedCells:
    """The order of the cells of one context.

    context: llama.cpp's
    windows: whether layers have a sliding window
    nothing: an id that never holds anything, whose copy lets a state go; None without states
    """

    def __init__(self, context: Any, info: ShardInfo, *, windows: bool, nothing: int | None
                 ) -> None:
        self.order = CellOrder(info.n_ctx, info.n_seq_max)
        self._context, self._memory = context, binding.llama_get_memory(context)
        self._graves = tuple(range(info.n_seq_max, info.n_seq_max + 1 + windows))
        self._guard = info.n_seq_max + 2 if windows else None
        self._nothing = nothing
        self.places: Places | None = None  #: the model's positions, where they differ
        self._rewound = False  # llama.cpp looks for free cells from the first one

    def decode(self, columns: Any, rows: Rows) -> int:
        """Decode a batch; return llama.cpp's status. Where dead cells fill the cache, the living
        ones are moved together first. Raises BackendError if that fails."""
        status = self._evaluate(columns)
        if status == 1 and self.order.n_buried:
            self.compact()
            status = self._evaluate(columns)
        if status == 0:
            self.order.place(rows)
        return status

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove an id, or all, from cells in `[p0, p1)`; those below living cells are kept."""
        for one in self.order.used_ids() if seq_id == ALL_SEQS else (seq_id,):
            for first, last in self.order.remove(one, p0, p1):
                low, high = self._at(one, first), self._at(one, last)
                for grave in self._graves:
                    binding.llama_memory_seq_cp(self._memory, one, grave, low, high)
                    if self._nothing is not None:
                        binding.llama_memory_seq_cp(self._memory, self._nothing, grave, 0, 0)
            binding.llama_memory_seq_rm(self._memory, one, self._at(one, p0),
                                        -1 if p1 >= END else self._at(one, p1))
            if self.places is not None:
                self.places.remove(one, p0, p1)
        if self.order.is_empty():
            self._free_graves()
            self.order.empty_grave()

    def _at(self, seq_id: int, place: int) -> int:
        return place if self.places is None else self.places.of(seq_id, place)

    def keep(self, seq_id: int) -> None:
        """Remove all other ids from every cell."""
        for other in self.order.used_ids():
            if other != seq_id:
                self.remove(other, 0, END)

    def restore(self, put: Callable[[], bool], rows: Rows) -> bool:
        """Put saved cells of `rows` back with `put`; return what it returns, whether llama.cpp took
        them. Where dead cells fill the cache, the living ones are moved together first."""
        done = self._guarded(put)
        if not done and self.order.n_buried:
            self.compact()
            done = self._guarded(put)
        if done:
            self.order.place(rows)
        return done

    def _guarded(self, call: Callable[[], T]) -> T:
        """Return what `call` returns; meanwhile living cells behind a window have a second id, or
        llama.cpp would take them for free ones."""
        if self._guard is None:
            return call()
        for one in self.order.used_ids():
            binding.llama_memory_seq_cp(self._memory, one, self._guard, -1, -1)
        try:
            return call()
        finally:
            binding.llama_memory_seq_rm(self._memory, self._guard, 0, -1)

    def _evaluate(self, columns: Any) -> int:
        """Decode the batch; return llama.cpp's status.

        llama.cpp searches for free cells after the last ones it took, but from the first one on
        after a restored state.
        """
        if not self._rewound or self._guard is None:
            return int(binding.llama_decode(self._context, columns))
        status = self._guarded(lambda: int(binding.llama_decode(self._context, columns)))
        self._rewound = status != 0
        return status

    def compact(self) -> None:
        """Free the grave and move the living cells together, in order.

        Saving and restoring llama.cpp's whole state does that: the copy has the used cells only,
        in the order of memory, each with all its ids, and goes back to the front. It costs a copy
        of the used cache, once per time that dead cells fill it.
        """
        self._free_graves()
        size = binding.llama_state_get_size(self._context)
        state = np.empty(size, np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = binding.llama_state_get_data(self._context, data, size)
        if not written or binding.llama_state_set_data(self._context, data, written) != written:
            raise BackendError(f"llama.cpp could not compact its cache: {last_log()}")
        self.order.compact()
        self._rewound = True

    def _free_graves(self) -> None:
        for grave in self._graves:
            binding.llama_memory_seq_rm(self._memory, grave, 0, -1)
