"""The seam for decomposers: how one response is split into threads that are decoded at once.

A decomposer reads the tokens of its threads as they are accepted and answers with actions. It
decides what is a thread, what each sees and in which order the reader gets the text; it knows no
runs, sequence ids of caches, ranks or models. Tokens still come from the walk alone, one thread at
a time, so proposers and policies work inside every thread.

Threads are numbered from 0, the main one, in an order that does not depend on timing: their noise
does. Indices count a thread's own tokens from the start of its path (prompt and fed tokens
included); positions are the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

MAIN = 0  #: the thread that every response begins with


class Fork(Struct, frozen=True):
    """A new thread that sees the first `keep` tokens of `parent` (and what was joined to it), and
    begins with `tokens`, which nobody chose. bans: see `SamplingParams.bans`."""

    thread: int
    parent: int
    keep: int
    tokens: tuple[int, ...]
    bans: tuple[tuple[int, int, int], ...] = ()


class Feed(Struct, frozen=True):
    """Go on with a thread that waits, or with the one whose token was accepted just now: append
    `tokens`, which nobody chose (none: only what waited). skip: all of that stands so many
    positions further on."""

    thread: int
    tokens: tuple[int, ...] = ()
    skip: int = 0


class Skip(Struct, frozen=True):
    """The next token of the thread stands `count` positions further on."""

    thread: int
    count: int


class Hold(Struct, frozen=True):
    """The token just accepted is not evaluated until a `Feed` of this thread."""

    thread: int


class Cut(Struct, frozen=True):
    """Forget all but the first `keep` tokens of a thread; it waits for a `Feed`."""

    thread: int
    keep: int


class Join(Struct, frozen=True):
    """What `others`, all that wait to be joined, have in their caches becomes visible to
    `thread`; they are over."""

    thread: int
    others: tuple[int, ...]


class Close(Struct, frozen=True):
    """The thread is over. evaluate: its last token is evaluated, and `settled` says when that is
    under way; the thread then waits to be joined."""

    thread: int
    evaluate: bool = False


Action: TypeAlias = Fork | Feed | Skip | Hold | Cut | Join | Close


class Piece(Struct, frozen=True):
    """What the reader gets next: `text` (UTF-8, maybe part of a character), and which token of
    which thread brought it (number among the chosen ones, from 0)."""

    thread: int
    number: int
    text: bytes


class Vocabulary(Struct, frozen=True):
    """What decomposers need of a tokenizer: token to bytes, text to tokens (tags become single
    tokens where the vocabulary has them)."""

    piece: Callable[[int], bytes]
    encode: Callable[[str], list[int]]

    def single(self, text: str) -> int | None:
        """The token that is exactly `text`, None where it takes several."""
        tokens = self.encode(text)
        return tokens[0] if len(tokens) == 1 and self.piece(tokens[0]) == text.encode() else None


class Specification(Struct, frozen=True, forbid_unknown_fields=True):
    """Which decomposer a response gets, as plain data that goes from process to process.

    method: its name. What a method's `open` leaves for its `make`: plain, tokens of an ordinary
    prompt; point, a text (a skeleton's: of a point's prompt, with holes for outline, index and
    point) and its seam; lead, a choice (a skeleton's: whether the reader gets number and point
    first).
    """

    method: str
    plain: tuple[int, ...] = ()
    point: str = ""
    seam: str = ""
    lead: bool = False


class Decomposer(Protocol):
    """One response; see the module docstring. Every call returns what is to be done, in order."""

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """What the main thread may not choose."""

    def accepted(self, thread: int, token: int) -> list[Action]:
        """The thread's next token was chosen."""

    def ended(self, thread: int) -> list[Action]:
        """The model ended the thread (the token that says so is not part of it)."""

    def settled(self, thread: int) -> list[Action]:
        """The last token of a thread closed with `evaluate` is under way."""

    @property
    def complete(self) -> bool:
        """Whether the response is over."""

    def take(self) -> Sequence[Piece]:
        """What the reader can have now that he has not had."""

    def flush(self) -> Sequence[Piece]:
        """Everything that is left, in reading order: the response ends here, complete or not."""
