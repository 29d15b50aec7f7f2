"""Back-off: how long an unprofitable method rests before it is tried again."""

from __future__ import annotations

from msgspec import Struct

_FIRST, _MOST = 24, 384  #: drafting jobs or tokens


class Rests(Struct):
    """Lengths of rests, each twice that of the one before, up to a bound.

    known: how many jobs or tokens without a rest make the next rest a short one again
    """

    known: float
    _next: int = _FIRST
    _since: float = 0.0

    def went(self, count: float = 1.0) -> None:
        """Record that `count` jobs or tokens went by without a rest."""
        self._since += count
        if self._since >= self.known:
            self._next = _FIRST

    def begin(self) -> int:
        """Return the length of the rest that begins now."""
        length, self._next, self._since = self._next, min(2 * self._next, _MOST), 0.0
        return length
