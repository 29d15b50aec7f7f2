"""The head in torch: llama.cpp's graph of the architecture `eagle3`, position by position.

At position p it reads the token of position p + 1 and the hidden row of position p, and returns a
row from which the token of position p + 2 follows. The row is also the hidden row of the next
position where the target has not computed one.

Independent of training, files and the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeinfer.lab.training.network.model import LlamaConfig, rope_tables, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a head. taps: layers of the target whose input rows it reads; the others are as
    in `LlamaConfig`."""

    taps: tuple[int, ...]
    n_vocab: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_ctx: int
    rope_base: float
    norm_eps: float

    @property
    def head_size(self) -> int:
        """The width of one attention head."""
        return self.n_embd // self.n_head

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for a checkpoint."""
        return asdict(self) | {"taps": list(self.taps)}


def shape_for(target: LlamaConfig, taps: tuple[int, ...], n_ff: int = 0) -> HeadShape:
    """Return the shape of a head with the target's heads; n_ff: 0: as wide as the target's."""
    return HeadShape(taps, target.n_vocab, target.n_embd, target.n_head, target.n_head_kv,
                     n_ff or target.n_ff, target.n_ctx, target.rope_base, target.norm_eps)


def usual_taps(layers: int) -> tuple[int, int, int]:
    """Return the layers that EAGLE-3 reads: a low one, the middle one and a high one."""
    return min(2, layers - 3), layers // 2, layers - 3


def _as_it_is(matrix: Tensor) -> Tensor:
    return matrix


class EagleHead(nn.Module):
    """The head's own weights. Embedding and output matrix are the target's, and passed in.

    quantise: applied to every matrix before it is used; what training for a quantised file sets
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, wide, eps = shape.n_embd, len(shape.taps) * shape.n_embd, shape.norm_eps
        kv_width = shape.n_head_kv * shape.head_size
        self.config = shape
        self.quantise: Callable[[Tensor], Tensor] = _as_it_is
        self._quantised: dict[nn.Linear, Tensor] = {}
        self.enc_norm = nn.RMSNorm(wide, eps=eps)
        self.fc = nn.Linear(wide, width, bias=False)
        self.attn_norm = nn.RMSNorm(width, eps=eps)
        self.attn_norm_2 = nn.RMSNorm(width, eps=eps)
        self.attn_q = nn.Linear(2 * width, width, bias=False)
        self.attn_k = nn.Linear(2 * width, kv_width, bias=False)
        self.attn_v = nn.Linear(2 * width, kv_width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=eps)
        self.ffn_gate = nn.Linear(width, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(width, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, width, bias=False)
        self.output_norm = nn.RMSNorm(width, eps=eps)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the hidden rows [..., width] of the tapped rows [..., taps * width].

        The matrices are quantised here, once for all steps of the chain that follow.
        """
        self._quantised = {part: self.quantise(part.weight) for part in self.matrices().values()}
        return self._apply_to(self.fc, self.enc_norm(rows)).float()

    def unroll(self, tokens: Tensor, hidden: Tensor, depths: int) -> Iterator[Tensor]:
        """Yield the rows of the 1st, 2nd, ... step of the chain that ends at each position.

        tokens: [batch, length, width], embeddings of the tokens of positions 1, 2, ...
        hidden: [batch, length, width], rows of positions 0, 1, ... from `encode`.
        Step d (from 0) at position p follows d steps at the positions before it; it attends to what
        was computed from the target's rows up to position p - d, and to those steps. Rows at
        positions before d mean nothing.
        """
        length = hidden.shape[1]
        cos, sin = (one.to(hidden.device) for one in rope_tables_of(self.config, length))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(depths):
            q, k, v = self._project(tokens, hidden, cos, sin)
            keys.append(k)
            values.append(v)
            hidden = self._finish(hidden, _attend(q, keys, values))
            yield hidden
            if depth + 1 < depths:
                hidden = _later(hidden, 1, 1)

    def logits(self, rows: Tensor, output: Tensor) -> Tensor:
        """Return the logits [..., n] of rows [..., width]; output: [n, width]."""
        return F.linear(self.output_norm(rows), output)

    def matrices(self) -> dict[str, nn.Linear]:
        """Return the matrices by name."""
        return {name: part for name, part in self.named_children() if isinstance(part, nn.Linear)}

    def _apply_to(self, matrix: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self._quantised[matrix])

    def _project(self, tokens: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
                 ) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = (-1, self.config.head_size), self.config.n_head // self.config.n_head_kv
        x = torch.cat((self.attn_norm(tokens), self.attn_norm_2(hidden)), -1)
        q = rotate(self._apply_to(self.attn_q, x).unflatten(-1, heads), cos, sin).transpose(1, 2)
        k = rotate(self._apply_to(self.attn_k, x).unflatten(-1, heads), cos, sin).transpose(1, 2)
        v = self._apply_to(self.attn_v, x).unflatten(-1, heads).transpose(1, 2)
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        x = hidden + self._apply_to(self.attn_output, attended.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        inner = F.silu(self._apply_to(self.ffn_gate, h)) * self._apply_to(self.ffn_up, h)
        return x + self._apply_to(self.ffn_down, inner)


def rope_tables_of(shape: HeadShape, length: int) -> tuple[Tensor, Tensor]:
    """Return the tables of `rope_tables` for a head."""
    return rope_tables(LlamaConfig(n_embd=shape.n_embd, n_head=shape.n_head,
                                   rope_base=shape.rope_base), length)


def _later(x: Tensor, by: int, dim: int) -> Tensor:
    """Move [..., length, ...] to later positions; zeros come first."""
    if by == 0:
        return x
    shape = list(x.shape)
    shape[dim] = by
    return torch.cat((x.new_zeros(shape), x.narrow(dim, 0, x.shape[dim] - by)), dim)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last step. keys, values: of each step so far, [batch, heads, length, size].

    Of the first step, which read the target's rows, it sees all positions up to its own less the
    number of later steps; of each later one the position that belongs to its own chain.
    """
    last, length = len(keys) - 1, q.shape[2]
    if last == 0:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    ones = torch.ones(length, length, dtype=torch.bool)
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys[0].transpose(-1, -2)).float() * scale
    # positions before `last` have no chain; they see position 0, so that no row is empty
    hidden_from = ones.triu(1 - last)
    hidden_from[:last, 0] = False
    scores = scores.masked_fill(hidden_from, float("-inf"))
    own = [(_later(keys[i], last - i, 2), _later(values[i], last - i, 2))
           for i in range(1, last + 1)]
    chain = [(q * k).sum(-1, keepdim=True).float() * scale for k, _ in own]
    weights = torch.cat((scores, *chain), -1).softmax(-1).to(q.dtype)
    found = weights[..., :length] @ values[0]
    for i, (_, v) in enumerate(own):
        found = found + weights[..., length + i : length + i + 1] * v
    return found
