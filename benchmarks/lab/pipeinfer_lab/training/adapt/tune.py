"""Learns rows: micro-batches, and a checkpoint that resumes.

Does not know: where rows come from, how models are stored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeinfer.errors import ModelError
from pipeinfer_lab.training.adapt.trainee import Trainee
from pipeinfer_lab.training.checkpoint import load_state, save_state
from pipeinfer_lab.training.minimise import Progress, Schedule, adamw, minimise
from pipeinfer_lab.training.pasta.pasta import IGNORE
from pipeinfer_lab.training.tasks.batches import chosen, collate
from pipeinfer_lab.training.tasks.formats import Example


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

    def length(self, rows: int) -> int:
        """Steps of a whole run over so many rows."""
        return self.steps or max(1, math.ceil(self.epochs * rows / min(self.batch, rows)))


def tune(trainee: Trainee, rows: Sequence[Example], settings: Tuning, checkpoint: Path, *,
         report: Callable[[str], None] = print, stop_after: int | None = None) -> list[float]:
    """Mean nats per target of each step. Goes on from `checkpoint`; a resumed run equals an
    unbroken one. stop_after: leave after so many further steps; so does an interrupt
    (Ctrl-C), in the middle of a step. Raises ModelError for a checkpoint of another run."""
    length = settings.length(len(rows))
    parameters = list(trainee.learnt.values())
    optimizer = adamw(parameters, settings.rate)
    mine = _mark(rows, settings, trainee)
    losses = _resumed(checkpoint, trainee, optimizer, mine)
    if losses:
        report(f"goes on at step {len(losses) + 1} of {length}")

    def save() -> None:
        save_state(checkpoint, {"run": mine, "losses": losses, "optimizer": optimizer.state_dict(),
                                "learnt": {k: p.data for k, p in trainee.learnt.items()}})

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:  # noqa: ARG001
        return _parts(trainee, chosen(rows, settings.batch, settings.seed, step), settings.tokens)

    return minimise(objective, Schedule(steps=length, warmup_steps=settings.warmup), [optimizer],
                    [parameters], progress=Progress(len(losses)), losses=losses, save=save,
                    report=report, stop_after=stop_after, interruptible=True)


def _parts(trainee: Trainee, rows: list[Example], tokens: int) -> Iterator[tuple[Tensor, int]]:
    """The mean loss of some rows as a sum over micro-batches of similar lengths."""
    rows = sorted(rows, key=lambda row: len(row.tokens))
    count = max(1, sum(int((row.targets != IGNORE).sum()) for row in rows))
    group = list[Example]()
    for number, row in enumerate(rows, 1):
        group.append(row)
        following = len(rows[number].tokens) if number < len(rows) else 0
        if not following or following * (len(group) + 1) > tokens:
            yield trainee.loss_sum(collate(group)) / count, sum(len(one.tokens) for one in group)
            group = []


def _mark(rows: Sequence[Example], settings: Tuning, trainee: Trainee) -> str:
    """Tells runs apart whose steps would differ."""
    digest = hashlib.sha256(repr((asdict(settings), trainee.lora, sorted(trainee.learnt))).encode())
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
