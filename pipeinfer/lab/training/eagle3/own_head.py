"""Makes a head for a target: its answers with hidden rows, a head that learns from them, a file.

Every step leaves its result in the work directory; a later run goes on from there.

Independent of how a step computes (see its module) and of the command line.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.draft.own_draft import AnswerSettings, marks_of
from pipeinfer.lab.training.eagle3.collecting import AnswerBudget, tapped_answers
from pipeinfer.lab.training.eagle3.export_head import write_head
from pipeinfer.lab.training.eagle3.head import EagleHead, shape_for, usual_taps
from pipeinfer.lab.training.eagle3.shards import TappedLessons, fill, load_shards, shards_of
from pipeinfer.lab.training.eagle3.teach_head import (
    agreement,
    as_rounded,
    begin,
    chosen_tokens,
    frozen_parts,
    teach,
)
from pipeinfer.lab.training.network.loop import Plan
from pipeinfer.lab.training.network.restore import restore
from pipeinfer.lab.training.work_folder import claim
from pipeinfer.models.locate import open_tokenizer

_ANSWERS, _DONE, _CHECKPOINT = "answers", "answers.done", "head.safetensors"
_MATRIX_RATE, _OTHER_RATE = 2e-2, 2e-3
_BATCH = 2048  #: tokens of a step


@dataclass(frozen=True, slots=True)
class HeadSettings(AnswerSettings):
    """One run of the command. taps: layers of the target whose input rows the head reads, None: the
    usual ones; depths: steps of the chain that are taught; vocabulary: tokens that the head can
    propose; ff: columns of its feed-forward part, 0: as many as the target's."""

    taps: tuple[int, int, int] | None = None
    depths: int = 3
    vocabulary: int = 8192
    ff: int = 0


def run(settings: HeadSettings, report: Callable[[str], None] = print) -> dict[str, object]:
    """Do what is not done yet; return the report, which is also written as report.json."""
    torch.set_num_threads(settings.threads)
    target = restore(settings.target)
    layers = target.config.n_layer
    taps = settings.taps or usual_taps(layers)
    if not 0 <= taps[0] < taps[1] < taps[2] < layers:
        raise ModelError(f"taps {', '.join(map(str, taps))} of a target of {layers} layers: give "
                         f"three ascending numbers from 0 to {layers - 1} with --taps")
    claim(settings.work, (_ANSWERS, _CHECKPOINT), settings.target, taps=",".join(map(str, taps)))
    taught = _answers(settings, taps, report)
    tokens = chosen_tokens(taught, settings.vocabulary, target.config.n_vocab)
    frozen = frozen_parts(target, tokens)
    head = EagleHead(shape_for(target.config, taps, settings.ff))
    begin(head, target, taught, settings.seed)
    plan = Plan(minutes=settings.minutes, steps=settings.steps, batch_tokens=_BATCH,
                seed=settings.seed, matrix_lr=_MATRIX_RATE, other_lr=_OTHER_RATE)
    report(f"head: rows of layers {', '.join(map(str, taps))}, {len(tokens)} tokens, "
           f"{sum(one.numel() for one in head.parameters()) / 1e6:.1f} M parameters")
    progress = teach(head, frozen, taught, plan, settings.depths, settings.work / _CHECKPOINT,
                     lambda line: report(f"head: {line}"))
    head.quantise = as_rounded
    result: dict[str, object] = {
        "target": settings.target.name, "taps": list(taps), "tokens": len(taught.lessons.tokens),
        "texts": len(taught.lessons.ends), "can_propose": len(tokens),
        "training": asdict(progress),
        "held_out_agreement": agreement(head, frozen, taught, settings.depths),
        "python": platform.python_version(), "torch": torch.__version__, "seed": settings.seed,
    }
    write_head(settings.out, head, tokens, settings.target,
               f"proposes tokens from the rows of layers {', '.join(map(str, taps))}")
    text = json.dumps(result, indent=2)
    (settings.work / "report.json").write_text(text + "\n")
    report(text)
    return result


def _answers(settings: HeadSettings, taps: tuple[int, ...], report: Callable[[str], None]
             ) -> TappedLessons:
    folder, done = settings.work / _ANSWERS, settings.work / _DONE
    if not done.exists():
        marks = marks_of(open_tokenizer(settings.target))
        # a run that goes on after an interruption must not repeat the texts of the first part
        seed = settings.seed + len(shards_of(folder))
        budget = AnswerBudget(None if settings.texts else settings.answer_minutes, settings.texts,
                              settings.slots, settings.length, seed)
        fill(folder, tapped_answers(settings.target, marks, taps, budget), marks.before, report)
        done.touch()
    if not shards_of(folder):
        raise ModelError(f"{folder}: there are no answers: give more --answer-minutes")
    return load_shards(folder)
