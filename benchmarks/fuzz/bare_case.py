"""The files of `gguf_case` given to llama.cpp as they are, without pipeinfer's checks: for
comparison, to see what those keep away. What fails here is llama.cpp's own affair."""

from __future__ import annotations

import ctypes
from pathlib import Path

from benchmarks.fuzz import gguf_case
from benchmarks.fuzz.runner import Kind
from pipeinfer.errors import ModelError


def examine(data: bytes, directory: Path) -> str:
    """Load, tokenise, decode three tokens."""
    from pipeinfer.llama import binding as c

    path = directory / "model.gguf"
    path.write_bytes(data)
    params = c.llama_model_default_params()
    params.n_gpu_layers = 0
    model = c.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ModelError("llama.cpp refuses it")
    vocab = c.llama_model_get_vocab(model)
    text, tokens = gguf_case.TEXT.encode(), (c.llama_token * 256)()
    c.llama_tokenize(vocab, text, len(text), tokens, 256, True, True)
    options = c.llama_context_default_params()
    options.n_ctx = options.n_batch = 64
    options.n_threads = options.n_threads_batch = 1
    context = c.llama_init_from_model(model, options)
    if not context:
        c.llama_model_free(model)
        raise ModelError("llama.cpp makes no context of it")
    top = max(c.llama_vocab_n_tokens(vocab) - 1, 0)
    batch = c.llama_batch_init(3, 0, 1)
    batch.n_tokens = 3
    for at, token in enumerate((0, 5, top)):
        batch.token[at], batch.pos[at], batch.logits[at] = min(token, top), at, True
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = 0
    status = c.llama_decode(context, batch)
    if status == 0:
        ctypes.string_at(c.llama_get_logits(context), 12)
    c.llama_batch_free(batch)
    c.llama_free(context)
    c.llama_model_free(model)
    return f"decoded with status {status}"


def _prepare() -> None:
    gguf_case.seeds()


KIND = Kind("gguf", gguf_case.make, examine, _prepare)
