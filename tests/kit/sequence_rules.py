"""The rules of sequences that llama.cpp leaves to its caller, checked."""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.core.types import Rows
from pipeinfer.errors import BackendError


def check_ids(rows: Rows, n_seq_max: int) -> None:
    """Raise BackendError where a row has no ids, one twice, or one that there is not."""
    for i, ids in enumerate(rows.seq_ids):
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= n_seq_max:
            raise BackendError(f"row {i} has bad sequence ids {ids}")


def check_shared(rows: Rows) -> None:
    """Raise BackendError unless the ids of a row are a subset of those of every earlier row that
    shares one of them: otherwise the row would attend through its first id to cells that its other
    ids never held.
    """
    earlier: list[set[int]] = []
    for i, ids in enumerate(rows.seq_ids):
        own = set(ids)
        if any(own & other and not own <= other for other in earlier):
            raise BackendError(f"row {i}: sequence ids {ids} did not share the cell of an earlier "
                               "row")
        earlier.append(own)


def check_distinct(rows: Rows) -> None:
    """Raise BackendError where an id has two rows at a position."""
    seen: set[tuple[int, int]] = set()
    for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
        for seq_id in ids:
            if (seq_id, pos) in seen:
                raise BackendError(f"row {i} is a second row of sequence {seq_id} at "
                                   f"position {pos}")
            seen.add((seq_id, pos))


def check_continued(rows: Rows, bounds: Callable[[int], tuple[int, int] | None]) -> None:
    """Raise BackendError unless each id goes on behind its last cell without a gap.

    bounds: first and last position of an id's cells, None without one
    """
    ends: dict[int, int] = {}
    for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
        for seq_id in ids:
            if seq_id not in ends:
                found = bounds(seq_id)
                ends[seq_id] = pos - 1 if found is None else found[1]
            if pos != ends[seq_id] + 1:
                raise BackendError(f"row {i} at position {pos} does not continue sequence "
                                   f"{seq_id}, which ends at {ends[seq_id]}")
            ends[seq_id] = pos
