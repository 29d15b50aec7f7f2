"""A head and its target in llama.cpp itself, which is what a trained head is judged by.

Independent of torch and of training.
"""

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


class LlamaRows:
    """A model with one sequence, whose rows can be read. Close it after use.

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

    def close(self) -> None:
        """Free the context and the model."""
        binding.llama_free(self._context)
        binding.llama_model_free(self._model)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on."""
        memory = binding.llama_get_memory(self._context)
        binding.llama_memory_seq_rm(memory, 0, position, -1)

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


class LlamaTarget(LlamaRows):
    """A target that returns the input rows of the layers `taps`."""

    def __init__(self, path: Path, taps: tuple[int, ...], n_ctx: int = 1024, threads: int = 1
                 ) -> None:
        super().__init__(path, n_ctx, threads)
        self._taps = taps
        for tap in taps:
            binding.want_layer_input(self._context, tap, True)

    def step(self, tokens: list[int], position: int) -> tuple[FloatArray, FloatArray]:
        """Evaluate tokens; return the logits of the last, float32[n_vocab], and the tapped rows,
        float32[len(tokens), taps * n_embd].
        """
        parts = [self._rows_of(tokens[:-1], position, False)] if len(tokens) > 1 else []
        parts.append(self._rows_of(tokens[-1:], position + len(tokens) - 1, True))
        return self._logits(), np.concatenate(parts)

    def _rows_of(self, tokens: list[int], position: int, output: bool) -> FloatArray:
        self._run(binding.llama_decode, position, tokens, None, output)
        shape = (len(tokens), self.n_embd)
        found = [np.array(np.ctypeslib.as_array(binding.get_layer_input(self._context, tap), shape))
                 for tap in self._taps]
        return np.concatenate(found or [np.empty((len(tokens), 0), np.float32)], axis=1)


class LlamaEagle(LlamaRows):
    """A completed head."""

    def __init__(self, path: Path, n_ctx: int = 1024, threads: int = 1) -> None:
        super().__init__(path, n_ctx, threads)
        binding.want_final_rows(self._context, True, False)

    def encode(self, rows: FloatArray, position: int = 0) -> FloatArray:
        """Return hidden rows, float32[n, n_embd], of tapped rows, float32[n, taps * n_embd].

        position: of the first; llama.cpp refuses one that does not follow what was read
        """
        self._run(binding.llama_encode, position, None, rows, True)
        return self._rows(len(rows))

    def read(self, tokens: list[int], hidden: FloatArray, position: int) -> None:
        """Store rows of the past: token p + 1 and hidden row p at each position p."""
        self._run(binding.llama_decode, position, tokens, hidden, False)

    def propose(self, token: int, hidden: FloatArray, position: int
                ) -> tuple[FloatArray, FloatArray]:
        """Return the logits of one row, float32[n_vocab], and its own row, float32[n_embd], which
        is the hidden row of the next step.
        """
        self._run(binding.llama_decode, position, [token], hidden[None], True)
        return self._logits(), self._rows(1)[0]

    def chain(self, token: int, hidden: FloatArray, position: int, steps: int) -> list[int]:
        """Return the likeliest tokens of a chain, and forget its steps after the first."""
        found: list[int] = []
        for step in range(steps):
            logits, hidden = self.propose(token, hidden, position + step)
            token = int(logits.argmax())
            found.append(token)
        self.cut(position + 1)
        return found

    def _rows(self, count: int) -> FloatArray:
        found = binding.get_final_rows(self._context)
        return np.array(np.ctypeslib.as_array(found, (count, self.n_embd)))
