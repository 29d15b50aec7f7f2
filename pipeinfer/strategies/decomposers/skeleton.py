"""Skeleton-of-Thought: an outline, then every point with a prompt of its own (a baseline).

The main thread writes a numbered outline. A thread per point then expands it; its prompt holds the
question and the whole outline. Points do not see each other, and their prompts reuse nothing of the
outline's cache except a common beginning (docs/algorithms.md 9). If the outline has no points, the
question is answered plainly. Independent of cells, runs and models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from pipeinfer.strategies.decomposers.base import (
    LONGEST_TITLE,
    MAIN,
    Action,
    Close,
    Fork,
    GiveUp,
    Halt,
    Specification,
    TokenVocabulary,
)
from pipeinfer.strategies.decomposers.reading_order import Reader, Stream
from pipeinfer.strategies.spec import DecomposerSetup, DecomposerSpec, Writer

_POINT = re.compile(r"^\s*(\d+)\.\s*(\S.*?)\s*$", re.MULTILINE)


class Prompts(Struct, frozen=True):
    """The prompts of a response.

    plain: tokens of the prompt of an ordinary answer
    point: makes a point's prompt, in tokens, from (outline, number, point)
    lead: makes the text that the reader sees before a point's expansion, from (number, point)
    first: the beginning of the outline that is part of its prompt
    """

    plain: tuple[int, ...]
    point: Callable[[str, int, str], tuple[int, ...]]
    lead: Callable[[int, str], str]
    first: str = ""


class Skeleton(Reader):
    """The decomposer of Skeleton-of-Thought, for a main prompt that requests the outline."""

    def __init__(self, vocabulary: TokenVocabulary, prompts: Prompts) -> None:
        super().__init__()
        self._vocabulary, self._prompts = vocabulary, prompts
        self._outline: list[bytes] = []
        self._line = 0  #: tokens of the outline's last line
        self._points: dict[int, Stream] = {}
        self._leads: dict[int, bytes] = {}  #: of points without a token

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """The bans of the main thread, as in `SamplingParams.bans`: nothing is banned."""
        return ()

    @property
    def complete(self) -> bool:
        """Whether the response is over."""
        return self._main.over and all(point.over for point in self._points.values())

    def accepted(self, thread: int, token: int) -> list[Action]:
        """Handle the thread's next token, which the model chose."""
        piece = self._vocabulary.piece(token)
        if thread == MAIN:
            self._main.add(MAIN, len(self._outline), b"")
            self._main.held = 1  # the titles of points without text are emitted with this token
            self._outline.append(piece)
            self._line = 0 if b"\n" in piece else self._line + 1
            if self._line > LONGEST_TITLE:
                return [GiveUp(MAIN), Halt(MAIN), *self._expand(self._line)]
        else:
            point = self._points[thread]
            point.add(thread, len(point.parts), self._leads.pop(thread, b"") + piece)
        return []

    def ended(self, thread: int) -> list[Action]:
        """Handle the end of a thread by the model; the stop token is not part of it."""
        if thread != MAIN:
            self._points[thread].over = True
            self._pass_on(thread)
            return [Close(thread)]
        return self._expand()

    def _expand(self, malformed: int = 0) -> list[Action]:
        """Begin a thread for each point of the outline, without its last `malformed` tokens."""
        kept = self._outline[: len(self._outline) - malformed]
        outline = self._prompts.first + b"".join(kept).decode("utf-8", "replace")
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
        end = max(len(self._main.parts) - 1, 0)
        self._main.parts[end:end] = self._points.values()
        self._main.over = True
        return list(forks)

    def _pass_on(self, thread: int) -> None:
        """Give the title of a point without text to the next point that has a token."""
        title = self._leads.pop(thread, b"")
        for later in range(thread + 1, len(self._points) + 1):
            point = self._points[later]
            if point.parts:
                point.edit(0, title + point.text(0, 1))
                return
            if not point.over:
                self._leads[later] = title + self._leads[later]
                return
        if title and self._outline:
            self._main.edit(-1, title + self._main.text(-1))


# --- prompts ----------------------------------------------------------------------------------

#: as published (arXiv 2307.15337, appendix); FIRST and BEGUN begin the model's answers
OUTLINE = """You're an organizer responsible for only giving the skeleton (not the full content) \
for answering the question. Provide the skeleton in a list of points (numbered 1., 2., 3., etc.) \
to answer the question. Instead of writing a full sentence, each skeleton point should be very \
short with only 3~5 words. Generally, the skeleton should have 3~10 points.

Question:
What are the typical types of Chinese dishes?
Skeleton:
1. Dumplings.
2. Noodles.
3. Dim Sum.
4. Hot Pot.
5. Wonton.
6. Ma Po Tofu.
7. Char Siu.
8. Fried Rice.

Question:
What are some practical tips for individuals to reduce their carbon emissions?
Skeleton:
1. Energy conservation.
2. Efficient transportation.
3. Home energy efficiency.
4. Reduce water consumption.
5. Sustainable diet.
6. Sustainable travel.

Now, please provide the skeleton for the following question.
{question}
Skeleton:"""
FIRST = "1."
POINT = """You're responsible for continuing the writing of one and only one point in the overall \
answer to the following question.

{question}

The skeleton of the answer is

{outline}

Continue and only continue the writing of point {index}. Write it **very shortly** in 1~2 \
sentence and do not continue with other points!"""
BEGUN = "{index}. {point}"
_NAMES = ("outline", "index", "point")
_HOLES = {name: f"\ue000{name}\ue001" for name in _NAMES}  # private use: in no text of a model


def open_response(writer: Writer, messages: Sequence[Mapping[str, str]]
                  ) -> tuple[tuple[int, ...], Specification]:
    """Return the prompt that requests the outline, and the specification with the points' prompt.

    The outline does not exist yet. Placeholders in the rendered text stand for it, so that the chat
    template is not needed later.
    """
    values = {"question": messages[-1]["content"], **_HOLES}

    def filled(template: str) -> str:
        return re.sub(r"\{(question|outline|index|point)\}", lambda m: values[m[1]], template)

    def asking(template: str) -> list[Mapping[str, str]]:
        return [*messages[:-1], {"role": "user", "content": filled(template)}]

    texts = writer.texts
    lead = "sot.outline" not in texts
    point, seam = writer.render(asking(texts.get("sot.point", POINT)), "sot.system",
                                begun=filled(BEGUN) if lead else "")
    outline = writer.encode(asking(texts.get("sot.outline", OUTLINE)), "sot.system",
                            begun=FIRST if lead else "")
    return outline, Specification(
        "skeleton", writer.encode(messages, "plain"), point, seam, lead=lead)


def _make(setup: DecomposerSetup) -> Skeleton:
    wanted = setup.wanted

    def prompt(outline: str, index: int, point: str) -> tuple[int, ...]:
        values = {"outline": outline, "index": str(index), "point": point}
        return setup.encode(wanted.point, wanted.seam,
                            {_HOLES[name]: value for name, value in values.items()})

    if not wanted.lead:
        return Skeleton(setup.vocabulary, Prompts(wanted.plain, prompt, lambda *_: ""))
    return Skeleton(setup.vocabulary, Prompts(
        wanted.plain, prompt, lambda index, text: f"{index}. {text}", FIRST))


SPEC = DecomposerSpec("skeleton", "an outline, then every point with a prompt of its own", _make,
                      open=open_response)
