"""Reads a model to learn from: a GGUF file of a plain llama.

Does not know: what the model is for, how it is trained.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.network.model import Llama, LlamaConfig


def restore(path: Path) -> Llama:
    """The model of a file. Raises ModelError where it is no llama with tied embeddings and a
    byte-level BPE tokenizer."""
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{path} is not a llama model, and only those can be learnt from here")
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError(f"{path} needs a byte-level BPE tokenizer, but has another")
    heads = fields["llama.attention.head_count"]
    config = LlamaConfig(
        n_vocab=len(fields["tokenizer.ggml.tokens"]),
        n_layer=fields["llama.block_count"],
        n_embd=fields["llama.embedding_length"],
        n_head=heads,
        n_head_kv=fields.get("llama.attention.head_count_kv", heads),
        n_ff=fields["llama.feed_forward_length"],
        n_ctx=fields["llama.context_length"],
        rope_base=fields.get("llama.rope.freq_base", 10000.0),
        norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
    )
    model = Llama(config)
    weights = {
        tensor.name: torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in reader.tensors
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"{path} is not a plain llama with tied embeddings: {error}") from error
    return model
