"""PASTA stage 2 for models that people have: learn which of their own sampled answers are better.

The answers come from `pipeinfer sample`, as the runtime decoded them. Does not know: how they were
sampled or judged, the command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeinfer.errors import UsageError
from pipeinfer_lab.training.adapt.chats import read_jsonl
from pipeinfer_lab.training.adapt.lora import LoraAdapter, LoraSettings, save_adapter
from pipeinfer_lab.training.adapt.trainee import Arithmetic, Trainee
from pipeinfer_lab.training.minimise import Schedule, adamw, minimise
from pipeinfer_lab.training.pasta import bonbon, pasta
from pipeinfer_lab.training.pasta.bonbon import Round, Scored
from pipeinfer_lab.training.tasks import formats
from pipeinfer_lab.training.tasks.batches import chosen, collate
from pipeinfer_lab.training.tasks.formats import Example

#: the better and the worse answer to one prompt, as training rows
Pair = tuple[Example, Example]


def pairs_of(path: Path, weight: float, context: int, report: Callable[[str], None],
             term: str = "speedup") -> tuple[list[Pair], int]:
    """Best and worst answers to every prompt of a file of `pipeinfer sample`, and how many answers
    most prompts have. Prompts whose answers all score the same, and answers of more than `context`
    tokens or positions, are left out. Raises UsageError where nothing is left."""
    pairs: list[Pair] = []
    counts: list[int] = []
    record: Any
    for number, record in enumerate(read_jsonl(path), 1):
        try:
            flats = {}
            scored = []
            for one in record["samples"]:
                flat = pasta.flat_of(one)
                if term != "speedup" and "control" not in one:
                    raise ValueError(f"does not count tags, as --term {term} needs: sample again")
                flats[flat.tokens] = formats.pasta_example(flat)
                scored.append(Scored(flat.tokens, float(one["speedup"]), float(one["quality"]),
                                     pasta.parallelism(flat)))
                if not math.isfinite(scored[-1].speedup + scored[-1].quality):
                    raise ValueError("a score is no finite number")
                if scored[-1].speedup < 0:
                    raise ValueError("a speed-up below 0")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UsageError(f"{path}, record {number}: is not of pipeinfer sample ({error})"
                             ) from error
        fit = [one for one in scored if flats[one.tokens].context <= context]
        ends = bonbon.pair(fit, weight, term) if len(fit) > 1 else None
        if ends is not None:
            pairs.append((flats[ends[0].tokens], flats[ends[1].tokens]))
            counts.append(len(fit))
    report(f"{len(pairs)} pairs")
    if not pairs:
        raise UsageError(f"{path}: no two answers to a prompt differ in score, so there is nothing "
                         "to learn: sample more, or at a higher --temp")
    return pairs, max(set(counts), key=counts.count)


def prefer(trainee: Trainee, pairs: Sequence[Pair], samples: int, settings: Round,
           report: Callable[[str], None] = print, reference: Trainee | None = None) -> list[float]:
    """Loss of every step (paper section 4, BoNBoN), against `reference` (none: the model as it is
    now); an interrupt (Ctrl-C) ends it sooner. samples: answers that each pair is the best and
    worst of."""
    with torch.no_grad():
        initial = [_likelihoods(reference or trainee, pair) for pair in pairs]
    del reference  # its memory is needed

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:  # noqa: ARG001
        mine = chosen(range(len(pairs)), settings.batch, settings.seed, step)
        for number in mine:
            before, now = initial[number], _likelihoods(trainee, pairs[number])
            loss = bonbon.loss(now[:1], now[1:], before[:1] - before[1:], samples, settings.alpha)
            yield loss / len(mine), sum(len(one.tokens) for one in pairs[number])

    parameters = list(trainee.learnt.values())
    return minimise(objective, Schedule(steps=settings.steps), [adamw(parameters, settings.rate)],
                    [parameters], report=report, interruptible=True)


def run(model: Path, data: Path, out: Path, settings: Round, lora: LoraSettings,
        arithmetic: Arithmetic, *, threads: int = 1, context: int = 2048,
        reference: Path | None = None, report: Callable[[str], None] = print) -> list[float]:
    """Leaves a LoRA adapter in peft's format in `out`; losses of every step. Raises UsageError and
    ModelError."""
    if not math.isfinite(settings.weight):
        raise UsageError(f"--weight {settings.weight:g} is no finite number, which the adapter's "
                         "config could not hold: 1e6 is quality alone, and speed among equals")
    torch.set_num_threads(threads)
    trainee = Trainee(model, arithmetic, lora, seed=settings.seed)
    pairs, samples = pairs_of(data, settings.weight, min(context, trainee.context), report,
                              settings.term)
    known = trainee.model.shard.n_vocab
    most = max(int(one.tokens.max()) for pair in pairs for one in pair)
    if most >= known:
        raise UsageError(f"{data}: has token {most}, but {model} knows {known}: sample from the "
                         "model that is to learn")
    losses = prefer(trainee, pairs, samples, settings, report,
                    None if reference is None else Trainee(reference, arithmetic, lora))
    save_adapter(out, LoraAdapter(
        lora, {name: p.detach() for name, p in trainee.learnt.items()}, str(model),
        about={"pairs": len(pairs), "steps": len(losses), "weight": settings.weight,
               "term": settings.term}))
    (out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    report(f"wrote {out}")
    return losses


def _likelihoods(trainee: Trainee, pair: Pair) -> Tensor:
    """Summed log-probabilities of the better and the worse answer, [2]."""
    return trainee.log_probabilities(collate(pair))
