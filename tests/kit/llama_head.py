"""An EAGLE head in llama.cpp itself, which is what a head is judged by."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.llama import binding
from pipeinfer.llama.library import clear_log, ensure_llama, last_log, model_params

_F16 = 1  #: ggml's number for the type of the cache


class LlamaEagle:
    """A completed head with one sequence. Close it after use.

    Raises ModelError where llama.cpp does not load the file, and BackendError where the library
    gives no rows.
    """

    def __init__(self, path: Path, n_ctx: int = 1024, threads: int = 1) -> None:
        ensure_llama()
        if not binding.has_heads():
            raise BackendError("the llama.cpp library does not export what reads hidden rows: "
                               "install the version that constraints.txt names")
        clear_log()
        self._model = binding.llama_model_load_from_file(os.fsencode(path), model_params())
        if not self._model:
            raise ModelError(f"{path}: llama.cpp cannot load it: {last_log()}")
        params = binding.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_ctx, n_ctx, 1
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _F16
        params.offload_kqv = params.op_offload = False
        self._context = binding.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelError(f"{path}: llama.cpp cannot make a context: {last_log()}")
        vocabulary = binding.llama_model_get_vocab(self._model)
        self.n_vocab = int(binding.llama_vocab_n_tokens(vocabulary))
        self.n_embd = int(binding.llama_model_n_embd(self._model))
        binding.want_final_rows(self._context, True, False)

    def close(self) -> None:
        """Free the context and the model."""
        binding.llama_free(self._context)
        binding.llama_model_free(self._model)

    def _run(self, call: Any, position: int, tokens: list[int] | None, rows: FloatArray | None,
             output: bool) -> None:
        count = len(rows) if rows is not None else len(tokens or ())
        batch = binding.llama_batch()
        ctypes.memset(ctypes.byref(batch), 0, ctypes.sizeof(batch))
        one = np.zeros(1, np.int32)
        columns: dict[str, Any] = {
            "pos": np.arange(position, position + count, dtype=np.int32),
            "n_seq_id": np.ones(count, np.int32),
            "seq_id": np.full(count, one.ctypes.data, np.uintp),
            "logits": np.full(count, output, np.int8)}
        if tokens is not None:
            columns["token"] = np.array(tokens, np.int32)
        if rows is not None:
            columns["embd"] = np.ascontiguousarray(rows, np.float32)
        batch.n_tokens = count
        kinds: dict[str, Any] = dict(batch._fields_)
        for name, column in columns.items():
            setattr(batch, name, ctypes.cast(column.ctypes.data, kinds[name]))
        clear_log()
        if status := call(self._context, batch):
            raise BackendError(f"llama.cpp failed with status {status}: {last_log()}")
        binding.llama_synchronize(self._context)

    def _logits(self) -> FloatArray:
        found = np.ctypeslib.as_array(binding.llama_get_logits(self._context), (self.n_vocab,))
        return np.array(found)

    def encode(self, rows: FloatArray) -> FloatArray:
        """Return hidden rows, float32[n, n_embd], of tapped rows, float32[n, taps * n_embd]."""
        self._run(binding.llama_encode, 0, None, rows, True)
        return self._rows(len(rows))

    def read(self, tokens: list[int], hidden: FloatArray, position: int) -> None:
        """Store rows of the past: token p + 1 and hidden row p at each position p."""
        self._run(binding.llama_decode, position, tokens, hidden, False)

    def chain(self, token: int, hidden: FloatArray, position: int, steps: int) -> list[int]:
        """Return the likeliest tokens of a chain. The hidden row of each step is that of the one
        before.
        """
        found: list[int] = []
        for step in range(steps):
            self._run(binding.llama_decode, position + step, [token], hidden[None], True)
            token, hidden = int(self._logits().argmax()), self._rows(1)[0]
            found.append(token)
        return found

    def _rows(self, count: int) -> FloatArray:
        found = binding.get_final_rows(self._context)
        return np.array(np.ctypeslib.as_array(found, (count, self.n_embd)))
