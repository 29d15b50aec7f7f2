"""A model that somebody has, as it is trained: transformers' layers under any mask.

Knows no data, optimizers or files of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeinfer.backends.pytorch.options import TorchOptions
from pipeinfer.backends.pytorch.weights import load_shard
from pipeinfer.host import multiplies_bfloat16
from pipeinfer_lab.training.adapt.lora import LoraSettings, NewTokens, add_lora
from pipeinfer_lab.training.bita.frozen import Frozen, How, attention
from pipeinfer_lab.training.pasta.pasta import IGNORE
from pipeinfer_lab.training.tasks.batches import Batch


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where and in what numbers is computed. weights: type of those that stay as they are;
    bfloat16: products of matrices are made in it, what is learnt stays float32."""

    device: str
    weights: Any
    bfloat16: bool

    @classmethod
    def of(cls, device: str, dtype: str, *, all_weights: bool = False) -> Arithmetic:
        """auto: a GPU that torch sees, and bfloat16 where the processor multiplies it; on GPUs
        frozen weights are stored in it, too. Raises UsageError for a GPU that is not there."""
        where = TorchOptions(device, "float32").resolved(torch.cuda.is_available()).device
        gpu = where.startswith("cuda")
        fast = gpu or multiplies_bfloat16()
        bfloat16 = dtype == "bfloat16" or (dtype == "auto" and fast)
        small = bfloat16 and gpu and not all_weights
        return cls(where, torch.bfloat16 if small else torch.float32, bfloat16)

    def autocast(self) -> Any:
        """The context in which products are made."""
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=self.bfloat16)


class Trainee:
    """A model and what is learnt of it, by name in `learnt`."""

    def __init__(self, path: Path, arithmetic: Arithmetic, lora: LoraSettings | None, *,
                 seed: int = 0) -> None:
        """lora: None learns all weights."""
        self.arithmetic, self.lora = arithmetic, lora
        device = torch.device(arithmetic.device)
        self.model = Frozen(load_shard(path, None, arithmetic.weights, device))
        self.tokens: NewTokens | None = None
        shard = self.model.shard
        if lora is not None:
            self.learnt: dict[str, nn.Parameter] = add_lora(shard.decoder, lora, seed)
        else:
            self.learnt = dict(_names(shard))
            for parameter in self.learnt.values():
                parameter.requires_grad_(True)

    @property
    def context(self) -> int:
        """Positions that the model knows."""
        return int(self.model.shard.config.max_position_embeddings)

    def add_tokens(self, texts: Mapping[str, Sequence[int]], first: int) -> None:
        """Tokens with ids from `first`, each beginning as the mean of the tokens that write it."""
        shard = self.model.shard
        tied = shard.head.weight is shard.embed.weight
        rows = []
        for matrix in (shard.embed.weight, shard.head.weight)[: 1 if tied else 2]:
            means = [matrix[list(ids)].float().mean(0) for ids in texts.values()]
            rows.append(nn.Parameter(torch.stack(means)))
        self.tokens = NewTokens(tuple(texts), first, *rows)
        self.learnt |= dict(zip(("tokens.embedding", "tokens.head"), rows, strict=False))

    def states(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """The stream [b, n, n_embd] of rows that see what `visible` [b, n, n] says."""
        seen = visible[:, None]
        apart = positions[:, :, None] - positions[:, None, :]

        def hook(layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
            del layer
            near = seen if how.window is None else seen & (apart < how.window)[:, None]
            return attention(query, key, value, near, how)

        return self.model.run(self._embed(tokens), positions, hook)

    def logits(self, stream: Tensor) -> Tensor:
        """[..., n_embd] after the last layer -> [..., vocabulary]."""
        shard, new = self.model.shard, self.tokens
        if new is None:
            return self.model.logits(stream)
        normed = shard.norm(stream)
        old = shard.head(normed)
        rows = new.embedding if new.head is None else new.head
        more = F.linear(normed, rows.to(normed.dtype)).to(old.dtype)
        stop = new.first + len(rows)
        logits = torch.cat([old[..., : new.first], more, old[..., stop:]], -1)
        cap = shard.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def loss_sum(self, batch: Batch) -> Tensor:
        """Summed cross-entropy (nats) of a batch's targets."""
        return self._entropies(batch)[0].sum()

    def log_probabilities(self, batch: Batch) -> Tensor:
        """Summed log-probability (nats) of the targets of each row [batch]."""
        entropies, learnt = self._entropies(batch)
        rows = learnt.nonzero()[:, 0]
        return torch.zeros(len(learnt), device=entropies.device).index_add(0, rows, -entropies)

    def _entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every target, and where targets are: bool[batch, length]."""
        device = self.arithmetic.device
        targets = batch.targets.to(device)
        learnt = targets != IGNORE
        with self.arithmetic.autocast():
            stream = self.states(batch.tokens.to(device), batch.positions.to(device),
                                 batch.visible.to(device))
            logits = self.logits(stream[learnt])
        return F.cross_entropy(logits.float(), targets[learnt], reduction="none"), learnt

    def _embed(self, tokens: Tensor) -> Tensor:
        embed, new = self.model.shard.embed, self.tokens
        if new is None:
            return self.model.embed(tokens)
        count = len(new.embedding)
        ours = (tokens >= new.first) & (tokens < new.first + count)
        old = embed(tokens.masked_fill(ours, 0))
        scale = getattr(embed, "embed_scale", None)
        rows = new.embedding if scale is None else new.embedding * scale
        mine = F.embedding((tokens - new.first).clamp(0, count - 1), rows).to(old.dtype)
        return torch.where(ours[..., None], mine, old)


def _names(shard: Any) -> list[tuple[str, nn.Parameter]]:
    """All weights by their Hugging Face names; a tied head is the embedding."""
    parts = [(f"model.layers.{i}", layer) for i, layer in enumerate(shard.decoder)]
    parts += [("model.embed_tokens", shard.embed), ("model.norm", shard.norm)]
    if shard.head.weight is not shard.embed.weight:
        parts.append(("lm_head", shard.head))
    return [(f"{prefix}.{name}", parameter) for prefix, module in parts
            for name, parameter in module.named_parameters()]
