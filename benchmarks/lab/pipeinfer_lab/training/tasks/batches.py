"""Batches of training rows: chosen by (seed, step), and padded.

Does not know: models, optimizers, checkpoints, the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeinfer_lab.training.pasta.pasta import IGNORE
from pipeinfer_lab.training.tasks.formats import Example

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Batch:
    """``tokens``, ``positions``, ``targets`` [batch, length] int64, ``visible`` [batch, length,
    length] bool; padding sees itself only and is seen by nobody."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    visible: Tensor


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples to the longest one."""
    length = max(len(example.tokens) for example in examples)
    shape = (len(examples), length)
    tokens, positions = np.zeros((2, *shape), dtype=np.int64)
    targets = np.full(shape, IGNORE)
    visible = np.zeros((*shape, length), dtype=bool)
    visible[:, np.arange(length), np.arange(length)] = True
    for row, example in enumerate(examples):
        count = len(example.tokens)
        tokens[row, :count], positions[row, :count] = example.tokens, example.positions
        targets[row, :count] = example.targets
        visible[row, :count, :count] = example.visible
    return Batch(*map(torch.from_numpy, (tokens, positions, targets, visible)))


def chosen(rows: Sequence[_Row], batch: int, seed: int, step: int) -> list[_Row]:
    """The rows of a step: every epoch visits each once, in an order of its own."""
    size = min(batch, len(rows))
    found: list[_Row] = []
    for at in range(step * size, (step + 1) * size):
        epoch, index = divmod(at, len(rows))
        order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        found.append(rows[order[index]])
    return found
