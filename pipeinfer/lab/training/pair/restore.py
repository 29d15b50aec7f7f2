"""Reads a model to go on training: a checkpoint with its tokenizer beside it, or a GGUF file.

Does not know: what the model is for, how it is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import torch

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.pair.checkpoint import load_state
from pipeinfer.lab.training.pair.model import Llama, LlamaConfig
from pipeinfer.lab.training.pair.tokenizer import load
from pipeinfer.lab.training.tasks.markup import Codec

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def restore(path: Path) -> tuple[Llama, Codec]:
    """Model and codec; ModelError where the file is no small llama with its own tokenizer."""
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.suffix == ".gguf":
        return _from_gguf(path)
    words = path.with_name("tokenizer.json")
    if not words.exists():
        raise ModelError(f"{path} has no tokenizer.json beside it")
    return load_model(path), Codec(load(words))


def load_model(path: Path) -> Llama:
    """The model of a checkpoint of :func:`pipeinfer.lab.training.pair.loop.optimise`."""
    state = load_state(path)
    model = Llama(LlamaConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model


def _from_gguf(path: Path) -> tuple[Llama, Codec]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{path} is not a llama model; only the embedded kind can be trained here")
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
    return model, Codec(_tokenizer(fields))


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the header describes: merges, control and user-defined tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    control, defined = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (control, defined):
            special = kind == control
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer
