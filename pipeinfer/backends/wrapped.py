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
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`."""
        self._inner.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`."""
        self._inner.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        self._inner.seq_keep(seq_id)

    def seq_join(self, src: int, dst: int, order: int = 1) -> None:
        """Add `dst` to all cells of `src`. Raises BackendError if the inner backend cannot."""
        apply(self._inner, SeqJoin(src, dst, order))

    def tap(self, layers: tuple[int, ...]) -> None:
        """Store the inputs of layers from now on."""
        self._tapped = tap(self._inner, layers)

    @property
    def tapped(self) -> FloatArray:
        """Store the inputs of layers from now on."""
        return self._tapped()

    def close(self) -> None:
        """Release the model and its cache."""
        self._inner.close()
