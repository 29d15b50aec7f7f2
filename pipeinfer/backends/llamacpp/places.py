"""Where rows of each sequence stand for the model, if its pictures take fewer positions than rows.

Everything else counts rows: a row's position is its place in the text. With M-RoPE a picture of n
rows takes max(width, height) positions, and all its cells carry the first one. So positions of rows
and of sequence operations are mapped here, and nowhere else. Operations begin and end outside of
pictures, but for copies of whole states.
"""

from __future__ import annotations

from pipeinfer.core.types import END, Rows

_Pictures = tuple[tuple[int, int, int], ...]  #: first place, places, positions; in order


class Places:
    """The pictures under each sequence id."""

    def __init__(self) -> None:
        self._pictures: dict[int, _Pictures] = {}

    def positions(self, rows: Rows) -> list[int]:
        """Return the model's position of each row; of a picture, which becomes known, its first."""
        places, media = rows.lists.positions, rows.media
        if media is not None and media.places is not None:
            begin = places[0] - media.offset
            own = begin, media.total or len(rows), media.n_pos
            first = self.of(rows.seq_ids[0][0], begin)
            for one in rows.seq_ids[0]:
                known = self._pictures.get(one, ())
                if own not in known:
                    self._pictures[one] = (*known, own)
            return [first] * len(rows)
        if not self._pictures:
            return places
        return [self.of(ids[0], place) for ids, place in zip(rows.seq_ids, places, strict=True)]

    def of(self, seq_id: int, place: int) -> int:
        """Return the model's position of a place; within a picture that of its first row."""
        less = 0
        if place >= END:
            return place
        for first, n, n_pos in self._pictures.get(seq_id, ()):
            if place <= first:
                break
            if place < first + n:
                return first - less
            less += n - n_pos
        return place - less

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Follow a copy of places in `[p0, p1)`."""
        if here := {one for one in self._pictures.get(src, ()) if p0 <= one[0] < p1}:
            self._pictures[dst] = tuple(sorted({*self._pictures.get(dst, ()), *here}))

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Follow a removal of places in `[p0, p1)`. seq_id: below 0: every id."""
        for one in list(self._pictures) if seq_id < 0 else [seq_id]:
            left = tuple(p for p in self._pictures.get(one, ()) if not p0 <= p[0] < p1)
            if left:
                self._pictures[one] = left
            else:
                self._pictures.pop(one, None)
