"""The target's answers with its hidden rows, by the torch model that also makes those for a draft.

A target that this machine cannot hold needs another `tapped_answers`; `shards.fill` takes any.

Independent of the head and its training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.lab.training.draft.answers import Lesson, Marks, Talk, quickened
from pipeinfer.lab.training.network.loop import Plan
from pipeinfer.lab.training.network.restore import restore


@dataclass(frozen=True, slots=True)
class AnswerBudget:
    """When to stop: after so many minutes, or so many texts. slots: texts that grow at once, of up
    to `length` tokens."""

    minutes: float | None
    texts: int | None
    slots: int
    length: int
    seed: int


def tapped_answers(target: Path, marks: Marks, taps: tuple[int, ...], budget: AnswerBudget
                   ) -> Iterator[Lesson]:
    """Yield finished texts with the rows of `taps` until the budget is spent.

    With a budget in minutes the texts that have not ended by then come last, as far as they got.
    """
    model = restore(target)
    if Plan(steps=1).bfloat16:
        quickened(model)
    talk = Talk(model, marks, budget.slots, budget.length, budget.seed, taps)
    start, count = time.monotonic(), 0
    while budget.minutes is None or time.monotonic() - start < 60 * budget.minutes:
        for text in talk.step():
            yield text
            count += 1
            if count == budget.texts:
                return
    yield from talk.rest()
