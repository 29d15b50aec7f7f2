"""A plain llama in torch, small enough to train on two cores.

Rotary embeddings turn neighbouring pairs ``(x[2i], x[2i+1])``, as ggml's ``llama`` architecture
does, so that query and key rows need no permutation on export. Embedding and output share one
matrix; there are no biases.

Does not know: tokenizers, files, training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a model; ``n_embd == n_head * head_size``."""

    n_vocab: int = 4096
    n_layer: int = 12
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 768
    n_ctx: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    def to_dict(self) -> dict[str, int | float]:
        """The fields as plain values, for a checkpoint."""
        return asdict(self)


def rope_tables(config: LlamaConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_size / 2] (float32) of positions 0 .. length - 1."""
    half = config.head_size // 2
    frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the neighbouring pairs of ``x`` [batch, length, heads, head_size]; ``cos`` and ``sin``
    are [length, head_size / 2], or [batch, length, head_size / 2] where rows differ."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each with its norm and residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, kv_width = config.n_embd, config.n_head_kv * config.head_size
        self.config = config
        self.attn_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, kv_width, bias=False)
        self.attn_v = nn.Linear(width, kv_width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.ffn_gate = nn.Linear(width, config.n_ff, bias=False)
        self.ffn_up = nn.Linear(width, config.n_ff, bias=False)
        self.ffn_down = nn.Linear(config.n_ff, width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values repeated for every query head, [batch, heads, length,
        head_size], of ``x`` [batch, length, width]."""
        heads = (-1, self.config.head_size)
        h = self.attn_norm(x)
        q = rotate(self.attn_q(h).unflatten(-1, heads), cos, sin).transpose(1, 2)
        k = rotate(self.attn_k(h).unflatten(-1, heads), cos, sin).transpose(1, 2)
        v = self.attn_v(h).unflatten(-1, heads).transpose(1, 2)
        groups = self.config.n_head // self.config.n_head_kv
        if groups == 1:
            return q, k, v
        # Repeating is cheaper than enable_gqa on CPU, whose fused kernel does not take groups.
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from what the heads read [batch, heads, length, head_size]."""
        x = x + self.attn_output(attended.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [batch, length, width] -> the same shape; causal."""
        q, k, v = self.project(x, cos, sin)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Llama(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        cos, sin = rope_tables(config, config.n_ctx)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position; positions count from 0 in every row."""
        length = tokens.shape[1]
        return self.logits(self.hidden(tokens, self.cos[:length], self.sin[:length]))

    def hidden(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Final states, before the output matrix."""
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, cos, sin)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of final states [..., width]."""
        return F.linear(self.output_norm(states), self.token_embd.weight)

    def parameter_count(self) -> int:
        """Number of weights (the shared embedding counted once)."""
        return sum(parameter.numel() for parameter in self.parameters())


def spread(layers: int, count: int) -> list[int]:
    """Which of the target's layers a draft of so many keeps: first, last and evenly between."""
    if layers == 1:
        return [0]
    return [k * (count - 1) // (layers - 1) for k in range(layers)]


def thinned(target: Llama, layers: Sequence[int]) -> Llama:
    """A copy of the target with these of its layers alone; its embedding and final norm."""
    draft = Llama(replace(target.config, n_layer=len(layers)))
    weights, own = target.state_dict(), draft.state_dict()
    for name in own:
        source = name
        if name.startswith("blk."):
            _, k, rest = name.split(".", 2)
            source = f"blk.{layers[int(k)]}.{rest}"
        own[name].copy_(weights[source])
    return draft
