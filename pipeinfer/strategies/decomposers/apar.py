"""APAR: list items fork, and details are decoded alongside the list (a baseline; docs/algorithms.md
    10).

When the main thread writes `[Fork]`, a thread begins with `[Child]`, sees everything up to the
fork, and writes the detail. The main thread goes on at once and never sees the detail. Children do
not fork, and nothing is joined. Independent of cells, runs and models.
"""

from __future__ import annotations

from pipeinfer.core.types import ANY
from pipeinfer.errors import ModelError
from pipeinfer.strategies.decomposers.base import MAIN, Action, Close, Fork, TokenVocabulary
from pipeinfer.strategies.decomposers.reading_order import Reader, Stream
from pipeinfer.strategies.spec import DecomposerSpec

FORK, CHILD = "[Fork]", "[Child]"


class Apar(Reader):
    """The decomposer of APAR.

    vocabulary: has to have single tokens for `[Fork]` and `[Child]`; ModelError otherwise
    n_prompt: tokens of the prompt
    """

    def __init__(self, vocabulary: TokenVocabulary, *, n_prompt: int) -> None:
        super().__init__()
        fork, child = vocabulary.single(FORK), vocabulary.single(CHILD)
        if fork is None or child is None:
            raise ModelError(f"--decomposer apar needs a vocabulary with single tokens for {FORK} "
                             f"and {CHILD}; this model's has none")
        self._vocabulary, self._fork, self._child = vocabulary, fork, child
        self._index, self._numbers = n_prompt, 0
        self._children: dict[int, Stream] = {}

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """The bans of the main thread: `[Child]` anywhere, and a fork right after a fork."""
        return ((ANY, ANY, self._child), (self._fork, ANY, self._fork))

    @property
    def complete(self) -> bool:
        """Whether the response is over."""
        return self._main.over and all(child.over for child in self._children.values())

    def accepted(self, thread: int, token: int) -> list[Action]:
        """Handle the thread's next token, which the model chose."""
        if thread != MAIN:
            stream = self._children[thread]
            stream.add(thread, len(stream.parts), self._vocabulary.piece(token))
            return []
        self._index += 1
        fork = token == self._fork
        self._main.add(MAIN, self._numbers, b"" if fork else self._vocabulary.piece(token))
        self._numbers += 1
        if not fork:
            return []
        child = len(self._children) + 1
        self._children[child] = Stream()
        self._main.parts.append(self._children[child])
        bans = ((ANY, ANY, self._child), (ANY, ANY, self._fork))
        return [Fork(child, MAIN, self._index, (self._child,), bans)]

    def ended(self, thread: int) -> list[Action]:
        """Handle the end of a thread by the model; the stop token is not part of it."""
        if thread == MAIN:
            self._main.over = True
            return []
        self._children[thread].over = True
        return [Close(thread)]


SPEC = DecomposerSpec(
    "apar", "forks that a trained model asks for",
    lambda setup: Apar(setup.vocabulary, n_prompt=setup.n_prompt),
    check=lambda vocabulary: Apar(vocabulary, n_prompt=0))
