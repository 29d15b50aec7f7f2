"""A backend around another one: all methods except `decode` call the inner one.

Backends that compute otherwise (at a set pace, with additional rows) derive from it and need no
code for sequences.
"""

from __future__ import annotations

from pipeinfer.backends.base import Backend, apply, tap
from pipeinfer.core.types import FloatArray, SeqJoin


class WrappedBackend:
    """A backend whose derived classes define `decode`."""

    def __init__(self, inner: Backend) -> None:
        self.info, self.capabilities = inner.info, inner.capabilities
        self._inner = inner

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """See `Backend.seq_rm`."""
        self._inner.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """See `Backend.seq_cp`."""
        self._inner.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """See `Backend.seq_keep`."""
        self._inner.seq_keep(seq_id)

    def seq_join(self, src: int, dst: int, order: int = 1) -> None:
        """See `core.SeqJoin`. Raises BackendError where the inner backend cannot."""
        apply(self._inner, SeqJoin(src, dst, order))

    def tap(self, layers: tuple[int, ...]) -> None:
        """See `base.tap`."""
        self._tapped = tap(self._inner, layers)

    @property
    def tapped(self) -> FloatArray:
        """See `base.tap`."""
        return self._tapped()

    def close(self) -> None:
        """See `Backend.close`."""
        self._inner.close()
