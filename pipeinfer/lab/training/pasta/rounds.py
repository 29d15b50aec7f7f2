"""Rounds of PASTA stage 2: where prompts and quality come from, and one round of both halves.

Does not know: the objective, masks, files of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.adapt.chats import read_jsonl
from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pasta import preference
from pipeinfer.lab.training.pasta.endpoint import Endpoint
from pipeinfer.lab.training.pasta.preference import Pool, Preference, Quality
from pipeinfer.lab.training.pasta.verdicts import quality_against
from pipeinfer.lab.training.tasks import programs, reference, tasks
from pipeinfer.lab.training.tasks.markup import Codec

_TAGS = re.compile(r"<promise topic=\"[^\"]*\" tokens=\d*/>|</?async>|<sync/>|<\|im_end\|>")


@dataclass(frozen=True, slots=True)
class Source:
    """Prompts of a round (by its number, from 1) and the quality of a response to one."""

    prompts: Callable[[int], list[str]]
    quality: Quality


def generated(count: int, seed: int) -> Source:
    """Training tasks, new ones every round; quality is the share of right sentences."""
    known: dict[str, tasks.Task] = {}

    def prompts(number: int) -> list[str]:
        source = tasks.stream([seed, 5, number])
        chosen = [next(source) for _ in range(count)]
        known.update({task.question: task for task in chosen})
        return [task.question for task in chosen]

    return Source(prompts, lambda prompt, text: tasks.score(known[prompt], text))


def judged(model: Llama, codec: Codec, data: Path, count: int, endpoint: Endpoint) -> Source:
    """Prompts of a JSONL file; quality is a judge's verdict against the file's response (where
    there is one) and the model's own sequential answer, each in both orders."""
    records = [record for record in read_jsonl(data) if "prompt" in record]
    if not records:
        raise UsageError(f"{data} contains no prompt")
    originals = {record["prompt"]: record.get("response") for record in records}
    questions = list(originals)
    sequential: dict[str, str] = {}

    def prompts(number: int) -> list[str]:
        first = (number - 1) * count % len(questions)
        chosen = (questions[first:] + questions[:first])[:count]
        new = [question for question in chosen if question not in sequential]
        started = [programs.start("plain", codec, question) for question in new]
        for question, outcome in zip(new, reference.run(model, started), strict=True):
            sequential[question] = _TAGS.sub("", outcome.text)
        return chosen

    def quality(prompt: str, text: str) -> float:
        others = [sequential[prompt], originals[prompt]]
        return quality_against(endpoint, prompt, _TAGS.sub("", text), others)

    return Source(prompts, quality)


def one_round(
    model: Llama,
    codec: Codec,
    source: Source,
    settings: Preference,
    number: int,
    *,
    pools: Sequence[Pool] | None = None,
    baseline: Callable[[Sequence[str]], list[int]] | None = None,
    report: Callable[[str], None] = print,
) -> list[float]:
    """Sample (unless ``pools`` are given) and train ``model`` in place; losses of every step."""
    if pools is None:
        prompts = source.prompts(number)
        pools = preference.sample(
            model,
            codec,
            prompts,
            source.quality,
            samples=settings.samples,
            seed=settings.seed + 1000 * number,
            baseline=None if baseline is None else baseline(prompts),
        )
    pairs = preference.pairs_of(pools, settings.weight, settings.term)
    report(f"round {number}: {len(pairs)} pairs of {len(pools)} prompts")
    seeded = replace(settings, seed=settings.seed + number)
    return preference.prefer(model, codec, pools, seeded, report)
