"""What a cache must contain, kept as plain lists, and logits recomputed from it from scratch."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeinfer.backends.base import Backend
from pipeinfer.core.types import ALL_SEQS, END, FloatArray, Rows, make_rows


@dataclass
class KvOracle:
    """The visible (token, position) pairs of every sequence id."""

    visible: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def of(self, seq_id: int) -> list[tuple[int, int]]:
        return self.visible.get(seq_id, [])

    def next_position(self, seq_id: int) -> int:
        pairs = self.of(seq_id)
        return pairs[-1][1] + 1 if pairs else 0

    def twins(self, seq_id: int) -> list[int]:
        """Ids with the same visible pairs, which may share a row."""
        return [i for i in self.visible if i != seq_id and self.of(i) == self.of(seq_id)]

    def add(self, rows: Rows) -> None:
        for token, pos, ids in zip(
            rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids, strict=True
        ):
            for seq_id in ids:
                self.visible.setdefault(seq_id, []).append((token, pos))

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        for i in list(self.visible) if seq_id == ALL_SEQS else [seq_id]:
            left = [(t, p) for t, p in self.of(i) if not p0 <= p < p1]
            self.visible[i] = left
            if not left:
                del self.visible[i]

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        added = [(t, p) for t, p in self.of(src) if p0 <= p < p1]
        if added:
            self.visible[dst] = sorted(self.of(dst) + added, key=lambda pair: pair[1])

    def keep(self, seq_id: int) -> None:
        self.visible = {seq_id: self.of(seq_id)} if self.of(seq_id) else {}


def from_scratch(backend: Backend, pairs: list[tuple[int, int]]) -> FloatArray:
    """Logits after the last of `pairs`, row by row in an empty cache; leaves it empty."""
    backend.seq_rm(ALL_SEQS, 0, END)
    for token, pos in pairs:
        result = backend.decode(make_rows([(token, pos, (0,), True)]))
    backend.seq_rm(ALL_SEQS, 0, END)
    assert result is not None
    return result[0]
