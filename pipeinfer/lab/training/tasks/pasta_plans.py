"""Ways to cut a task's answer into promised blocks: the variety that stage 1 learns from.

A plan is a list of parts: a block of items, a text of items, or a sync. Independent items are
mostly cut one by one; items that need each other are mostly written one after the other, so that
a model sampled at temperature 1 offers preference learning both fast and careful answers.

Does not know: ids (beyond counting them for a promise), masks, models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeinfer.lab.training.pasta import pasta
from pipeinfer.lab.training.tasks import markup
from pipeinfer.lab.training.tasks.markup import Codec
from pipeinfer.lab.training.tasks.tasks import Task


@dataclass(frozen=True, slots=True)
class Part:
    """``block`` and ``text`` cover ``count`` items; ``sync`` covers none."""

    kind: Literal["block", "text", "sync"]
    count: int = 0


_SYNC = Part("sync")
#: Cut of independent items and of dependent ones, with their shares.
_FREE = {"each": 0.5, "pairs": 0.13, "triples": 0.08, "mixed": 0.11, "half": 0.1, "text": 0.08}
_ONE_EACH = {"each": 1.0}
_BOUND = {"each": 0.2, "pairs": 0.12, "synced": 0.14, "synced_pairs": 0.14, "text": 0.4}


def plan(task: Task, rng: np.random.Generator, *, one_each: bool = False) -> list[Part]:
    """A random cut of the items; a sync before a conclusion in three of four plans with blocks.

    one_each: independent items get a block each.
    """
    shares = _BOUND if task.dependent else _ONE_EACH if one_each else _FREE
    weights = np.array(list(shares.values()))
    parts = cut(str(rng.choice(list(shares), p=weights / weights.sum())), len(task.items), rng)
    blocks = any(part.kind == "block" for part in parts)
    if task.conclusion is not None and blocks and parts[-1] != _SYNC and rng.random() < 0.75:
        parts.append(_SYNC)
    return parts


def cut(name: str, count: int, rng: np.random.Generator) -> list[Part]:
    """The named cut of ``count`` items."""
    if name == "text":
        return [Part("text", count)]
    if name == "half":
        return [Part("block", (count + 1) // 2), Part("text", count // 2)]
    if name == "mixed":
        parts: list[Part] = []
        while (left := count - sum(part.count for part in parts)) > 0:
            parts.append(Part("block", int(rng.integers(1, min(3, left) + 1))))
        return parts
    size = {"each": 1, "synced": 1, "pairs": 2, "synced_pairs": 2, "triples": 3}[name]
    blocks = [Part("block", min(size, count - at)) for at in range(0, count, size)]
    if not name.startswith("synced"):
        return blocks
    return [part for block in blocks for part in (block, _SYNC)][:-1]


def annotate(codec: Codec, task: Task, rng: np.random.Generator, *, one_each: bool = False
             ) -> str:
    """The answer in PASTA-LANG, cut by a random plan (see `plan`); without its tags it is the
    answer."""
    return render(codec, task, plan(task, rng, one_each=one_each))


def render(codec: Codec, task: Task, parts: list[Part]) -> str:
    """The answer with the tags of a plan; a line break belongs to the sentence after it."""
    sentences = [("\n" if n else "") + item.sentence for n, item in enumerate(task.items)]
    out: list[str] = []
    at = 0
    for part in parts:
        items = task.items[at : at + part.count]
        text = "".join(sentences[at : at + part.count])
        at += part.count
        if part.kind == "sync":
            out.append(markup.SYNC)
        elif part.kind == "text":
            out.append(text)
        else:
            out.append(promised(codec, " ".join(item.title for item in items[:3]), text))
    if task.conclusion is not None:
        out.append("\n" + task.conclusion)
    return "".join(out)


def promised(codec: Codec, topic: str, text: str) -> str:
    """A promise with the block's length in tens, and the block."""
    units = pasta.attribute_of(len(codec.encode(text)) + 2)
    return (
        f"{markup.PROMISE}{topic}{markup.TOKENS}{units}{markup.CLOSE}"
        f"{markup.ASYNC}{text}{markup.ASYNC_END}"
    )
