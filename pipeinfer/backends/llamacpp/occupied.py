"""Cells of llama.cpp's cache that must stay occupied, so that every sequence stays in order.

`cell_order.CellOrder` is the model of llama.cpp's allocation; this applies it to the real cache.
Cells that die below living ones get one more id, the grave. Layers with a sliding window have a
cache of their own. There llama.cpp treats a cell as free if it is behind the window and only one
id holds it, so a second grave holds dead cells, and after a restored state living ones have a
second id, the guard, while llama.cpp looks for free cells.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pipeinfer.backends.base import ShardInfo
from pipeinfer.backends.llamacpp.cell_order import CellOrder
from pipeinfer.core.types import ALL_SEQS, END, Rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.llama.library import last_log


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
            for low, high in self.order.remove(one, p0, p1):
                for grave in self._graves:
                    binding.llama_memory_seq_cp(self._memory, one, grave, low, high)
                    if self._nothing is not None:
                        binding.llama_memory_seq_cp(self._memory, self._nothing, grave, 0, 0)
            binding.llama_memory_seq_rm(self._memory, one, p0, -1 if p1 >= END else p1)
        if self.order.is_empty():
            self._free_graves()
            self.order.empty_grave()

    def keep(self, seq_id: int) -> None:
        """Remove all other ids from every cell."""
        for other in self.order.used_ids():
            if other != seq_id:
                self.remove(other, 0, END)

    def _evaluate(self, columns: Any) -> int:
        """Decode the batch; return llama.cpp's status.

        llama.cpp searches for free cells after the last ones it took, but from the first one on
        after a restored state.
        """
        if not self._rewound or self._guard is None:
            return int(binding.llama_decode(self._context, columns))
        for one in self.order.used_ids():
            binding.llama_memory_seq_cp(self._memory, one, self._guard, -1, -1)
        status = int(binding.llama_decode(self._context, columns))
        binding.llama_memory_seq_rm(self._memory, self._guard, 0, -1)
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
