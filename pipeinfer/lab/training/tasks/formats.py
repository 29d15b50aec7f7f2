"""Training examples of one task in every format: ids, positions, who sees whom, targets.

One example is one flat row of tokens. Threads that decode side by side lie one behind the other
in it and are kept apart by the mask, so a prompt is evaluated once for all of them.

Does not know: models, batches, how a server renders the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeinfer.lab.training.pair.tokenizer import END_OF_TEXT_ID, IM_END_ID
from pipeinfer.lab.training.pasta import pasta
from pipeinfer.lab.training.pasta.pasta import IGNORE
from pipeinfer.lab.training.tasks import markup, pasta_plans, words
from pipeinfer.lab.training.tasks.markup import SYSTEM, Codec, prompt_text
from pipeinfer.lab.training.tasks.tasks import Item, Task

#: Format and its share of the training examples.
FORMATS = {"plain": 0.22, "pasta": 0.34, "pdos": 0.2, "apar": 0.12, "sot": 0.12}


@dataclass(frozen=True, slots=True)
class Example:
    """One row: ``tokens``, ``positions``, ``targets`` [n] int64 and ``visible`` [n, n] bool."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    visible: NDArray[np.bool_]

    @property
    def context(self) -> int:
        """The least context that it fits into: its tokens, and positions, which may skip some."""
        return max(len(self.tokens), int(self.positions.max()) + 1)


@dataclass(slots=True)
class Tree:
    """Collects segments; each sees the whole of some earlier ones and its own past."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def add(
        self, ids: Sequence[int], start: int, sees: Sequence[int], targets: Sequence[int]
    ) -> int:
        """Append a segment at positions from ``start``; returns its number."""
        if len(ids) != len(targets):
            raise ValueError(f"{len(ids)} tokens but {len(targets)} targets")
        first = len(self.tokens)
        self.tokens += ids
        self.positions += range(start, start + len(ids))
        self.targets += targets
        self.spans.append((first, len(self.tokens), tuple(sees)))
        return len(self.spans) - 1

    def example(self) -> Example:
        """The finished training row, with its visibility mask."""
        length = len(self.tokens)
        visible = np.zeros((length, length), dtype=bool)
        for first, last, sees in self.spans:
            visible[first:last, first:last] = np.tri(last - first, dtype=bool)
            for other in sees:
                visible[first:last, self.spans[other][0] : self.spans[other][1]] = True
        return Example(
            np.array(self.tokens, dtype=np.int64),
            np.array(self.positions, dtype=np.int64),
            np.array(self.targets, dtype=np.int64),
            visible,
        )


def prompt_ids(codec: Codec, system: str | None, question: str) -> list[int]:
    """The rendered conversation, led by the token that begins every document."""
    return [END_OF_TEXT_ID, *codec.encode(prompt_text(system, question))]


def nothing(ids: Sequence[int]) -> list[int]:
    """Targets of a segment that is only read."""
    return [IGNORE] * len(ids)


def sequence(prompt: Sequence[int], answer: Sequence[int]) -> Example:
    """A plain exchange: the answer is learnt, the prompt is read."""
    tree = Tree()
    tree.add([*prompt, *answer], 0, (), [*nothing(prompt[1:]), *answer, IGNORE])
    return tree.example()


def plain(codec: Codec, task: Task, rng: np.random.Generator, system: str = "plain") -> Example:
    """The answer one sentence after the other; some prompts have no system message."""
    named = None if system == "plain" and rng.random() < 0.15 else SYSTEM[system]
    prompt = prompt_ids(codec, named, task.question)
    return sequence(prompt, [*codec.encode(task.answer), IM_END_ID])


def pasta_example(flat: pasta.Flat) -> Example:
    """The layout of paper section 4 for one flat response."""
    return Example(
        np.array(flat.tokens, dtype=np.int64),
        pasta.positions(flat),
        pasta.targets(flat),
        pasta.visible(flat),
    )


def pasta_format(codec: Codec, task: Task, rng: np.random.Generator, *, one_each: bool = False
                 ) -> Example:
    """A response annotated at a random granularity, or with one item to a promise."""
    prompt = prompt_ids(codec, SYSTEM["pasta"], task.question)
    response = codec.encode(pasta_plans.annotate(codec, task, rng, one_each=one_each))
    ids = [*prompt, *response, IM_END_ID]
    return pasta_example(pasta.parse(ids, len(prompt), codec.tags, codec.digits))


def pdos(codec: Codec, task: Task, rng: np.random.Generator) -> Example:
    """Skeleton, branches and the text after them (PDOS, stages 1 to 3) behind one prompt.

    After a title's colon the skeleton goes on with an ellipsis and the branch with its text,
    from the very same visible tokens: the ellipsis is forced by the decoder and not learnt.
    A task whose items need each other is written without steps.
    """
    if task.dependent:
        return plain(codec, task, rng, "pdos")
    tags = codec.tags
    step, end, ellipsis = tags[markup.STEP], tags[markup.STEPS_END], tags[markup.ELLIPSIS]
    colon, gap = tags[":"], tags["\n\n"]
    head = prompt_ids(codec, SYSTEM["pdos"], task.question)
    opening = [*codec.encode(words.PREAMBLE), gap]
    base = len(head) + len(opening)
    tree = Tree()
    context = tree.add([*head, *opening], 0, (), [*nothing(head[1:]), *opening, step])
    skeleton: list[int] = []
    wanted: list[int] = []
    titles = [codec.encode(item.title) for item in task.items]
    for title in titles:
        skeleton += [step, *title, colon, ellipsis, gap]
        wanted += [*title, colon, IGNORE, gap, step]
    tree.add([*skeleton, step], base, (context,), [*wanted, end])
    tail: list[int] = []
    for title, item in zip(titles, task.items, strict=True):
        branch = [step, *title, colon]
        body = codec.encode(item.body)
        learnt = [*nothing(branch[1:]), *body, step]
        tree.add([*branch, *body], base, (context,), learnt)
        tail += [gap, *branch, *body]
    closing = [] if task.conclusion is None else codec.encode("\n" + task.conclusion)
    learnt = [*nothing(tail[1:]), *closing, IM_END_ID]
    tree.add([*tail, *closing], base, (context,), learnt)
    return tree.example()


def apar(codec: Codec, task: Task, rng: np.random.Generator) -> Example:
    """A numbered list whose details are written by children that the parent never reads."""
    if task.dependent:
        return plain(codec, task, rng, "apar")
    fork, child = codec.tags[markup.FORK], codec.tags[markup.CHILD]
    head = prompt_ids(codec, SYSTEM["apar"], task.question)
    nodes = [f"{lead}{n}. {item.title}" for lead, n, item in _numbered(task)]
    pieces = [[*codec.encode(node), fork] for node in nodes]
    closing = [] if task.conclusion is None else codec.encode("\n" + task.conclusion)
    answer = [token for piece in pieces for token in piece] + closing
    learnt = [*nothing(head[1:]), *answer, IM_END_ID]
    pieces[0] = [*head, *pieces[0]]
    tree = Tree()
    seen: list[int] = []
    at = 0
    children: list[tuple[list[int], int, tuple[int, ...]]] = []
    for piece, item in zip(pieces, task.items, strict=True):
        seen.append(tree.add(piece, at, seen, learnt[at : at + len(piece)]))
        at += len(piece)
        children.append((codec.encode(item.body), at, tuple(seen)))
    tree.add(closing, at, seen, learnt[at:])
    for body, start, sees in children:
        tree.add([child, *body], start, sees, [*body, IM_END_ID])
    return tree.example()


def sot(codec: Codec, task: Task, rng: np.random.Generator) -> Example:
    """Either the outline request or all expansion requests, which share their prompt's start."""
    outline = "\n".join(f"{n}. {item.title}" for _, n, item in _numbered(task))
    if rng.random() < 0.35:
        question = markup.SOT_OUTLINE.format(question=task.question)
        prompt = prompt_ids(codec, SYSTEM["sot"], question)
        return sequence(prompt, [*codec.encode(outline), IM_END_ID])
    tree = Tree()
    requests = [
        prompt_ids(
            codec,
            SYSTEM["sot"],
            markup.SOT_POINT.format(
                question=task.question, outline=outline, index=n, point=item.title
            ),
        )
        for _, n, item in _numbered(task)
    ]
    shared = common_prefix(requests)
    stem = requests[0][:shared]
    first = tree.add(stem, 0, (), nothing(stem))
    for request, item in zip(requests, task.items, strict=True):
        rest, answer = request[shared:], codec.encode(item.sentence)
        tree.add([*rest, *answer], shared, (first,), [*nothing(rest[1:]), *answer, IM_END_ID])
    return tree.example()


def _numbered(task: Task) -> list[tuple[str, int, Item]]:
    """Line break before the item (none before the first), its number, the item."""
    return [("\n" if n > 1 else "", n, item) for n, item in enumerate(task.items, 1)]


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    low, high = min(map(list, rows)), max(map(list, rows))
    same = [a == b for a, b in zip(low, high, strict=False)]
    return same.index(False) if False in same else min(map(len, rows)) - 1


MAKERS: dict[str, Callable[[Codec, Task, np.random.Generator], Example]] = {
    "plain": plain, "pasta": pasta_format, "pdos": pdos, "apar": apar, "sot": sot}


def make(codec: Codec, task: Task, rng: np.random.Generator, name: str | None = None, *,
         one_each: bool = False) -> Example:
    """One example of a task in the named format, or in one drawn by its share. one_each: PASTA
    with one item to a promise."""
    if name is None:
        name = str(rng.choice(list(FORMATS), p=list(FORMATS.values())))
    if name == "pasta":
        return pasta_format(codec, task, rng, one_each=one_each)
    return MAKERS[name](codec, task, rng)
