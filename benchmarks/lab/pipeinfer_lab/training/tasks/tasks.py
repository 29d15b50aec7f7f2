"""Generated instruction tasks with one right answer each: endless, seeded, split by a hash.

Every answer is a list of sentences; a sentence begins with the item's title, so that the same
sentence can be written as an outline point and its detail. Four kinds have independent items;
in ``totals`` every item needs the one before it, so that writing its items in parallel costs
quality.

Does not know: tokens, decomposition formats, models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeinfer_lab.training.tasks import words

#: One task in this many is held out.
HELD_OUT_ONE_IN = 20
#: Kinds and their shares.
KINDS = {"retrieval": 0.42, "checks": 0.13, "segments": 0.12, "plans": 0.1, "totals": 0.23}


@dataclass(frozen=True, slots=True)
class Item:
    """One part of an answer: ``title + body`` is its sentence."""

    title: str
    body: str

    @property
    def sentence(self) -> str:
        """The whole sentence, full stop included."""
        return self.title + self.body


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its right answer; ``dependent``: an item needs the one before it."""

    kind: str
    question: str
    items: tuple[Item, ...]
    conclusion: str | None = None
    dependent: bool = False

    @property
    def lines(self) -> list[str]:
        """Sentences in order, the conclusion last."""
        lines = [item.sentence for item in self.items]
        return lines if self.conclusion is None else [*lines, self.conclusion]

    @property
    def answer(self) -> str:
        """The answer as it is written one sentence after the other."""
        return "\n".join(self.lines)


def generate(rng: np.random.Generator, kind: str | None = None) -> Task:
    """One random task."""
    if kind is None:
        kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
    return _MAKERS[kind](rng)


def is_held_out(task: Task) -> bool:
    """True for a task that the task model has not seen (one in 20, by a hash of its question)."""
    digest = hashlib.sha256(task.question.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def stream(
    seed: int | list[int], *, held_out: bool = False, kind: str | None = None
) -> Iterator[Task]:
    """Endless tasks of one split, the same for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        task = generate(rng, kind)
        if is_held_out(task) == held_out:
            yield task


_MARKUP = re.compile(
    r'<promise topic="[^"]*" tokens=\d*/>|</?async>|<sync/>|####|%%%%|\.{6}|\[Fork\]|\[Child\]'
    r"|<\|im_end\|>|:"
)


def found_lines(text: str) -> list[str]:
    """The sentences of an answer in any format: markup, numbers and blanks removed."""
    lines = []
    for line in re.split(r"\n|####", text):  # steps of PDOS may follow one another in a line
        line = re.sub(r"^\d+\.\s*", "", _MARKUP.sub("", line).strip())
        if line and line != words.PREAMBLE:
            lines.append(" ".join(line.split()))
    return lines


def score(task: Task, text: str) -> float:
    """Share of right sentences, 0 .. 1: those at their place over all expected or written."""
    found, wanted = found_lines(text), task.lines
    right = sum(a == b for a, b in zip(found, wanted, strict=False))
    return right / max(len(found), len(wanted))


def exact_match(task: Task, text: str) -> bool:
    """True when every sentence is right and there is no other."""
    return found_lines(text) == task.lines


def _pick(rng: np.random.Generator, pool: tuple[str, ...], count: int) -> list[str]:
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


def _sizes(
    rng: np.random.Generator, listed: tuple[int, int], asked: tuple[int, int]
) -> tuple[int, int]:
    """How many are listed and how many of them are asked for."""
    count = _between(rng, *listed)
    return count, min(count, _between(rng, *asked))


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def join(titles: list[str]) -> str:
    """Titles as a question names them: commas, and ``and`` before the last."""
    return titles[0] if len(titles) == 1 else ", ".join(titles[:-1]) + " and " + titles[-1]


def _retrieval(rng: np.random.Generator) -> Task:
    count, asked = _sizes(rng, (10, 16), (4, 8))
    names = _pick(rng, words.NAMES, count)
    facts = {
        name: (
            words.SUBJECTS[rng.integers(len(words.SUBJECTS))],
            f"{rng.integers(2, 4)}.{rng.integers(10)}{rng.integers(10)}",
        )
        for name in names
    }
    wanted = _pick(rng, tuple(names), asked)
    items = tuple(
        Item(
            name,
            f" studies {facts[name][0]} and has reached a grade point average of {facts[name][1]}"
            " in the current school year.",
        )
        for name in wanted
    )
    lines = "\n".join(
        f"{name} studies {subject}, {grade}" for name, (subject, grade) in facts.items()
    )
    ask = rng.choice(["What are the grades of", "Give the grades of", "Report the grades of"])
    end = "?" if str(ask).startswith("What") else "."
    question = f"Students and their grades\n{lines}\n{ask} {join(wanted)}{end}"
    if rng.random() >= 0.25:
        return Task("retrieval", question, items)
    conclusion = f"The last of these students has chosen {facts[wanted[-1]][0]}."
    return Task("retrieval", f"{question} Then name the last subject.", items, conclusion)


def _checks(rng: np.random.Generator) -> Task:
    count, asked = _sizes(rng, (6, 10), (3, 6))
    names = _pick(rng, words.GOODS, count)
    facts = {name: (int(rng.integers(10, 100)), int(rng.integers(10, 100))) for name in names}
    wanted = _pick(rng, tuple(names), asked)
    items = tuple(
        Item(
            name,
            f" are needed {facts[name][0]} times and found {facts[name][1]} times, so the stock of"
            f" them is {'enough' if facts[name][1] >= facts[name][0] else 'too low'}.",
        )
        for name in wanted
    )
    lines = "\n".join(f"{name} needed {need}, found {have}" for name, (need, have) in facts.items())
    ask = rng.choice(["Check the stock of", "Verify the stock of"])
    return Task("checks", f"Goods in the store\n{lines}\n{ask} {join(wanted)}.", items)


def _segments(rng: np.random.Generator) -> Task:
    count, asked = _sizes(rng, (5, 9), (3, 6))
    names = _pick(rng, words.SEGMENTS, count)
    facts = {}
    for name in names:
        start = int(rng.integers(10))
        facts[name] = (start, start + int(rng.integers(2, 10)))
    wanted = _pick(rng, tuple(names), asked)
    items = tuple(
        Item(
            name,
            f" runs from {facts[name][0]} to {facts[name][1]} on the axis, so the length of it is"
            f" {facts[name][1] - facts[name][0]} units.",
        )
        for name in wanted
    )
    lines = "\n".join(f"{name} from {start} to {end}" for name, (start, end) in facts.items())
    ask = rng.choice(["How long are", "What are the lengths of"])
    return Task("segments", f"Segments on the axis\n{lines}\n{ask} {join(wanted)}?", items)


def _plans(rng: np.random.Generator) -> Task:
    asked = _between(rng, 3, 6)
    city = words.CITIES[rng.integers(len(words.CITIES))]
    days, budget = int(rng.integers(2, 10)), int(rng.integers(3))
    wanted = _pick(rng, tuple(words.ASPECTS), asked)
    name = words.BUDGETS[budget]
    items = tuple(
        Item(
            aspect,
            f" for {days} days in {city} should mean {words.ASPECTS[aspect][budget]}, which fits"
            f" the {name} budget of the trip.",
        )
        for aspect in wanted
    )
    ask = rng.choice(["Plan a trip", "Prepare a trip"])
    question = f"{ask} to {city} for {days} days with a {name} budget. Cover {join(wanted)}."
    return Task("plans", question, items)


def _totals(rng: np.random.Generator) -> Task:
    count = _between(rng, 3, 6)
    names = _pick(rng, words.NAMES, count)
    amounts = [int(rng.integers(2, 10)) for _ in names]
    items, total = [], 0
    for name, amount in zip(names, amounts, strict=True):
        total += amount
        body = f" pays {amount} coins into the shared box, so the box now holds {total} coins."
        items.append(Item(name, body))
    lines = "\n".join(f"{name} pays {amount}" for name, amount in zip(names, amounts, strict=True))
    ask = rng.choice(["What is the total after each?", "Give the total after each."])
    question = f"Payments in order\n{lines}\n{ask}"
    if rng.random() >= 0.35:
        return Task("totals", question, tuple(items), dependent=True)
    conclusion = f"In the end the shared box holds {total} coins."
    question += " Then give the final total."
    return Task("totals", question, tuple(items), conclusion, dependent=True)


_MAKERS: dict[str, Callable[[np.random.Generator], Task]] = {
    "retrieval": _retrieval,
    "checks": _checks,
    "segments": _segments,
    "plans": _plans,
    "totals": _totals,
}
