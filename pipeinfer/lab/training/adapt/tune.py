"""Learns rows: micro-batches, a falling rate, a checkpoint that resumes, and how long it takes.

Does not know: where rows come from, how models are stored.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.adapt.trainee import Trainee
from pipeinfer.lab.training.commands import time_left
from pipeinfer.lab.training.pair.checkpoint import load_state, save_state
from pipeinfer.lab.training.pasta.pasta import IGNORE
from pipeinfer.lab.training.tasks.batches import collate
from pipeinfer.lab.training.tasks.formats import Example

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Tuning:
    """batch: rows of a step. steps: None for `epochs` over all rows. rate: highest learning rate,
    which rises over `warmup` steps and then falls linearly to 0. tokens: of a micro-batch, padding
    included, which bounds memory."""

    batch: int = 8
    epochs: float = 4.0
    steps: int | None = None
    rate: float = 1e-5
    warmup: int = 5
    seed: int = 0
    tokens: int = 4096
    save_seconds: float = 60.0
    report_seconds: float = 10.0

    def length(self, rows: int) -> int:
        """Steps of a whole run over so many rows."""
        return self.steps or max(1, math.ceil(self.epochs * rows / min(self.batch, rows)))

    def rate_at(self, step: int, length: int) -> float:
        """Learning rate of a step."""
        return self.rate * min(1.0, (step + 1) / self.warmup) * (1 - step / length)


def tune(trainee: Trainee, rows: Sequence[Example], settings: Tuning, checkpoint: Path, *,
         report: Callable[[str], None] = print, stop_after: int | None = None) -> list[float]:
    """Mean nats per target of each step. Goes on from `checkpoint`; a resumed run equals an
    unbroken one. stop_after: leave after so many further steps; so does an interrupt
    (Ctrl-C), in the middle of a step. Raises ModelError for a checkpoint of another run."""
    length = settings.length(len(rows))
    parameters = list(trainee.learnt.values())
    optimizer = torch.optim.AdamW(parameters, settings.rate, (0.9, 0.95), weight_decay=0.0)
    mine = _mark(rows, settings, trainee)
    losses = _resumed(checkpoint, trainee, optimizer, mine)
    if losses:
        report(f"goes on at step {len(losses) + 1} of {length}")

    def save() -> None:
        save_state(checkpoint, {"run": mine, "losses": losses, "optimizer": optimizer.state_dict(),
                                "learnt": {k: p.data for k, p in trainee.learnt.items()}})

    first = len(losses)
    started = saved = told = time.monotonic()
    for step in range(first, min(length, first + (stop_after or length))):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(step, length)
        try:
            loss = _step(trainee, chosen(rows, settings.batch, settings.seed, step),
                         settings.tokens)
        except KeyboardInterrupt:
            report(f"interrupted after step {step} of {length}")
            break
        losses.append(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = time.monotonic()
        if now - told > settings.report_seconds or step + 1 == length:
            told = now
            left = (now - started) / (step + 1 - first) * (length - step - 1)
            report(f"step {step + 1} of {length}  loss {np.mean(losses[-10:]):.3f}  "
                   f"{time_left(left)}")
        if now - saved > settings.save_seconds:
            saved = now
            save()
    save()
    return losses


def chosen(rows: Sequence[_Row], batch: int, seed: int, step: int) -> list[_Row]:
    """The rows of a step: every epoch visits each once, in an order of its own."""
    size = min(batch, len(rows))
    found: list[_Row] = []
    for at in range(step * size, (step + 1) * size):
        epoch, index = divmod(at, len(rows))
        order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        found.append(rows[order[index]])
    return found


def _step(trainee: Trainee, rows: list[Example], tokens: int) -> float:
    """Gradients of the mean loss of some rows, in micro-batches of similar lengths."""
    rows = sorted(rows, key=lambda row: len(row.tokens))
    count = max(1, sum(int((row.targets != IGNORE).sum()) for row in rows))
    total, group = 0.0, list[Example]()
    for number, row in enumerate(rows, 1):
        group.append(row)
        following = len(rows[number].tokens) if number < len(rows) else 0
        if not following or following * (len(group) + 1) > tokens:
            loss = trainee.loss_sum(collate(group)) / count
            loss.backward()
            total += float(loss.detach())
            group = []
    return total


def _mark(rows: Sequence[Example], settings: Tuning, trainee: Trainee) -> str:
    """Tells runs apart whose steps would differ."""
    plan = {k: v for k, v in asdict(settings).items() if not k.endswith("_seconds")}
    digest = hashlib.sha256(repr((plan, trainee.lora, sorted(trainee.learnt))).encode())
    for row in rows:
        digest.update(row.tokens.tobytes() + row.positions.tobytes())
    return digest.hexdigest()


def _resumed(path: Path, trainee: Trainee, optimizer: torch.optim.Optimizer, run: str
             ) -> list[float]:
    if not path.exists():
        return []
    state = load_state(path)
    if not isinstance(state, dict) or state.get("run") != run:
        raise ModelError(f"{path}: is the checkpoint of a run with other data or options: give "
                         "those again, remove it, or use another --out")
    with torch.no_grad():
        for name, parameter in trainee.learnt.items():
            parameter.copy_(state["learnt"][name])
    optimizer.load_state_dict(state["optimizer"])
    return list(state["losses"])
