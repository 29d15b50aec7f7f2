"""How long what does not pay is left alone before it is tried again."""

from __future__ import annotations

from msgspec import Struct

_FIRST, _MOST = 24, 384  #: questions or tokens


class Rests(Struct):
    """Each rest in a row is twice as long as the one before.

    known: how much has to go without a rest for the next one to be a short one again.
    """

    known: float
    _next: int = _FIRST
    _since: float = 0.0

    def went(self, count: float = 1.0) -> None:
        """So much went without a rest."""
        self._since += count
        if self._since >= self.known:
            self._next = _FIRST

    def begin(self) -> int:
        """How long the rest is that begins now."""
        length, self._next, self._since = self._next, min(2 * self._next, _MOST), 0.0
        return length
