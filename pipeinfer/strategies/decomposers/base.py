"""The interface of decomposers, which split one response into threads that are decoded
concurrently.

A decomposer receives the tokens of its threads as they are accepted, and returns actions. It
decides which threads there are, what each of them sees, and in which order the reader gets the
text. It is independent of runs, sequence ids, ranks and models. Tokens still come from the walk
alone, one thread at a time, so proposers and policies work inside every thread.

Threads are numbered from 0, the main one, in an order that does not depend on timing, because their
noise depends on the number. Indices count a thread's own tokens from the start of its path (prompt
and fed tokens included); the scheduler computes positions from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

MAIN = 0  #: the thread that every response begins with
LONGEST_TITLE = 64  #: a title or point of an outline with more tokens is malformed


class Fork(Struct, frozen=True):
    """Start a thread.

    thread: its number
    parent: the thread whose first tokens it sees, and the cells that were joined to them
    keep: how many tokens it sees
    tokens: its own first tokens, inserted and not chosen by the model
    bans: as in `SamplingParams.bans`
    """

    thread: int
    parent: int
    keep: int
    tokens: tuple[int, ...]
    bans: tuple[tuple[int, int, int], ...] = ()


class Feed(Struct, frozen=True):
    """Continue a thread that waits, or the one whose token was accepted just now.

    tokens: to append, not chosen by the model; none: evaluate only the token that waited
    skip: by how many positions all of this is moved on
    """

    thread: int
    tokens: tuple[int, ...] = ()
    skip: int = 0


class Skip(Struct, frozen=True):
    """Leave `count` positions free before the next token of the thread."""

    thread: int
    count: int


class Halt(Struct, frozen=True):
    """Do not evaluate the token just accepted before a `Feed` of this thread."""

    thread: int


class CutThread(Struct, frozen=True):
    """Drop all but the first `keep` tokens of a thread, which then waits for a `Feed`."""

    thread: int
    keep: int


class Join(Struct, frozen=True):
    """Make the cells of the threads `others` visible to `thread`.

    others: all threads that wait to be joined; they end
    """

    thread: int
    others: tuple[int, ...]


class GiveUp(Struct, frozen=True):
    """Record that the thread ends because it is too long, not because the model has ended it."""

    thread: int


class Close(Struct, frozen=True):
    """End a thread.

    evaluate: whether its last token is evaluated. `Decomposer.settled` is called once that is under
        way; the thread then waits to be joined
    """

    thread: int
    evaluate: bool = False


Action: TypeAlias = Fork | Feed | Skip | Halt | CutThread | Join | GiveUp | Close


class TextPiece(Struct, frozen=True):
    """The next piece of text for the reader.

    thread: whose token it comes from
    number: of that token among those that the model chose in the thread, from 0
    text: UTF-8, maybe a part of a character
    """

    thread: int
    number: int
    text: bytes


class TokenVocabulary(Struct, frozen=True):
    """The tokenizer functions that decomposers need.

    piece: token to bytes
    encode: text to tokens; tags become single tokens where the vocabulary has them
    """

    piece: Callable[[int], bytes]
    encode: Callable[[str], list[int]]

    def single(self, text: str) -> int | None:
        """Return the token that is exactly `text`; None where the text takes several tokens."""
        tokens = self.encode(text)
        return tokens[0] if len(tokens) == 1 and self.piece(tokens[0]) == text.encode() else None


class Specification(Struct, frozen=True, forbid_unknown_fields=True):
    """The decomposition of a response, as plain data that can be sent between processes.

    method: name of the decomposer
    plain: tokens of an ordinary prompt
    point: a text (for a skeleton: of a point's prompt, with placeholders for outline, index and
        point)
    seam: of `point`
    lead: a choice (for a skeleton: whether the reader first gets number and point)

    A method's `open` fills these fields for its `make`.
    """

    method: str
    plain: tuple[int, ...] = ()
    point: str = ""
    seam: str = ""
    lead: bool = False


class Decomposer(Protocol):
    """The decomposer of one response; see the module docstring.

    Methods that return actions return them in the order of their execution.
    """

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """The bans of the main thread, as in `SamplingParams.bans`."""

    def accepted(self, thread: int, token: int) -> list[Action]:
        """Handle the thread's next token, which the model chose."""

    def ended(self, thread: int) -> list[Action]:
        """Handle the end of a thread by the model; the stop token is not part of it."""

    def settled(self, thread: int) -> list[Action]:
        """Handle a thread closed with `evaluate`, whose last token is now being evaluated."""

    @property
    def complete(self) -> bool:
        """Whether the response is over."""

    def take(self) -> Sequence[TextPiece]:
        """Return the pieces that the reader can have now and has not received."""

    def flush(self) -> Sequence[TextPiece]:
        """Return all remaining pieces in reading order; the response ends here, complete or not."""
