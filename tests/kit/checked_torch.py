"""A torch backend with llama.cpp's rules, for tests that both pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs
from typing_extensions import override

from pipeinfer.backends.base import NO_VIEWS
from pipeinfer.backends.pytorch.backend import TorchBackend
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError
from tests.kit.sequence_rules import check_continued, check_ids, check_shared


class CheckedTorch(TorchBackend):
    """Whose rows have to continue their sequences, and to share cells as llama.cpp's do."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = structs.replace(
            self.capabilities, free_positions=False, separate_views=False)

    @override
    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        if self._shard is not None and 0 < len(rows) <= self.info.n_batch \
                and (rows.positions >= 0).all():
            if rows.views is not None:
                raise BackendError(NO_VIEWS)
            check_ids(rows, self.info.n_seq_max)
            check_continued(rows, self._table.bounds)
            check_shared(rows)
        return super().decode(rows, hidden, should_stop)

    @override
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        bounds = self._table.bounds(dst) if p0 < p1 and src != dst else None
        if bounds is not None and bounds[0] < p1 and bounds[1] >= p0:
            raise BackendError(f"seq_cp {src} -> {dst} over [{p0}, {p1}): {dst} has cells up "
                               f"to {bounds[1]}")
        super().seq_cp(src, dst, p0, p1)
