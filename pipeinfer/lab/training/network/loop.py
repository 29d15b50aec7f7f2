"""Training of a network: one budget, one checkpoint.

The budget is wall-clock minutes or a number of steps; either way the learning rate follows a
cosine of the spent fraction down to one percent, so a run always anneals fully. Batches are a
pure function of (seed, step), so with a budget in steps a resumed run equals an unbroken one.

Does not know: data, GGUF, the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from pipeinfer.host import multiplies_bfloat16
from pipeinfer.lab.training.minimise import Objective, Progress, Schedule, minimise
from pipeinfer.lab.training.network.checkpoint import load_state, save_state
from pipeinfer.lab.training.network.optim import make_optimizers


@dataclass(frozen=True, slots=True)
class Plan(Schedule):
    """How to train; exactly one of ``minutes`` and ``steps`` is set."""

    warmup_steps: int = 40
    cosine: bool = True
    batch_tokens: int = 4096
    seed: int = 0
    matrix_lr: float = 0.015
    other_lr: float = 5e-3
    #: where the processor multiplies it in hardware; elsewhere float32 is several times as fast
    bfloat16: bool = field(default_factory=multiplies_bfloat16)

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")


def optimise(
    model: nn.Module,
    plan: Plan,
    checkpoint: Path,
    objective: Objective,
    *,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
) -> Progress:
    """Minimise an objective until the budget is spent, resuming from ``checkpoint``.

    model: has a ``config`` with ``to_dict``; on return it holds the trained weights.
    stop_after: leave after that many further steps with the checkpoint written, as an interruption
    would.
    """
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
