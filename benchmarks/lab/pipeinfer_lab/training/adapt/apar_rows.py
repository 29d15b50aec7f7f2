"""APAR's training rows: children write details of list items and paragraphs (arXiv 2401.06761).

Rules find what has a detail: a list item's text behind its colon, and all but the first sentence of
a paragraph. The parent never sees a detail; a child sees what the parent has written by then.

Does not know: models, how rows are learnt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pipeinfer_lab.training.adapt.wording import Wording
from pipeinfer_lab.training.tasks import formats, markup
from pipeinfer_lab.training.tasks.formats import Example, Tree, nothing

TAGS = (markup.FORK, markup.CHILD)
_LEAST_WORDS = 5  #: of a detail: a child costs a token of its own and its end
_LEAST_FORKS = 2  #: with a single one nothing is written at the same time
_ITEM = re.compile(r"[ \t]*(?:\d+[.)]|[-*\u2022])[ \t]+[^\n:]{1,80}:(?:\*\*)?(?=[ \t])")
_SENTENCE = re.compile(r"[^\n]{12,}?[.!?](?=[ \t]+\S)")


def pieces_of(answer: str) -> list[tuple[str, str]]:
    """Return what the parent writes, piece by piece, each with the detail that forks behind it.

    The last piece has none. Together they are the answer.
    """
    pieces, before = [], ""
    for line in answer.splitlines(keepends=True):
        head = _ITEM.match(line) or _SENTENCE.match(line)
        detail = line[head.end():].rstrip("\n") if head else ""
        if head is None or len(detail.split()) < _LEAST_WORDS:
            before += line
            continue
        pieces.append((before + head[0], detail))
        before = line[head.end() + len(detail):]
    if len(pieces) < _LEAST_FORKS:
        return [(answer, "")]
    return [*pieces, (before, "")]


def row_of(wording: Wording, messages: Sequence[Mapping[str, str]], answer: str) -> Example:
    """The training row of an answer; of one without details, a plain one."""
    fork, child = (wording.tagged(tag) for tag in TAGS)
    prompt, end = wording.prompt(messages), wording.end
    *forks, (last, _) = pieces_of(answer)
    if not forks:
        return formats.sequence(prompt, [*wording.text(answer), end])
    parts = [[*wording.text(head), *fork] for head, _ in forks] + [wording.text(last)]
    learnt = [*nothing(prompt[1:]), *(token for part in parts for token in part), end]
    parts[0] = [*prompt, *parts[0]]
    tree, at = Tree(), 0
    seen: list[int] = []
    children = []
    for part, (_, detail) in zip(parts, [*forks, ("", "")], strict=True):
        seen.append(tree.add(part, at, seen, learnt[at : at + len(part)]))
        at += len(part)
        if detail:
            children.append((wording.text(detail), at, tuple(seen)))
    for body, start, sees in children:
        tree.add([*child, *body], start, sees, [*body, end])
    return tree.example()
