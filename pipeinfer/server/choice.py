"""One choice of a request in the HTTP process: its tokens, and the text of them for each reader.

This module uses no HTTP and no engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.server.errors import Failure
from pipeinfer.server.keys import METER, NO_KEY

if TYPE_CHECKING:
    from pipeinfer.server.frames import Submit

_MODEL_ENDS = frozenset({"stop", "length", "context"})
#: token, speculated, log-probability, the likeliest tokens, its visible text (None: its own)
Row: TypeAlias = tuple[int, bool, float | None, tuple[tuple[int, float], ...], bytes | None]


@dataclass(slots=True)
class AnswerPiece:
    """An output token. text: the text that it added, cut where a stop string begins."""

    token: int
    text: str
    speculated: bool
    logprob: float | None
    top: Sequence[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """The text that has become final since the last call. offset: characters released before."""

    text: str
    pieces: list[AnswerPiece]
    offset: int


@dataclass(slots=True)
class Counts:
    """The tokens and times of one choice (seconds of a monotonic clock)."""

    prompt: int
    submitted: float = field(default_factory=time.monotonic)
    output: int = 0
    first: float | None = None
    last: float | None = None


class PromptProgress(NamedTuple):
    """How many tokens of a prompt have been issued to the stages, and how many of these were
    stored."""

    total: int
    processed: int
    cache: int


class Generation:
    """What the engine has returned for one choice.

    request_id: of the choice, at the engine. index: of the choice in the request.
    n_prompt: tokens of its prompt.
    changed: called whenever there is something to read.
    stops: finds the strings that end it, None if there are none.
    """

    def __init__(self, request_id: int, index: int, n_prompt: int,
                 changed: Callable[[Generation], None], stops: TextStream | None = None) -> None:
        self.request_id, self.index = request_id, index
        self.rows: list[Row] = []
        self.counts = Counts(n_prompt)
        self.reason: str | None = None  #: set once, when the choice has ended
        self.failure: Failure | None = None
        self.stats: dict[str, Any] = {}
        self.reused: int | None = None  #: tokens from the cache, as known with the first token
        self.progress: PromptProgress | None = None
        self.frame: Submit | None = None  #: for the engine
        self.bits: str | None = None  #: of the engine to which it was sent last
        self.before = False  #: whether an earlier HTTP process had begun it
        self.restarts = 0  #: how often a new job has continued it
        self.same_bits = True  #: whether all of these computed as the first one did
        self.meter = METER.get(NO_KEY)  #: of the key that pays
        self._changed, self._stops = changed, stops

    @property
    def ended(self) -> bool:
        return self.reason is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: further tokens are not part of the answer."""
        return self._stops is not None and self._stops.stopped

    def push(self, row: Row) -> bool:
        """Add an output token; return whether it completes a stop string (then the engine may
        stop)."""
        if self.stopped or self.ended:
            return False
        counts = self.counts
        self.rows.append(row)
        counts.output += 1
        counts.last = time.monotonic()
        counts.first = counts.first or counts.last
        self.meter.used(1, counts.last)
        self._search(row)
        self._changed(self)
        return self.stopped

    def restore(self, rows: Sequence[Row]) -> None:
        """Add tokens that an earlier process had."""
        for row in rows:
            self.rows.append(row)
            self._search(row)
        self.counts.output = len(self.rows)

    def _search(self, row: Row) -> None:
        if self._stops is not None:
            self._stops.push(row[0], row[4])
            self._stops.take()

    def end(self, reason: str, stats: dict[str, Any]) -> None:
        """End the choice. reason: stop, length, context, or that of an abort. Without effect if
        it has ended."""
        if not self.ended:
            self.stats, self.reason = stats, "stop" if self.stopped else reason
            self._close()

    def fail(self, failure: Failure) -> None:
        """End the choice with `failure`; without effect when it has ended."""
        if not self.ended:
            self.failure, self.reason = failure, "error"
            self._close()

    def _close(self) -> None:
        """Report the end, and let go of the prompt and of who follows: the answer that holds this
        choice is such a one, and a circle with a long prompt would stay in memory for minutes."""
        changed, self._changed, self.frame = self._changed, lambda _: None, None
        changed(self)

    def read(self, progress: PromptProgress) -> None:
        """Record how much of the prompt is computed, until the first token comes."""
        if progress != self.progress and not self.rows:
            self.progress = progress
            self._changed(self)


class Reading:
    """The text of a choice for one reader.

    Text is released as soon as it is final: not within a character, and not while it may be the
    beginning of a stop string. stream: of the whole text.
    """

    def __init__(self, generation: Generation, stream: TextStream) -> None:
        self.generation = generation
        self.ended = False  #: whether the end of the choice was read, too
        self.read = 0  #: tokens that were read
        self.progress: PromptProgress | None = None
        self._stream = stream
        self._waiting: deque[tuple[int, AnswerPiece]] = deque()  # where each begins

    @property
    def stop(self) -> str:
        """The stop string that was found, "" for none."""
        return self._stream.stop

    def advance(self, most: int | None = None) -> bool:
        """Read what has come; return whether there was anything.

        most: tokens; with a bound, the end is read by a call of its own.
        """
        generation, before = self.generation, (self.read, self.ended, self.progress)
        rows = generation.rows[self.read:][:most]
        for token, speculated, logprob, top, seen in rows:
            start = self._stream.produced
            text = self._stream.push(token, seen)
            self._waiting.append((start, AnswerPiece(token, text, speculated, logprob, top)))
            self.read += 1
        if self._stream.stopped:
            self._cut()
        if generation.ended and not (most and rows):
            self.ended = True
            if generation.reason in _MODEL_ENDS:
                self._stream.finish()
        self.progress = generation.progress
        return before != (self.read, self.ended, self.progress)

    def take(self) -> Delta:
        """Return everything that has become final since the last call."""
        pieces = []
        while self._waiting and (self.ended or self._stream.is_certain(
                self._waiting[0][0], self._waiting[0][1].text)):
            pieces.append(self._waiting.popleft()[1])
        offset = self._stream.taken
        return Delta(self._stream.take(), pieces, offset)

    def _cut(self) -> None:
        """Drop the tokens of a stop string, and shorten the one in which it begins."""
        kept: deque[tuple[int, AnswerPiece]] = deque()
        for start, piece in self._waiting:
            if (text := self._stream.cut(start, piece.text)) is not None:
                piece.text = text
                kept.append((start, piece))
        self._waiting = kept
