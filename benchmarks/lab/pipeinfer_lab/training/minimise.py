"""The training loop of every command: an objective, a schedule, optimizers.

Does not know: models, data, files, the command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeinfer_lab.training.commands import time_left

#: (step, spent fraction of the budget) -> parts of the step's loss, which are added up, and the
#: tokens read for each. A part's graph is freed before the next part is computed.
Objective = Callable[[int, float], Iterable[tuple[Tensor, int]]]

REPORT_SECONDS = 10.0
SAVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """A budget in minutes or steps, and a learning rate that rises over `warmup_steps` and falls
    over the budget: linearly to 0, or along a cosine to one percent."""

    minutes: float | None = None
    steps: int | None = None
    warmup_steps: int = 1
    cosine: bool = False

    def spent(self, progress: Progress) -> float:
        """Fraction of the budget, 0 .. 1."""
        if self.steps is not None:
            return min(1.0, progress.step / self.steps)
        assert self.minutes is not None
        return min(1.0, progress.seconds / (60 * self.minutes))

    def rate_at(self, spent: float, step: int) -> float:
        """Learning rate as a fraction of the highest one."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        if not self.cosine:
            return warm * (1 - spent)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * spent)))


@dataclass(slots=True)
class Progress:
    """What a run has spent and reached. loss: smoothed over about 20 steps."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss


def adamw(parameters: Iterable[Tensor], rate: float, *, fused: bool | None = None
          ) -> torch.optim.Optimizer:
    """The optimizer of everything but Muon's matrices."""
    return torch.optim.AdamW(parameters, rate, (0.9, 0.95), weight_decay=0.0, fused=fused)


def minimise(
    objective: Objective,
    schedule: Schedule,
    optimizers: Sequence[torch.optim.Optimizer],
    learnt: Sequence[Sequence[Tensor]],
    *,
    progress: Progress | None = None,
    losses: list[float] | None = None,
    save: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
    interruptible: bool = False,
) -> list[float]:
    """Take steps until the budget is spent; a pure objective makes a resumed run with a budget in
    steps equal an unbroken one.

    optimizers: each rate that they were made with is the highest one.
    learnt: groups of parameters; the gradients of a group are clipped to norm 1 together.
    progress, losses: of a run to go on with; changed in place.
    save: called now and then, and at the end.
    stop_after: leave after so many further steps, as an interruption would.
    interruptible: an interrupt (Ctrl-C) ends the run in order, in the middle of a step.
    Returns the loss of every step.
    """
    progress = Progress() if progress is None else progress
    losses = [] if losses is None else losses
    first, begun = progress.step, schedule.spent(progress)
    start = reported = saved = time.monotonic()
    tokens_then = progress.tokens
    while (spent := schedule.spent(progress)) < 1 and progress.step - first != stop_after:
        started = time.monotonic()
        try:
            loss, tokens = _gradients(objective(progress.step, spent))
        except KeyboardInterrupt:
            if not interruptible:
                raise
            report(f"interrupted after step {progress.step} of {schedule.steps}")
            break
        _step(optimizers, learnt, schedule.rate_at(spent, progress.step))
        losses.append(loss)
        now = time.monotonic()
        progress.add(loss, tokens, now - started)
        spent = schedule.spent(progress)
        if now - reported >= REPORT_SECONDS or spent == 1:
            speed = (progress.tokens - tokens_then) / max(now - reported, 1e-9)
            left = (now - start) / (spent - begun) * (1 - spent)
            report(f"step {progress.step}  {spent:.1%}  loss {progress.loss:.3f}  "
                   f"{speed:.0f} tokens/s  {time_left(left)}")
            reported, tokens_then = now, progress.tokens
        if now - saved >= SAVE_SECONDS:
            save()
            saved = now
    save()
    return losses


def _gradients(parts: Iterable[tuple[Tensor, int]]) -> tuple[float, int]:
    """Loss and tokens of a step, whose gradients are added up."""
    total, count = 0.0, 0
    for loss, tokens in parts:
        loss.backward()
        total += float(loss.detach())
        count += tokens
    return total, count


def _step(optimizers: Sequence[torch.optim.Optimizer], learnt: Sequence[Sequence[Tensor]],
          rate: float) -> None:
    """Apply the gradients. rate: a fraction of each optimizer's own."""
    for parameters in learnt:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
