"""The reading order of a response: pieces of text, and streams of pieces in between.

Tokens arrive in the order of the pipeline, text goes out in the order of the reader. Knows no
methods of decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct, field, structs

from pipeinfer.strategies.decomposers.base import Action, Piece


class Stream(Struct, eq=False):
    """Parts in reading order. held: so many of the last ones may still change; over: none will."""

    parts: list[Part] = field(default_factory=list)
    held: int = 0
    over: bool = False
    _at: int = 0

    def add(self, thread: int, number: int, text: bytes) -> None:
        """A token's text comes next."""
        self.parts.append(Piece(thread, number, text))

    def edit(self, index: int, text: bytes) -> None:
        """What the reader sees of a part that he has not got."""
        part = self.parts[index]
        assert isinstance(part, Piece)
        self.parts[index] = structs.replace(part, text=text)

    def text(self, start: int, stop: int | None = None) -> bytes:
        """The text of the pieces from number `start` on, before number `stop`."""
        return b"".join(part.text for part in self.parts[start:stop] if isinstance(part, Piece))

    def take(self) -> list[Piece]:
        """What the reader can have now that he has not had."""
        pieces: list[Piece] = []
        until = len(self.parts) - (0 if self.over else self.held)
        while self._at < until:
            part = self.parts[self._at]
            if isinstance(part, Piece):
                pieces.append(part)
            else:
                pieces += part.take()
                if not part.done:
                    break
            self._at += 1
        return pieces

    @property
    def done(self) -> bool:
        """Whether the reader has had everything."""
        return self.over and self._at == len(self.parts)

    def end(self) -> None:
        """Nothing is added any more, here or in between."""
        self.over = True
        for part in self.parts:
            if isinstance(part, Stream):
                part.end()


Part: TypeAlias = Piece | Stream


class Reader:
    """The half of a `Decomposer` that methods share: text in reading order, nothing to join."""

    def __init__(self) -> None:
        self._main = Stream()

    def settled(self, thread: int) -> list[Action]:
        """See `Decomposer.settled`."""
        del thread
        return []

    def take(self) -> Sequence[Piece]:
        """See `Decomposer.take`."""
        return self._main.take()

    def flush(self) -> Sequence[Piece]:
        """See `Decomposer.flush`."""
        self._main.end()
        return self._main.take()
