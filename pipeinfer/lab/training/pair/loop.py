"""Training of a Llama: one model, one token stream, one budget, one checkpoint.

The budget is wall-clock minutes or a number of steps; either way the learning rate follows a
cosine of the spent fraction down to one percent, so a run always anneals fully. Batches are a
pure function of (seed, step), so with a budget in steps a resumed run equals an unbroken one.

Does not know: where tokens come from, GGUF, the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeinfer.host import multiplies_bfloat16
from pipeinfer.lab.training.minimise import Objective, Progress, Schedule, minimise
from pipeinfer.lab.training.pair.checkpoint import load_state, save_state
from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pair.optim import make_optimizers

#: (spent fraction from which it holds, length of a training sequence). Long sequences come last:
#: they are dearer, and they only have to teach the late positions.
LENGTHS = ((0.0, 512), (0.75, 1024), (0.94, 2048))


@dataclass(frozen=True, slots=True)
class Plan(Schedule):
    """How to train; exactly one of ``minutes`` and ``steps`` is set."""

    warmup_steps: int = 40
    cosine: bool = True
    batch_tokens: int = 4096
    seed: int = 0
    matrix_lr: float = 0.015
    other_lr: float = 5e-3
    lengths: tuple[tuple[float, int], ...] = LENGTHS
    distil_weight: float = 0.7
    #: Spent fraction from which a teacher is asked; before it, text alone is twice as fast.
    teacher_from: float = 0.5
    #: where the processor multiplies it in hardware; elsewhere float32 is several times as fast
    bfloat16: bool = field(default_factory=multiplies_bfloat16)
    compile: bool = False

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")
        if any(self.batch_tokens % length for _, length in self.lengths):
            raise ValueError("every training length must divide batch_tokens")

    def length_at(self, spent: float) -> int:
        """Tokens per training sequence at this fraction of the budget."""
        return [length for start, length in self.lengths if spent >= start][-1]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run of a command; exactly one of ``minutes`` and ``steps`` is set."""

    out: Path
    work: Path
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    threads: int = 1
    plan: Plan = field(default_factory=lambda: Plan(steps=1))


def batch(stream: np.ndarray, plan: Plan, step: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens [batch, length] (int64) of one step: every epoch visits each piece of
    the stream once, in a new order and from a new offset."""
    rows = plan.batch_tokens // length
    pieces = (len(stream) - 1 - length) // length
    if pieces < rows:
        raise ValueError(f"the stream of {len(stream)} tokens is shorter than one batch")
    epoch, index = divmod(step, pieces // rows)
    generator = np.random.default_rng([plan.seed, length, epoch])
    offset = int(generator.integers(length))
    chosen = generator.permutation(pieces)[index * rows : (index + 1) * rows]
    block = np.stack([stream[offset + piece * length :][: length + 1] for piece in chosen])
    tokens = torch.from_numpy(block.astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Llama, plan: Plan, x: Tensor, y: Tensor, teacher: Llama | None) -> Tensor:
    """Mean cross-entropy (nats per token), mixed with a teacher's distribution if there is one."""
    with torch.autocast("cpu", torch.bfloat16, enabled=plan.bfloat16):
        logits = model(x)
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(x).flatten(0, 1).float().softmax(-1)
    logits = logits.flatten(0, 1).float()
    hard = F.cross_entropy(logits, y.flatten())
    if teacher is None:
        return hard
    soft = F.cross_entropy(logits, wanted)
    return plan.distil_weight * soft + (1 - plan.distil_weight) * hard


def train(
    model: Llama,
    stream: np.ndarray,
    plan: Plan,
    checkpoint: Path,
    *,
    teacher: Llama | None = None,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
) -> Progress:
    """Train on a token stream until the budget is spent, resuming from ``checkpoint``.

    ``stop_after`` leaves after that many further steps with the checkpoint written, as an
    interruption would. On return the model holds the trained weights.
    """
    if plan.compile:
        for network in (model, teacher):
            for block in network.blk if network is not None else ():
                block.compile(dynamic=False)

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:
        x, y = batch(stream, plan, step, plan.length_at(spent))
        asked = teacher if spent >= plan.teacher_from else None
        yield loss_of(model, plan, x, y, asked), x.numel()

    return optimise(model, plan, checkpoint, objective, report=report, stop_after=stop_after)


def optimise(
    model: nn.Module,
    plan: Plan,
    checkpoint: Path,
    objective: Objective,
    *,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
) -> Progress:
    """Minimise an objective, resuming from ``checkpoint``; see :func:`train` for the rest. The
    model has a ``config`` with ``to_dict``."""
    optimizers = make_optimizers(model, matrix_lr=plan.matrix_lr, other_lr=plan.other_lr)
    progress = _load(checkpoint, model, optimizers)
    model.train()
    minimise(
        objective,
        plan,
        optimizers,
        [list(model.parameters())],
        progress=progress,
        save=lambda: _save(checkpoint, model, optimizers, progress),
        report=report,
        stop_after=stop_after,
    )
    model.eval()
    return progress


def _save(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write a checkpoint whole or not at all."""
    state = {
        "config": model.config.to_dict(),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": [progress.step, progress.tokens, progress.seconds, progress.loss],
    }
    save_state(path, state)


def _load(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Restore a run, or begin one when there is no checkpoint."""
    if not path.exists():
        return Progress()
    state = load_state(path)
    if state["config"] != model.config.to_dict():
        raise ValueError(f"{path} holds another model shape; remove it or use another --work")
    model.load_state_dict(state["model"])
    for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(stored)
    return Progress(*state["progress"])
