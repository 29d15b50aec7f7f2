"""A model with frozen weights whose attention is told from outside what rows see.

Layers are transformers' own, for every family that the torch backend takes. Does not know: what is
learnt around the model, cells, runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from pipeinfer.backends.pytorch.weights import Shard, load_shard

_HOOKED = "pipeinfer_bita"  #: the name under which transformers knows `_attend`
#: what a layer's attention does: (layer, query, key, value [b, heads, n, d], scaling) -> output
Hook = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
            scaling: float, dropout: float = 0.0, *, hook: Hook, **_: Any) -> tuple[Tensor, None]:
    del attention_mask, dropout
    return hook(module.layer_idx, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(_HOOKED, _attend)


class Frozen:
    """A whole model whose attention is told from outside what rows see."""

    def __init__(self, shard: Shard) -> None:
        if shard.soft_cap is not None or getattr(shard.config, "attn_logit_softcapping", None):
            raise ValueError("models with soft caps are not supported yet")
        shard.config._attn_implementation = _HOOKED
        self.shard, self.layers = shard, len(shard.decoder)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding of tokens: [b, n] -> [b, n, n_embd]."""
        return self.shard.embedding(tokens)

    def run(self, stream: Tensor, positions: Tensor, hook: Hook) -> Tensor:
        """The stream [b, n, n_embd] after all layers; positions [b, n]."""
        angles = self.shard.angles(stream, positions)
        for layer, angle in zip(self.shard.decoder, angles, strict=True):
            out = layer(stream, attention_mask=None, position_ids=positions,
                        position_embeddings=angle, hook=hook)
            stream = out[0] if isinstance(out, tuple) else out
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        """[b, n, n_embd] -> [b, n, n_vocab]."""
        return self.shard.logits(stream)


def repeat(x: Tensor, heads: int) -> Tensor:
    """Keys or values [b, kv heads, n, d] for as many heads as queries have."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class Contexts:
    """Causal attention that keeps keys and values per layer; `hook` may be called again with the
    rows that follow."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def hook(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
             ) -> Tensor:
        """See `Hook`."""
        if layer in self.kept:
            key, value = (torch.cat(pair, 2) for pair in zip(self.kept[layer], (key, value),
                                                             strict=True))
        self.kept[layer] = key, value
        n, heads = query.shape[2], query.shape[1]
        seen = torch.ones(n, key.shape[2], dtype=torch.bool).tril(key.shape[2] - n)
        return F.scaled_dot_product_attention(query, repeat(key, heads), repeat(value, heads),
                                              attn_mask=seen, scale=scaling)


@torch.no_grad()
def continue_greedily(model: Frozen, starts: Tensor, count: int) -> Tensor:
    """Samples [b, n + count]: `starts` [b, n] and the model's own greedy continuation."""
    contexts, tokens, begin = Contexts(), starts, 0
    for _ in range(count):
        positions = torch.arange(begin, tokens.shape[1]).expand(len(tokens), -1)
        stream = model.run(model.embed(tokens[:, begin:]), positions, contexts.hook)
        begin = tokens.shape[1]
        tokens = torch.cat([tokens, model.logits(stream[:, -1:]).argmax(-1)], 1)
    return tokens


def load_frozen(path: Path, threads: int) -> Frozen:
    """The model of a GGUF file or folder, in float32."""
    torch.set_num_threads(threads)
    return Frozen(load_shard(path, None, torch.float32, torch.device("cpu")))
