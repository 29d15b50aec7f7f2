"""Makes a draft for a target: its answers, a thinned copy that learns from them, a GGUF file.

Every step leaves its result in the work directory and is skipped when that is there.

Does not know: how a step computes (see its module), the command line.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.draft.answers import Lesson, Marks, Talk, collect, quickened
from pipeinfer.lab.training.draft.export import as_quantised, write_draft
from pipeinfer.lab.training.draft.teach import Lessons, agreement, teach
from pipeinfer.lab.training.network.loop import Plan
from pipeinfer.lab.training.network.model import Llama, spread, thinned
from pipeinfer.lab.training.network.restore import restore
from pipeinfer.lab.training.work_folder import claim
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer

_ANSWERS, _CHECKPOINT = "answers.npz", "draft.safetensors"
_WORDS = "\x01"  #: stands for the user's words while the template is taken apart
#: found by trials of 30 steps: what is left of a thinned model has much to unlearn
_MATRIX_RATE, _OTHER_RATE = 3e-2, 1e-3
_BATCH = 3072  #: tokens of a step


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """A run that learns from a target's answers. slots: texts that grow at once, of up to `length`
    tokens; minutes and answer_minutes, or steps and texts for a budget that repeats."""

    target: Path
    out: Path
    work: Path
    minutes: float | None = None
    answer_minutes: float | None = None
    steps: int | None = None
    texts: int | None = None
    slots: int = 128
    length: int = 384
    seed: int = 0
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Settings(AnswerSettings):
    """One run of the command. layers: how many the draft has; quantisation: of its matrices."""

    layers: int = 3
    quantisation: str = "q4_0"


def run(settings: Settings, report: Callable[[str], None] = print) -> dict[str, object]:
    """Do whatever is not done yet; returns the report that is also written as report.json."""
    torch.set_num_threads(settings.threads)
    claim(settings.work, (_ANSWERS, _CHECKPOINT), settings.target)
    target = restore(settings.target)
    count = target.config.n_layer
    if not 0 < settings.layers < count:
        raise ModelError(f"a draft of {settings.layers} layers for a target of {count}: give 1 to "
                         f"{count - 1}")
    kept = spread(settings.layers, count)
    lessons = _lessons(settings, target, report)
    draft = thinned(target, kept)
    plan = Plan(minutes=settings.minutes, steps=settings.steps, batch_tokens=_BATCH,
                seed=settings.seed, matrix_lr=_MATRIX_RATE, other_lr=_OTHER_RATE)
    report(f"draft: layers {', '.join(map(str, kept))}, {draft.parameter_count() / 1e6:.1f} M "
           "parameters")
    progress = teach(draft, lessons, plan, settings.work / _CHECKPOINT,
                     lambda line: report(f"draft: {line}"))
    draft.eval()
    result: dict[str, object] = {
        "target": settings.target.name, "kept_layers": kept, "texts": len(lessons.ends),
        "tokens": len(lessons.tokens), "training": asdict(progress),
        "parameters": draft.parameter_count(), "quantisation": settings.quantisation,
        "held_out": {"thinned": agreement(thinned(target, kept), lessons),
                     "taught": agreement(draft, lessons),
                     "quantised": agreement(as_quantised(draft, settings.quantisation), lessons)},
        "python": platform.python_version(), "torch": torch.__version__, "seed": settings.seed,
    }
    write_draft(settings.out, draft, settings.target, settings.quantisation,
                f"{settings.layers} layers, taught by {settings.target.name}'s own answers")
    text = json.dumps(result, indent=2)
    (settings.work / "report.json").write_text(text + "\n")
    report(text)
    return result


def marks_of(tokenizer: Tokenizer) -> Marks:
    """The template's parts around the user's words. Raises ModelError without a template."""
    text = tokenizer.apply_chat([{"role": "user", "content": _WORDS}])
    before, found, between = text.partition(_WORDS)
    if not found:
        raise ModelError("the model's chat template loses the user's words")
    ends = frozenset(tokenizer.eog_ids)
    return Marks(tuple(tokenizer.encode(before, special=True)),
                 tuple(tokenizer.encode(between, add_bos=False, special=True)), ends,
                 lambda words: list(tokenizer.encode(words, add_bos=False)))


def _lessons(settings: Settings, target: Llama, report: Callable[[str], None]) -> Lessons:
    path = settings.work / _ANSWERS
    if path.exists():
        return Lessons.load(path)
    tokenizer = open_tokenizer(settings.target)
    marks = marks_of(tokenizer)
    if Plan(steps=1).bfloat16:
        quickened(target)
    talk = Talk(target, marks, settings.slots, settings.length, settings.seed)
    found = collect(talk, settings.answer_minutes, settings.texts, report)
    target.float()
    if not found:
        raise ModelError("the target has not finished one text in the time given: give more "
                         "--answer-minutes")
    lessons = joined(found, marks.before)
    lessons.save(path)
    return lessons


def joined(found: list[Lesson], skip: tuple[int, ...]) -> Lessons:
    """All texts as one."""
    return Lessons(
        np.concatenate([one.tokens for one in found]),
        np.cumsum([len(one.tokens) for one in found]).astype(np.int64),
        np.concatenate([one.likely for one in found]),
        np.concatenate([one.shares for one in found]), skip)
