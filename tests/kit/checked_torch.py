"""A torch backend with llama.cpp's rules, for tests that both pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs
from typing_extensions import override

from pipeinfer.backends.base import NO_VIEWS
from pipeinfer.backends.pytorch.backend import TorchBackend
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError


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
            ids = {seq_id for group in rows.seq_ids for seq_id in group}
            if ids and not 0 <= min(ids) <= max(ids) < self.info.n_seq_max:
                raise BackendError(f"sequence ids {sorted(ids)} outside 0 to "
                                   f"{self.info.n_seq_max - 1}")
            check_rows(rows, [(seq_id, self._table.bounds(seq_id)) for seq_id in ids])
        return super().decode(rows, hidden, should_stop)

    @override
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        bounds = self._table.bounds(dst) if p0 < p1 and src != dst else None
        if bounds is not None and bounds[0] < p1 and bounds[1] >= p0:
            raise BackendError(f"seq_cp {src} -> {dst} over [{p0}, {p1}): {dst} has cells up "
                               f"to {bounds[1]}")
        super().seq_cp(src, dst, p0, p1)


def check_rows(rows: Rows, tips: Iterable[tuple[int, tuple[int, int] | None]]) -> None:
    """Raise BackendError for rows that llama.cpp would refuse or compute wrongly.

    rows: each id must continue without a gap from its last cell; the ids of a row are a subset of
        those of every earlier row that shares one
    tips: (id, bounds of its cells) for all ids of the rows
    """
    ends = {seq_id: None if bounds is None else bounds[1] for seq_id, bounds in tips}
    earlier: list[set[int]] = []
    for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
        own = set(ids)
        for seq_id in ids:
            end = ends[seq_id]
            if end is not None and pos != end + 1:
                raise BackendError(f"row {i} at position {pos} does not continue sequence "
                                   f"{seq_id}, which ends at {end}")
            ends[seq_id] = pos
        if any(own & other and not own <= other for other in earlier):
            raise BackendError(f"row {i}: sequence ids {ids} did not share the cell of an earlier "
                               "row")
        earlier.append(own)
