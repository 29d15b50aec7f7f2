"""Embeddings on the last stage: which of a prompt's rows they are made of.

A prompt arrives in several runs, so the rows so far are added up for each lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeinfer.backends.base import Backend, norms
from pipeinfer.core.messages import Decode
from pipeinfer.core.types import FloatArray, Pooling, Rows


class PooledRows:
    """The sums of the rows of prompts that are being embedded."""

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}  # mean: float64[n_embd]

    def add(self, backend: Backend, run: Decode, pooling: Pooling) -> FloatArray:
        """Evaluate a run of one prompt.

        Returns float32[k, n_embd] for the k rows with an output: at the prompt's end its embedding.
        """
        if pooling == "last":
            return norms(backend, run.rows, run.hidden)
        rows, lane = run.rows, run.lanes[0]
        every = Rows(rows.tokens, rows.positions, rows.seq_ids, np.ones(len(rows), np.bool_),
                     rows.views)
        found = norms(backend, every, run.hidden)
        first, last = rows.lists.positions[0], rows.lists.positions[-1]
        if pooling == "mean":
            before = self._sums[lane] if first else 0.0
            self._sums[lane] = before + found.sum(axis=0, dtype=np.float64)
            row = self._sums[lane] / (last + 1)
        else:
            row = self._sums.setdefault(lane, found[0]) if first else found[0]
            self._sums[lane] = row
        return np.repeat(row.astype(np.float32)[None], int(rows.outputs.sum()), axis=0)

    def forget(self, lane: int) -> None:
        """Drop what is stored of a lane that has ended."""
        self._sums.pop(lane, None)
