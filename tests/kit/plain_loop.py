"""Plain decoding by llama.cpp of the whole file, sharing no code with the backend but `binding`.

Prompt in chunks of `chunk`, then one token at a time: the text every policy has to reproduce. Of a
mixture of experts a chunk of few rows is decoded row by row, as rows draw their experts alone
there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeinfer.backends.llamacpp.context import (
    CACHE_TYPES,
    FLASH,
    LlamaOptions,
    head_size,
    latent,
    metadata,
)
from pipeinfer.core.sampling import choose
from pipeinfer.core.types import FloatArray, SamplingParams
from pipeinfer.llama import binding
from pipeinfer.llama.library import ensure_llama, model_params
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.repacking import may_repack

FEW = 16  #: rows of a mixture that draw their experts alone


class PlainLoop:
    """One context over the unsplit model, with the cache that `auto` chooses for its device.

    n_gpu_layers: layers on a GPU, as for LlamaOptions; 0 computes on the processor, though
    llama.cpp's own default would be every GPU that it finds. flash: llama.cpp's number for flash
    attention; None takes what `auto` chooses. embeds: for `embedding` alone. pad: decodes of fewer
    tokens have so many rows: further ones, whose cells are removed, come behind them.
    """

    def __init__(self, path: str | os.PathLike[str], n_ctx: int = 2048, n_threads: int = 1,
                 n_batch: int = 512, type_k: int | None = None, type_v: int | None = None,
                 flash: int | None = None, n_gpu_layers: int = 0, embeds: bool = False,
                 pad: int = 0) -> None:
        ensure_llama()  # initialises once, and keeps llama.cpp's log off the terminal
        of_model = model_params(n_gpu_layers)
        of_model.use_extra_bufts = may_repack(ModelFile(path))
        self.model: Any = binding.llama_model_load_from_file(str(path).encode(), of_model)
        params = binding.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        params.embeddings = embeds
        kinds = LlamaOptions(n_gpu_layers).resolved(
            head_size(self.model), head_size(self.model, "key"), one_type=latent(self.model))
        if flash is None:
            flash = FLASH[kinds.flash_attn]
        if type_k is None:
            type_k = CACHE_TYPES[kinds.type_k][0]
        if type_v is None:
            type_v = CACHE_TYPES[kinds.type_v][0]
        params.type_k, params.type_v, params.flash_attn_type = type_k, type_v, flash
        params.n_threads = params.n_threads_batch = n_threads
        params.offload_kqv = params.op_offload = n_gpu_layers != 0
        self.context: Any = binding.llama_init_from_model(self.model, params)
        self._embeds, self._pad = embeds, pad
        self._vocab: Any = binding.llama_model_get_vocab(self.model)
        self.n_vocab: int = binding.llama_vocab_n_tokens(self._vocab)
        architecture = metadata(self.model, "general.architecture")
        self._alone = FEW if int(metadata(self.model, f"{architecture}.expert_count") or 0) else 1

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(binding.llama_vocab_is_eog(self._vocab, token))

    def close(self) -> None:
        """Release context and model."""
        binding.llama_free(self.context)
        binding.llama_model_free(self.model)

    def reset(self) -> None:
        """Empty the cache, so that the next text begins at position 0."""
        binding.llama_memory_clear(binding.llama_get_memory(self.context), True)

    def decode(self, tokens: Sequence[int], position: int) -> FloatArray:
        """Logits after the last of `tokens`, which start at `position`."""
        if 1 < len(tokens) <= self._alone:
            for i, token in enumerate(tokens[:-1]):
                self.decode([token], position + i)
            return self.decode(tokens[-1:], position + len(tokens) - 1)
        count = max(len(tokens), self._pad)
        batch = binding.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = tokens[i] if i < len(tokens) else 1, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = count == self._pad or i == count - 1
        status = binding.llama_decode(self.context, batch)
        if count > len(tokens):
            binding.llama_memory_seq_rm(binding.llama_get_memory(self.context), 0,
                                        position + len(tokens), -1)
        binding.llama_batch_free(batch)
        assert status == 0, status
        if self._embeds:
            return np.empty(0, np.float32)
        pointer = binding.llama_get_logits_ith(self.context, len(tokens) - 1)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self.n_vocab,)).copy()

    def embedding(self, tokens: Sequence[int]) -> FloatArray:
        """llama.cpp's embedding of a text, pooled as its file says, scaled to length 1."""
        self.reset()
        self.decode(tokens, 0)
        function = ctypes.CDLL(str(binding.loaded().path)).llama_get_embeddings_seq
        function.restype = ctypes.POINTER(ctypes.c_float)
        pointer = function(ctypes.c_void_p(self.context), 0)
        row = np.ctypeslib.as_array(pointer, (binding.llama_model_n_embd(self.model),)).copy()
        return row / np.linalg.norm(row)

    def logits_after(self, prompt: Sequence[int], forced: Sequence[int], chunk: int = 64
                     ) -> Iterator[FloatArray]:
        """Logits at every position from the prompt's last token on, with `forced` fed in."""
        self.reset()
        for start in range(0, len(prompt), chunk):
            last = self.decode(prompt[start : start + chunk], start)
        yield last
        for i, token in enumerate(forced):
            yield self.decode([token], len(prompt) + i)

    def generate(self, prompt: Sequence[int], count: int, params: SamplingParams | None = None,
                 chunk: int = 64, ignore_eos: bool = True) -> list[int]:
        """`count` tokens (fewer at an end-of-text token unless ignored)."""
        params = params or SamplingParams()
        self.reset()
        path = list(prompt)
        for start in range(0, len(prompt), chunk):
            logits = self.decode(prompt[start : start + chunk], start)
        while len(path) < len(prompt) + count:
            history = np.array(path, np.int32)
            token = choose(logits, params, history, len(path) - 1).token
            if not ignore_eos and self.is_eog(token):
                break
            path.append(token)
            if len(path) < len(prompt) + count:
                logits = self.decode([token], len(path) - 1)
        return path[len(prompt) :]
