"""Backends that check the rules of sequences that llama.cpp leaves to its caller, for tests."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from tests.kit.sequence_rules import check_distinct, check_ids, check_shared


class CheckedLlama(LlamaCppBackend):
    """Which raises BackendError for rows and copies that break a rule."""

    @override
    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        if rows.views is None and 0 < len(rows) <= self.info.n_batch:
            check_ids(rows, self.info.n_seq_max)
            check_distinct(rows)
            check_shared(rows)
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
