"""Batches of generated examples: drawn by (seed, step), padded, and their loss.

Does not know: optimizers, checkpoints, the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeinfer.lab.training.minimise import Objective
from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pair.tokenizer import END_OF_TEXT_ID, PAD_ID
from pipeinfer.lab.training.pasta.pasta import IGNORE
from pipeinfer.lab.training.tasks import formats, tasks
from pipeinfer.lab.training.tasks.formats import Example
from pipeinfer.lab.training.tasks.markup import Codec
from pipeinfer.lab.training.tasks.tasks import Task

#: (spent fraction up to which it holds, share of examples that are drills).
DRILLS = ((0.15, 0.5), (0.4, 0.2))
DRILL_TOKENS = 120

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
    tokens, positions = np.full(shape, PAD_ID), np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, IGNORE)
    visible = np.zeros((*shape, length), dtype=bool)
    visible[:, np.arange(length), np.arange(length)] = True
    for row, example in enumerate(examples):
        count = len(example.tokens)
        tokens[row, :count], positions[row, :count] = example.tokens, example.positions
        targets[row, :count] = example.targets
        visible[row, :count, :count] = example.visible
    return Batch(*map(torch.from_numpy, (tokens, positions, targets, visible)))


def chosen(rows: Sequence[_Row], batch: int, seed: int, step: int, *, whole: bool = False
           ) -> list[_Row]:
    """The rows of a step: every epoch visits each once, in an order of its own. whole: no batch
    has rows of two epochs, and an epoch's last rows are left out if they are less than a batch."""
    size = min(batch, len(rows))
    length = len(rows) // size * size if whole else len(rows)
    found: list[_Row] = []
    for at in range(step * size, (step + 1) * size):
        epoch, index = divmod(at, length)
        order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        found.append(rows[order[index]])
    return found


def draw(
    codec: Codec, seed: int, step: int, budget: int, level: float, drills: float = 0.0, *,
    one_each: bool = False
) -> list[list[Example]]:
    """The examples of one step, about ``budget`` tokens, in groups of similar length; a share of
    ``drills`` only look facts up. one_each: see `formats.make`."""
    rng = np.random.default_rng([seed, step])
    source = tasks.stream([seed, step, 1], level=level)
    examples: list[Example] = []
    tokens = 0
    while tokens < budget:
        task = next(source)
        if task.kind != "plans" and rng.random() < drills:
            examples.append(drill(codec, task, rng))
        else:
            examples.append(formats.make(codec, task, rng, one_each=one_each))
        tokens += len(examples[-1].tokens)
    examples.sort(key=lambda example: len(example.tokens))
    groups = 3 if len(examples) >= 9 else 1
    edges = np.linspace(0, len(examples), groups + 1).round().astype(int)
    return [examples[a:b] for a, b in pairwise(edges)]


def drill(codec: Codec, task: Task, rng: np.random.Generator) -> Example:
    """The facts of a task, read once, and then asked for by name and copied, in random orders.

    Nearly every token teaches to look something up, against one in six of an answer: without
    drills the first thousand steps learn nothing but the sentences' frame.
    """
    lines = [f"{line}\n" for line in task.question.splitlines()[1:-1]]
    ids = [END_OF_TEXT_ID, *codec.encode("".join(lines))]
    targets = formats.nothing(ids)
    while lines and len(ids) < DRILL_TOKENS:
        order = [lines[at] for at in rng.permutation(len(lines))]
        names = [line.split(" ", 1)[0] for line in order]
        head, rest = codec.encode(f"of {tasks.join(names)}.\n"), codec.encode("".join(order))
        ids += [*head, *rest]
        targets += [*formats.nothing(head[1:]), *rest, IGNORE]
    tree = formats.Tree()
    tree.add(ids, 0, (), targets)
    return tree.example()


def loss_sum(model: Llama, batch: Batch, *, bfloat16: bool) -> tuple[Tensor, int]:
    """Summed cross-entropy (nats) of a batch and the number of its targets."""
    logits, learnt = _logits(model, batch, bfloat16)
    return F.cross_entropy(logits, batch.targets[learnt], reduction="sum"), int(learnt.sum())


def log_probabilities(model: Llama, batch: Batch, *, bfloat16: bool = False) -> Tensor:
    """Summed log-probability (nats) of the targets of each row [batch]."""
    logits, learnt = _logits(model, batch, bfloat16)
    picked = -F.cross_entropy(logits, batch.targets[learnt], reduction="none")
    rows = learnt.nonzero()[:, 0]
    return torch.zeros(len(batch.tokens)).index_add(0, rows, picked)


def _logits(model: Llama, batch: Batch, bfloat16: bool) -> tuple[Tensor, Tensor]:
    """float32[n, vocabulary] of the n targets, and where targets are: bool[batch, length]."""
    learnt = batch.targets != IGNORE
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        states = model.masked(batch.tokens, batch.positions, batch.visible)
        return model.logits(states[learnt]).float(), learnt


def objective(
    model: Llama, codec: Codec, seed: int, budget: int, *, ramp: float, bfloat16: bool,
    one_each: bool = False
) -> Objective:
    """What :func:`pipeinfer.lab.training.pair.loop.optimise` minimises: mean nats per target.

    Tasks stay small for a third of ``ramp``, reach full size at it, and drills fade out:
    looking facts up is learnt much sooner in short lists. Without a ramp, for a model that knows
    how, they are of full size and no drills. one_each: see `formats.make`.
    """

    def run(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:
        level = min(1.0, max(0.0, spent - ramp / 3) / (ramp * 2 / 3)) if ramp else 1.0
        drills = next((share for until, share in DRILLS if ramp and spent < until), 0.0)
        groups = draw(codec, seed, step, budget, level, drills, one_each=one_each)
        count = sum(int((e.targets != IGNORE).sum()) for group in groups for e in group)
        for group in groups:
            loss, _ = loss_sum(model, collate(group), bfloat16=bfloat16)
            yield loss / count, sum(len(e.tokens) for e in group)

    return run
