"""A model with frozen weights whose attention is told from outside what rows see.

Layers are transformers' own, for every family that the torch backend takes. Does not know: what is
learnt around the model, cells, runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from pipeinfer.backends.pytorch.weights import Shard, load_shard

_HOOKED = "pipeinfer_bita"  #: the name under which transformers knows `_attend`


@dataclass(frozen=True, slots=True)
class How:
    """What a layer asks of attention: scaling of scores, soft cap, and window (a row sees rows less
    than so many positions before it)."""

    scaling: float
    softcap: float | None = None
    window: int | None = None


#: what a layer's attention does: (layer, query, key, value [b, heads, n, d], how) -> output
Hook = Callable[[int, Tensor, Tensor, Tensor, How], Tensor]


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
            scaling: float, dropout: float = 0.0, *, hook: Hook, softcap: float | None = None,
            sliding_window: int | None = None, **_: Any) -> tuple[Tensor, None]:
    del attention_mask, dropout
    how = How(scaling, softcap, sliding_window)
    return hook(module.layer_idx, query, key, value, how).transpose(1, 2), None


AttentionInterface.register(_HOOKED, _attend)


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, how: How) -> Tensor:
    """What rows [b, heads, n, d] read of those that they see (bool[..., n, m])."""
    key, value = repeat(key, query.shape[1]), repeat(value, query.shape[1])
    if how.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=how.scaling)
    scores = torch.matmul(query, key.transpose(2, 3)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)


class Frozen:
    """A whole model whose attention is told from outside what rows see."""

    def __init__(self, shard: Shard) -> None:
        shard.config._attn_implementation = _HOOKED
        self.shard, self.layers = shard, len(shard.decoder)

    @property
    def device(self) -> Any:
        """Where its weights are."""
        return self.shard.norm.weight.device

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
    rows that follow. starts: the column at which each row begins, int[b] (None: the first)."""

    def __init__(self, starts: Tensor | None = None) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._starts = starts

    def hook(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Return the attention of a layer over the stored and the new keys and values."""
        if layer in self.kept:
            key, value = (torch.cat(pair, 2) for pair in zip(self.kept[layer], (key, value),
                                                             strict=True))
        self.kept[layer] = key, value
        n, m = query.shape[2], key.shape[2]
        columns = torch.arange(m, device=query.device)
        rows = columns[m - n :, None]
        seen = columns <= rows
        if how.window is not None:
            seen = seen & (rows - columns < how.window)
        if self._starts is not None:  # what stands before the beginning sees itself
            seen = seen & (columns >= self._starts[:, None, None, None]) | (columns == rows)
        return attention(query, key, value, seen, how)


@torch.no_grad()
def continue_greedily(model: Frozen, starts: Tensor, count: int, *,
                      ends: Sequence[int] = (), begins: Tensor | None = None) -> Tensor:
    """Samples [b, n + count]: `starts` [b, n] and the model's own greedy continuation.

    begins: the column at which each row's text begins (None: the first). ends: tokens that end an
    answer; when all have ended the samples are shorter.
    """
    contexts, tokens, begin = Contexts(begins), starts, 0
    shift = torch.zeros(len(starts), 1, dtype=torch.int64, device=starts.device) \
        if begins is None else begins[:, None]
    over = torch.zeros(len(starts), dtype=torch.bool, device=starts.device)
    last = torch.tensor(list(ends), dtype=torch.int64, device=starts.device)
    for _ in range(count):
        positions = torch.arange(begin, tokens.shape[1], device=starts.device) - shift
        stream = model.run(model.embed(tokens[:, begin:]), positions.clamp_min(0), contexts.hook)
        begin = tokens.shape[1]
        tokens = torch.cat([tokens, model.logits(stream[:, -1:]).argmax(-1)], 1)
        over |= torch.isin(tokens[:, -1], last)
        if ends and bool(over.all()):
            break
    return tokens


def load_frozen(path: Path, threads: int, device: str = "cpu", dtype: Any = torch.float32
                ) -> Frozen:
    """The model of a GGUF file or folder."""
    torch.set_num_threads(threads)
    return Frozen(load_shard(path, None, dtype, torch.device(device)))
