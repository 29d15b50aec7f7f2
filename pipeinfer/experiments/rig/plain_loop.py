"""Plain decoding with llama-cpp-python on the whole file, sharing no code with the backend.

Prompt in chunks of `chunk`, then one token at a time: the text every policy has to reproduce.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

from pipeinfer.core.sampling import choose
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.llama import ensure_llama


class PlainLoop:
    """One context over the unsplit model, with the cache that `auto` chooses on a CPU."""

    def __init__(self, path, n_ctx=2048, n_threads=1, n_batch=512, type_k=1, type_v=8, flash=1):
        ensure_llama()  # initialises once, and keeps llama.cpp's log off the terminal
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        params.type_k, params.type_v, params.flash_attn_type = type_k, type_v, flash
        params.n_threads = params.n_threads_batch = n_threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.is_eog = lambda token: llama_cpp.llama_vocab_is_eog(vocab, token)

    def close(self):
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def reset(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def decode(self, tokens, position):
        """Logits after the last of `tokens`, which start at `position`."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        assert status == 0, status
        pointer = llama_cpp.llama_get_logits_ith(self.context, len(tokens) - 1)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self.n_vocab,)).copy()

    def logits_after(self, prompt, forced, chunk=64):
        """Logits at every position from the prompt's last token on, with `forced` fed in."""
        self.reset()
        for start in range(0, len(prompt), chunk):
            last = self.decode(prompt[start : start + chunk], start)
        yield last
        for i, token in enumerate(forced):
            yield self.decode([token], len(prompt) + i)

    def generate(self, prompt, count, params=None, chunk=64, ignore_eos=True):
        """`count` tokens (fewer at an end-of-text token unless ignored)."""
        params = params or SamplingParams()
        self.reset()
        path = list(prompt)
        for start in range(0, len(prompt), chunk):
            logits = self.decode(prompt[start : start + chunk], start)
        while len(path) < len(prompt) + count:
            history = np.array(path, np.int32)
            token = choose(logits, params, history, len(path) - 1).token
            if self.is_eog(token) and not ignore_eos:
                break
            path.append(token)
            if len(path) < len(prompt) + count:
                logits = self.decode([token], len(path) - 1)
        return path[len(prompt) :]
