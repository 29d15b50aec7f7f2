"""Parallel decoding in one sequence: a skeleton of titles, all steps at once, then on as before.

Stage 1: the model writes `####` title `:` for each step that can be done apart, and `%%%%` behind
the last; what the method forces after a title (an ellipsis, a line break, the next `####`) is fed
rather than decoded. Stage 2: every step goes on behind its title, sees the text before the block
and itself, and ends with `####`. Stage 3: the steps, one behind the other, take the skeleton's
place, and the response goes on, maybe with another block (PDOS, section 3; docs/algorithms.md 8).
Knows no cells, runs or models.

Beyond the paper: titles are only forced inside a block, not after every colon of ordinary prose; a
response may begin with a block; a block that turns out to be none (a title that does not end, no
title at all) stays as the text that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.core.types import ANY
from pipeinfer.errors import ModelError
from pipeinfer.strategies.decomposers.base import MAIN, Action, Close, Cut, Feed, Fork, Vocabulary
from pipeinfer.strategies.decomposers.reading_order import Reader, Stream
from pipeinfer.strategies.spec import DecomposerSpec

STEP, END, ELLIPSIS, HALF, BREAK = "####", "%%%%", "......", "...", "\n\n"
COLONS = (":", ":\n")
_LONGEST_TITLE = 64  #: tokens after which a title is no title


@dataclass(frozen=True, slots=True)
class Markers:
    """The method's tokens, each a single one of the vocabulary."""

    step: int
    end: int
    ellipsis: int
    line_break: int
    colons: frozenset[int]
    dots: frozenset[int]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Markers:
        """Raises ModelError when a marker takes several tokens of this vocabulary."""
        found = {text: vocabulary.single(text) for text in (STEP, END, ELLIPSIS, BREAK, COLONS[0])}
        missing = [repr(text) for text, token in found.items() if token is None]
        if missing:
            raise ModelError("--decomposer pdos needs a vocabulary with single tokens for "
                             f"{', '.join(missing)}; this model's has none")
        tokens = {text: token for text, token in found.items() if token is not None}
        colons = [vocabulary.single(text) for text in COLONS]
        dots = [vocabulary.single(text) for text in (ELLIPSIS, HALF)]
        return cls(tokens[STEP], tokens[END], tokens[ELLIPSIS], tokens[BREAK],
                   frozenset(t for t in colons if t is not None),
                   frozenset(t for t in dots if t is not None))


@dataclass(slots=True)
class _Branch:
    """A step: its first tokens (`####`, title, colon) and those that the model chose."""

    thread: int
    prefix: tuple[int, ...]
    body: list[int] = field(default_factory=list)
    stream: Stream = field(default_factory=Stream)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.stream.over


class Pdos(Reader):
    """A `Decomposer`. n_prompt: tokens of the prompt."""

    def __init__(self, vocabulary: Vocabulary, *, n_prompt: int) -> None:
        super().__init__()
        self._vocabulary, self._marks = vocabulary, Markers.of(vocabulary)
        self._n_prompt = self._index = n_prompt
        self._numbers = 0
        self._branches: list[_Branch] = []  #: of the block at hand
        self._threads: dict[int, _Branch] = {}
        self._titles: list[list[int]] | None = None  #: of the skeleton that is being written
        self._block_index = 0  #: of the skeleton's first token

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """A response does not begin with what ends a block, and no step begins twice."""
        marks, first = self._marks, self._n_prompt - 1
        start = (marks.end, marks.line_break, *sorted(marks.dots))
        return (*((ANY, first, token) for token in start), (marks.step, ANY, marks.step))

    @property
    def complete(self) -> bool:
        """See `Decomposer.complete`."""
        return self._main.over and all(branch.over for branch in self._branches)

    def accepted(self, thread: int, token: int) -> list[Action]:
        """See `Decomposer.accepted`."""
        if thread != MAIN:
            return self._branch_token(self._threads[thread], token)
        marks, main = self._marks, self._main
        self._index += 1
        main.add(MAIN, self._numbers, self._vocabulary.piece(token))
        self._numbers += 1
        if self._titles is None:
            if token == marks.step:
                self._titles, self._block_index, main.held = [[]], self._index - 1, 1
            return []
        main.held += 1
        title = self._titles[-1]
        if token == marks.end and not title and len(self._titles) > 1:
            return self._fan_out(self._titles[:-1])
        title.append(token)
        if token in marks.colons and len(title) > 1:
            self._titles.append([])
            forced = (marks.ellipsis, marks.line_break, marks.step)
            self._index += len(forced)
            main.edit(-1, self._text((token, *forced)))
            return [Feed(MAIN, forced)]
        if token in (marks.step, marks.end, marks.line_break) or len(title) > _LONGEST_TITLE:
            self._titles, main.held = None, 0
        return []

    def ended(self, thread: int) -> list[Action]:
        """See `Decomposer.ended`."""
        if thread != MAIN:
            return self._over(self._threads[thread])
        self._main.over, self._titles = True, None
        return []

    def _fan_out(self, titles: list[list[int]]) -> list[Action]:
        """Stage 2 begins."""
        marks, main, first = self._marks, self._main, len(self._threads) + 1
        self._branches = [_Branch(first + k, (marks.step, *title))
                          for k, title in enumerate(titles)]
        self._threads |= {branch.thread: branch for branch in self._branches}
        for k in range(1, main.held + 1):
            main.edit(-k, b"")
        main.parts += [branch.stream for branch in self._branches]
        main.held, self._titles, self._index = 0, None, self._block_index
        bans = tuple((colon, ANY, dots) for colon in sorted(marks.colons)
                     for dots in sorted(marks.dots))
        return [Cut(MAIN, self._block_index),
                *(Fork(b.thread, MAIN, self._block_index, b.prefix, bans)
                  for b in self._branches)]

    def _branch_token(self, branch: _Branch, token: int) -> list[Action]:
        last = token in (self._marks.step, self._marks.end)
        lead = b"" if branch.stream.parts else self._text((self._marks.line_break, *branch.prefix))
        text = b"" if last else self._vocabulary.piece(token)
        branch.stream.add(branch.thread, len(branch.stream.parts), lead + text)
        if last:
            return self._over(branch)
        branch.body.append(token)
        return []

    def _over(self, branch: _Branch) -> list[Action]:
        branch.stream.over = True
        actions: list[Action] = [Close(branch.thread)]
        if all(other.over for other in self._branches):
            tail = [token for other in self._branches
                    for token in (self._marks.line_break, *other.prefix, *other.body)]
            self._index += len(tail)
            actions.append(Feed(MAIN, tuple(tail)))
        return actions

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._vocabulary.piece, tokens))


TEXT = """

When parts of your answer do not depend on each other, write them as parallel steps: begin each with
"####", then its title and a colon, and write only "......" instead of its content. After the last
step write "####%%%%". Examples:

####Check the first item:......

####Check the second item:......

####%%%%

####Cost:......

####Quality:......

####%%%%

####Alice:......

####Bob:......

####Carol:......

####%%%%

Everything else is written as usual, without "####"."""

SPEC = DecomposerSpec(
    "pdos", "steps that are named first and written at once, in one sequence",
    lambda setup: Pdos(setup.vocabulary, n_prompt=setup.n_prompt), text=TEXT, check=Markers.of)
