"""A first stage that also takes token ids beyond the vocabulary, whose rows are vectors.

A batch of llama.cpp has either tokens or embeddings. So in a run with such a row, all others are
looked up here, by ggml's own function, which leaves their bits as they are
(measured: benchmarks/records/bita.md#bita-embedding-rows). Independent of adapters and strategies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeinfer.backends.base import Backend
from pipeinfer.backends.wide import Embedding
from pipeinfer.backends.wrapped import WrappedBackend
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError


class LearnedRows(WrappedBackend):
    """A backend around a first stage, with vectors for further token ids.

    inner: the stage
    embedding: of the vocabulary
    vectors: float32[k, n_embd], as they enter the first layer, for the ids from `n_vocab` on
    Raises BackendError for vectors of another size, and for a stage that is not the first.
    """

    def __init__(self, inner: Backend, embedding: Embedding, vectors: FloatArray) -> None:
        super().__init__(inner)
        if not self.info.first or vectors.ndim != 2 or vectors.shape[1] != self.info.n_embd:
            raise BackendError(f"vectors of shape {vectors.shape} for a stage of "
                               f"{self.info.n_embd} elements, which has to be the first")
        self._embedding = embedding
        self._vectors = np.ascontiguousarray(vectors, np.float32)

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        learned = rows.tokens - self.info.n_vocab
        beyond = learned >= 0
        if hidden is not None or not beyond.any():
            return self._inner.decode(rows, hidden, should_stop)
        if int(learned.max()) >= len(self._vectors):
            raise BackendError(f"a token outside the vocabulary of {self.info.n_vocab} and "
                               f"{len(self._vectors)} learned rows")
        given = np.empty((len(rows), self.info.n_embd), np.float32)
        given[beyond] = self._vectors[learned[beyond]]
        given[~beyond] = self._embedding.rows(rows.tokens[~beyond])
        return self._inner.decode(rows, given, should_stop)
