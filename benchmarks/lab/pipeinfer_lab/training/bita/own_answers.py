"""What BiTA learns from: texts whose beginnings are given and whose rest the model writes itself.

The paper's are answers to instructions. Prompts of different lengths are answered together, aligned
at their ends. Does not know: masks, prompts that are learnt, the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeinfer.errors import ModelError
from pipeinfer_lab.training.bita.frozen import Frozen, continue_greedily


@dataclass(frozen=True, slots=True)
class Samples:
    """tokens: int64[count, n]. given: how many of each are not the model's own; length: how many
    there are, what follows is padding; both int64[count]."""

    tokens: Tensor
    given: Tensor
    length: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, which: Any) -> Samples:
        """Some of them, on the same device."""
        return Samples(self.tokens[which], self.given[which], self.length[which])

    def to(self, device: Any) -> Samples:
        """The same on another device."""
        return Samples(*(part.to(device) for part in (self.tokens, self.given, self.length)))


def even(tokens: Tensor, given: int) -> Samples:
    """Samples that fill their rows, of which the first `given` tokens are given."""
    count, n = tokens.shape
    return Samples(tokens, torch.full((count,), given), torch.full((count,), n))


def answered(model: Frozen, prompts: Sequence[Sequence[int]], *, tokens: int, least: int,
             ends: Sequence[int], path: Path, autocast: Callable[[], Any],
             report: Callable[[str], None], batch: int = 32) -> Samples:
    """The model's greedy answers to prompts of at most `tokens` tokens, both together; answers of
    fewer than `least` tokens are left out. Kept at `path`, where another run goes on.

    Raises ModelError where nothing is left.
    """
    wanted = [prompt for prompt in prompts if len(prompt) + least <= tokens]
    rows = np.zeros((0, tokens + 2), np.int32)  # given, length, tokens
    if path.exists():
        rows = np.load(path, allow_pickle=False)
    while len(rows) < len(wanted):
        some = wanted[len(rows) : len(rows) + batch]
        with autocast():
            more = _answer(model, some, tokens, ends)
        rows = np.concatenate([rows, more])
        np.save(path.with_suffix(".partial.npy"), rows)
        os.replace(path.with_suffix(".partial.npy"), path)
        report(f"{len(rows)} of {len(wanted)} answers")
    kept = rows[: len(wanted)]
    kept = torch.from_numpy(kept[kept[:, 1] - kept[:, 0] >= least].astype(np.int64))
    if not len(kept):
        raise ModelError(f"no prompt with an answer of {least} tokens fits into {tokens} tokens: "
                         "raise --tokens")
    return Samples(kept[:, 2:], kept[:, 0], kept[:, 1])


def _answer(model: Frozen, prompts: Sequence[Sequence[int]], tokens: int, ends: Sequence[int]
            ) -> Any:
    longest = max(map(len, prompts))
    starts = np.zeros((len(prompts), longest), np.int64)
    for line, prompt in zip(starts, prompts, strict=True):
        line[longest - len(prompt) :] = prompt
    begins = torch.tensor([longest - len(prompt) for prompt in prompts], device=model.device)
    shortest = min(map(len, prompts))
    made = continue_greedily(model, torch.from_numpy(starts).to(model.device), tokens - shortest,
                             ends=ends, begins=begins).cpu().numpy()
    rows = np.zeros((len(prompts), tokens + 2), np.int32)
    for row, text, prompt in zip(rows, made, prompts, strict=True):
        whole = text[longest - len(prompt) :][:tokens]
        over = np.flatnonzero(np.isin(whole[len(prompt) :], list(ends)))
        length = len(prompt) + int(over[0]) + 1 if len(over) else len(whole)
        row[0], row[1], row[2 : 2 + length] = len(prompt), length, whole[:length]
    return rows
