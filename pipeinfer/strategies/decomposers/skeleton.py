"""Skeleton-of-Thought: an outline, then every point with a prompt of its own (a baseline).

The main thread writes a numbered outline; each point is then expanded by a thread whose prompt
holds the question and the whole outline. Points do not see each other, and nothing of the outline's
cache is used again but what the prompts begin with (docs/algorithms.md 9). Without any point the
question is answered plainly. Knows no cells, runs or models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeinfer.strategies.decomposers.base import (
    MAIN,
    Action,
    Close,
    Fork,
    Specification,
    Vocabulary,
)
from pipeinfer.strategies.decomposers.reading_order import Reader, Stream
from pipeinfer.strategies.spec import DecomposerSetup, DecomposerSpec, Writer

_POINT = re.compile(r"^\s*(\d+)\.\s*(\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prompts:
    """plain: the prompt of an ordinary answer. point: the prompt for (outline, number, point), as
    tokens; lead: text that the reader sees before a point's expansion."""

    plain: tuple[int, ...]
    point: Callable[[str, int, str], tuple[int, ...]]
    lead: Callable[[int, str], str]


class Skeleton(Reader):
    """A `Decomposer` whose main prompt asks for the outline."""

    def __init__(self, vocabulary: Vocabulary, prompts: Prompts) -> None:
        super().__init__()
        self._vocabulary, self._prompts = vocabulary, prompts
        self._outline: list[bytes] = []
        self._points: dict[int, Stream] = {}
        self._leads: dict[int, bytes] = {}

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """See `Decomposer.bans`: nothing is banned."""
        return ()

    @property
    def complete(self) -> bool:
        """See `Decomposer.complete`."""
        return self._main.over and all(point.over for point in self._points.values())

    def accepted(self, thread: int, token: int) -> list[Action]:
        """See `Decomposer.accepted`."""
        piece = self._vocabulary.piece(token)
        if thread == MAIN:
            self._main.add(MAIN, len(self._outline), b"")
            self._outline.append(piece)
        else:
            self._points[thread].add(thread, len(self._points[thread].parts),
                                     self._leads.pop(thread, b"") + piece)
        return []

    def ended(self, thread: int) -> list[Action]:
        """See `Decomposer.ended`."""
        if thread != MAIN:
            self._points[thread].over = True
            return [Close(thread)]
        outline = b"".join(self._outline).decode("utf-8", "replace")
        points: dict[int, str] = {}
        for number, text in _POINT.findall(outline):
            if len(number) < 4:
                points.setdefault(int(number), text)
        forks = [Fork(k + 1, MAIN, 0, self._prompts.point(outline, number, text))
                 for k, (number, text) in enumerate(points.items())]
        for fork, (number, text) in zip(forks, points.items(), strict=True):
            line = "\n" if fork.thread > 1 else ""
            self._leads[fork.thread] = (line + self._prompts.lead(number, text)).encode()
        if not forks:
            forks = [Fork(1, MAIN, 0, self._prompts.plain)]
        self._points = {fork.thread: Stream() for fork in forks}
        self._main.parts += self._points.values()
        self._main.over = True
        return list(forks)


# --- prompts ----------------------------------------------------------------------------------

OUTLINE = """You only write the skeleton of an answer, not the answer. Give it as a numbered
list of 3 to 10 points of 3 to 5 words each, and nothing else.

Question: {question}"""
POINT = """You continue one point of the answer to a question, and nothing else.

Question: {question}

Skeleton of the answer:
{outline}

Write point {index} ("{point}") in one or two short sentences. Do not write the other points."""
_NAMES = ("outline", "index", "point")
_HOLES = {name: f"\ue000{name}\ue001" for name in _NAMES}  # private use: in no text of a model


def open_response(writer: Writer, messages: Sequence[Mapping[str, str]]
                  ) -> tuple[tuple[int, ...], Specification]:
    """The prompt that asks for the outline, and what the points' prompts are made of.

    The outline is not there yet: holes in the rendered text stand for it, so that the template is
    not needed once it is.
    """
    values = {"question": messages[-1]["content"], **_HOLES}

    def asking(template: str) -> list[Mapping[str, str]]:
        text = re.sub(r"\{(question|outline|index|point)\}", lambda m: values[m[1]], template)
        return [*messages[:-1], {"role": "user", "content": text}]

    texts = writer.texts
    point, seam = writer.render(asking(texts.get("sot.point", POINT)), "sot.system")
    return writer.encode(asking(texts.get("sot.outline", OUTLINE)), "sot.system"), Specification(
        "skeleton", writer.encode(messages, "plain"), point, seam,
        lead="sot.outline" not in texts)


def _make(setup: DecomposerSetup) -> Skeleton:
    wanted = setup.wanted

    def prompt(outline: str, index: int, point: str) -> tuple[int, ...]:
        values = {"outline": outline, "index": str(index), "point": point}
        return setup.encode(wanted.point, wanted.seam,
                            {_HOLES[name]: value for name, value in values.items()})

    return Skeleton(setup.vocabulary, Prompts(
        wanted.plain, prompt, lambda index, text: f"{index}. {text}: " if wanted.lead else ""))


SPEC = DecomposerSpec("skeleton", "an outline, then every point with a prompt of its own", _make,
                      open=open_response)
