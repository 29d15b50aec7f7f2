"""Backends that check the rules of sequences that llama.cpp leaves to its caller, for tests."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding


class CheckedLlama(LlamaCppBackend):
    """Which raises BackendError for rows and copies that break a rule."""

    @override
    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        if rows.views is None and 0 < len(rows) <= self.info.n_batch:
            check_rows(rows, self.info.n_seq_max)
        return super().decode(rows, hidden, should_stop)

    @override
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        if p0 < p1 and src != dst and not self._closed() and not (
                self.keeps_state and not self._copies_whole(src, dst, p0, p1)):
            low = binding.llama_memory_seq_pos_min(self._memory, dst)
            high = binding.llama_memory_seq_pos_max(self._memory, dst)
            if low >= 0 and low < p1 and high >= p0:
                raise BackendError(
                    f"seq_cp {src} -> {dst} over [{p0}, {p1}): {dst} has cells up to {high}")
        super().seq_cp(src, dst, p0, p1)


def check_rows(rows: Rows, n_seq_max: int) -> None:
    """Raise BackendError when rows break a rule that llama.cpp does not check.

    An id holds one row per position. The ids of a row are a subset of those of every earlier row
    that shares one of them; otherwise the row would attend through its first id to cells that its
    other ids never held.
    """
    seen: set[tuple[int, int]] = set()
    earlier: list[set[int]] = []
    for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
        own = set(ids)
        if not own or len(own) != len(ids) or min(own) < 0 or max(own) >= n_seq_max:
            raise BackendError(f"row {i} has bad sequence ids {ids}")
        for seq_id in ids:
            if (seq_id, pos) in seen:
                raise BackendError(f"row {i} is a second row of sequence {seq_id} at "
                                   f"position {pos}")
            seen.add((seq_id, pos))
        for other in earlier:
            if own & other and not own <= other:
                raise BackendError(f"row {i}: sequence ids {ids} did not share the cell of an "
                                   "earlier row")
        earlier.append(own)
