"""The reading order of a response: pieces of text, with further streams of pieces between them.

Tokens arrive in the order of the pipeline; text is returned in the order of reading. Independent of
decomposition methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct, field, structs

from pipeinfer.strategies.decomposers.base import Action, TextPiece


class Stream(Struct, eq=False):
    """Parts in reading order.

    held: how many of the last parts may still change
    over: whether no part is added or changed any more
    """

    parts: list[Part] = field(default_factory=list)
    held: int = 0
    over: bool = False
    _at: int = 0

    def add(self, thread: int, number: int, text: bytes) -> None:
        """Append a token's text; `number` as in `TextPiece`."""
        self.parts.append(TextPiece(thread, number, text))

    def edit(self, index: int, text: bytes) -> None:
        """Replace the text of part `index`, which was not returned yet."""
        part = self.parts[index]
        assert isinstance(part, TextPiece)
        self.parts[index] = structs.replace(part, text=text)

    def text(self, start: int, stop: int | None = None) -> bytes:
        """Return the text of the pieces from index `start` on, before index `stop`."""
        return b"".join(part.text for part in self.parts[start:stop] if isinstance(part, TextPiece))

    def take(self) -> list[TextPiece]:
        """Return the pieces that the reader can have now and has not received."""
        pieces: list[TextPiece] = []
        until = len(self.parts) - (0 if self.over else self.held)
        while self._at < until:
            part = self.parts[self._at]
            if isinstance(part, TextPiece):
                pieces.append(part)
            else:
                pieces += part.take()
                if not part.done:
                    break
            self._at += 1
        return pieces

    @property
    def done(self) -> bool:
        """Whether the reader has received everything."""
        return self.over and self._at == len(self.parts)

    def end(self) -> None:
        """Mark this stream and those in it as complete."""
        self.over = True
        for part in self.parts:
            if isinstance(part, Stream):
                part.end()


Part: TypeAlias = TextPiece | Stream


class Reader:
    """The base class of decomposers: returns text in reading order, and has nothing to join."""

    def __init__(self) -> None:
        self._main = Stream()

    def settled(self, thread: int) -> list[Action]:
        """Handle a thread closed with `evaluate`, whose last token is now being evaluated."""
        del thread
        return []

    def take(self) -> Sequence[TextPiece]:
        """Return the pieces of text that are final and were not returned yet."""
        return self._main.take()

    def flush(self) -> Sequence[TextPiece]:
        """Return all remaining pieces in reading order; the response ends here, complete or not."""
        self._main.end()
        return self._main.take()
