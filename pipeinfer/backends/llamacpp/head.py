"""A head of the target on llama.cpp: MTP, or EAGLE-3. See `strategies.proposers.target_head`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.llama.library import last_log
from pipeinfer.models.shard import ShardSource


class LlamaHead(LlamaCppBackend):
    """A head as a backend: see `target_head.Head`."""

    shift = 0

    @classmethod
    def open(cls, source: ShardSource | Path, layers: int, sizes: Mapping[str, Any], threads: int,
             options: LlamaOptions) -> LlamaHead:
        """Load a head.

        source: its file
        layers: how many llama.cpp counts in it: those of an MTP head's model, 1 for EAGLE-3
        sizes: n_ctx, n_seq_max and n_batch
        options: with `head` set
        Raises ModelError and BackendError.
        """
        head = cls.load(source, layers=(0, layers), n_layers_total=layers, first=True, last=True,
                        n_threads=threads, options=options, **sizes)
        binding.want_final_rows(head._ctx, True, False)
        head.shift = -1 if options.head == "eagle3" else 0
        return head

    @property
    def tapped(self) -> FloatArray:
        """Its own hidden rows after the last decode, float32[n, n_embd]."""
        return self._own_rows(self._last[0])

    def encode(self, rows: FloatArray) -> FloatArray:
        """See `target_head.Head.encode`. Raises BackendError."""
        if self.options.head != "eagle3":
            return rows
        found = []
        for start in range(0, len(rows), self.info.n_batch):
            part = np.ascontiguousarray(rows[start : start + self.info.n_batch], np.float32)
            self._batch.fill_vectors(part)
            if status := binding.llama_encode(self._ctx, self._batch.columns):
                raise BackendError(f"llama_encode failed with status {status}: {last_log()}")
            found.append(self._own_rows(len(part)))
        return np.concatenate(found)

    def _own_rows(self, count: int) -> FloatArray:
        found = binding.get_final_rows(self._ctx)
        if not found:
            raise BackendError("llama.cpp gave no rows of the head")
        flat = np.ctypeslib.as_array(found, (count * self.info.n_embd,))
        rows: FloatArray = flat.reshape(count, -1).copy()
        return rows
