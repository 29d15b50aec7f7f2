"""One choice of one request in the HTTP process: tokens become text, one end comes.

Text is handed out as it becomes certain: not inside a character, and not while it may be the
beginning of a stop string. What is not fetched is merged, so a reader that is slow costs no more
memory than the text itself. Knows tokens and text, no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.models.text.text_stream import StopText
from pipeinfer.models.text.tokenizer import Tokenizer

_MODEL_ENDS = frozenset({"stop", "length", "context"})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a choice ended without an answer. kind: one of those in `errors.for_failure`."""

    kind: str
    message: str


@dataclass(slots=True)
class Piece:
    """An output token. text: what it added; cut where a stop string begins."""

    token: int
    text: str
    speculated: bool
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """What has become certain since the last look. `offset`: characters handed out before."""

    text: str
    pieces: list[Piece]
    offset: int


@dataclass(slots=True)
class Counts:
    """Tokens and times of one choice (seconds of a monotonic clock)."""

    prompt: int
    submitted: float = field(default_factory=time.monotonic)
    output: int = 0
    first: float | None = None
    last: float | None = None


class Generation:
    """One choice. `news` is set whenever there is something to fetch."""

    def __init__(
        self, request_id: int, index: int, n_prompt: int, tokenizer: Tokenizer,
        stops: Sequence[str], news: asyncio.Event,
    ) -> None:
        self.request_id, self.index = request_id, index
        self.reason: str | None = None  #: set once, when the choice has ended
        self.failure: Failure | None = None
        self.stats: dict[str, Any] = {}
        self.counts = Counts(n_prompt)
        self.stopped = False  #: a stop string was met; further tokens are not part of the answer
        self._news = news
        self._pieces, self._stopper = tokenizer.stream(), StopText(stops)
        self._text = ""
        self._waiting: deque[tuple[int, Piece]] = deque()  # where each begins
        self._produced = self._certain = self._taken = 0  # characters

    @property
    def ended(self) -> bool:
        """Whether the one end has come."""
        return self.reason is not None

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something, or the end has come."""
        return bool(self._text) or self.ended or (
            bool(self._waiting) and self._is_certain(*self._waiting[0]))

    # --- from the engine ----------------------------------------------------------------------

    def push(self, token: int, speculated: bool, logprob: float | None,
             top: list[tuple[int, float]], seen: bytes | None = None) -> bool:
        """Take an output token; whether it completes a stop string (then the engine may stop).

        seen: what the reader sees of it, of a response in threads (None: the token's own text).
        """
        if self.stopped or self.ended:
            return False
        counts, now = self.counts, time.monotonic()
        counts.output += 1
        counts.first = counts.first or now
        counts.last = now
        text = self._pieces.push(token) if seen is None else self._pieces.push_bytes(seen)
        self._waiting.append((self._produced, Piece(token, text, speculated, logprob, top)))
        self._produced += len(text)
        safe, self.stopped = self._stopper.push(text)
        self._add(safe)
        if self.stopped:
            self._cut()
        self._news.set()
        return self.stopped

    def end(self, reason: str, stats: dict[str, Any]) -> None:
        """The engine's last word. reason: stop, length, context, or that of an abort."""
        if self.ended:
            return
        if not self.stopped and reason in _MODEL_ENDS:
            safe, met = self._stopper.push(self._pieces.finish())
            self._add(safe if met else safe + self._stopper.rest())
            if met:
                self.stopped = True
                self._cut()
        self.stats = stats
        self.reason = "stop" if self.stopped else reason
        self._news.set()

    def fail(self, failure: Failure) -> None:
        """End without an answer."""
        if not self.ended:
            self.failure, self.reason = failure, "error"
            self._news.set()

    # --- to the client ------------------------------------------------------------------------

    def take(self) -> Delta:
        """Everything that has become certain since the last call."""
        pieces = []
        while self._waiting and (self.ended or self._is_certain(*self._waiting[0])):
            pieces.append(self._waiting.popleft()[1])
        delta = Delta(self._text, pieces, self._taken)
        self._taken += len(self._text)
        self._text = ""
        return delta

    def _is_certain(self, start: int, piece: Piece) -> bool:
        return start + len(piece.text) <= self._certain

    def _add(self, text: str) -> None:
        self._text += text
        self._certain += len(text)

    def _cut(self) -> None:
        """Drop the tokens of a stop string, and shorten the one in which it begins."""
        kept: deque[tuple[int, Piece]] = deque()
        for start, piece in self._waiting:
            if start < self._certain:
                piece.text = piece.text[: self._certain - start]
                kept.append((start, piece))
        self._waiting = kept
