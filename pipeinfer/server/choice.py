"""One choice of a request in the HTTP process: turns tokens into text and has one end.

Text is released as soon as it is final: not within a character, and not while it may be the
beginning of a stop string. Text that is not fetched is merged, so a slow reader costs no more
memory than the text itself. This module uses no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.asker import Asker
from pipeinfer.server.errors import Failure, for_failure

_MODEL_ENDS = frozenset({"stop", "length", "context"})


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
    """One choice. `news` is set whenever there is something to fetch.

    request_id: of the choice, at the engine. index: of the choice in the request.
    n_prompt: tokens of its prompt. stops: strings that end it.
    shown: control tokens that are text here.
    """

    def __init__(
        self, request_id: int, index: int, n_prompt: int, tokenizer: Tokenizer,
        stops: Sequence[str], news: asyncio.Event, shown: Sequence[int] = (),
    ) -> None:
        self.request_id, self.index = request_id, index
        self.reason: str | None = None  #: set once, when the choice has ended
        self.failure: Failure | None = None
        self.stats: dict[str, Any] = {}
        self.counts = Counts(n_prompt)
        self.tokens: list[int] = []
        self.progress: PromptProgress | None = None  #: of those that asked for it
        self.restarts = 0  #: how often a new job has taken it up
        self.same_bits = True  #: whether all of these computed as the first one did
        self.asker = Asker()  # nobody pays
        self._news = news
        self._stream = TextStream(tokenizer, stops, shown)
        self._waiting: deque[tuple[int, AnswerPiece]] = deque()  # where each begins

    @property
    def ended(self) -> bool:
        """Whether the choice has ended."""
        return self.reason is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: further tokens are not part of the answer."""
        return self._stream.stopped

    @property
    def stop(self) -> str:
        """The stop string that was found, "" for none."""
        return self._stream.stop

    # --- from the engine ----------------------------------------------------------------------

    def push(self, token: int, speculated: bool, logprob: float | None,
             top: Sequence[tuple[int, float]], seen: bytes | None = None) -> bool:
        """Add an output token; return whether it completes a stop string (then the engine may
        stop).

        seen: its visible text, in a response in threads; None: the token's own text.
        """
        if self.stopped or self.ended:
            return False
        counts, now = self.counts, time.monotonic()
        self.tokens.append(token)
        counts.output += 1
        counts.first = counts.first or now
        counts.last = now
        self.asker.used(1)
        start = self._stream.produced
        text = self._stream.push(token, seen)
        self._waiting.append((start, AnswerPiece(token, text, speculated, logprob, top)))
        if self.stopped:
            self._cut()
        self._news.set()
        return self.stopped

    def end(self, reason: str, stats: dict[str, Any]) -> None:
        """End the choice. reason: stop, length, context, or that of an abort. Without effect if
        it has ended."""
        if self.ended:
            return
        if not self.stopped and reason in _MODEL_ENDS:
            self._stream.finish()
            if self.stopped:
                self._cut()
        self.stats = stats
        self.reason = "stop" if self.stopped else reason
        self._news.set()

    def fail(self, failure: Failure) -> None:
        """End the choice with `failure`; without effect when it has ended."""
        if not self.ended:
            self.failure, self.reason = failure, "error"
            self._news.set()

    def read(self, progress: PromptProgress) -> None:
        """Record how much of the prompt is computed, until the first token comes."""
        if progress != self.progress and not self.tokens:
            self.progress = progress
            self._news.set()

    # --- to the client ------------------------------------------------------------------------

    def take(self) -> Delta:
        """Return everything that has become final since the last call."""
        pieces = []
        while self._waiting and (self.ended or self._next_is_certain()):
            pieces.append(self._waiting.popleft()[1])
        offset = self._stream.taken
        return Delta(self._stream.take(), pieces, offset)

    def _next_is_certain(self) -> bool:
        if not self._waiting:
            return False
        start, piece = self._waiting[0]
        return self._stream.is_certain(start, piece.text)

    def _cut(self) -> None:
        """Drop the tokens of a stop string, and shorten the one in which it begins."""
        kept: deque[tuple[int, AnswerPiece]] = deque()
        for start, piece in self._waiting:
            if (text := self._stream.cut(start, piece.text)) is not None:
                piece.text = text
                kept.append((start, piece))
        self._waiting = kept


class Choices:
    """The choices of a request, for the code that answers it."""

    generations: list[Generation]

    @property
    def failure(self) -> Failure | None:
        """The reason why the request cannot be answered, None if there is none."""
        return next((g.failure for g in self.generations if g.failure is not None), None)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended, as far as it was read."""
        return all(g.ended for g in self.generations)


class Submitted(Choices):
    """The choices of one request in the engine."""

    def __init__(self, timeout: float, abort: Callable[[Generation, str], None]) -> None:
        """timeout: seconds until `wait` fails. abort: ends a choice in the engine."""
        self.generations = []
        self.news = asyncio.Event()
        self._timeout, self._abort = timeout, abort
        self._deadline = time.monotonic() + timeout

    def abort(self, reason: str) -> None:
        """End the choices, because the client has gone; without effect after the end."""
        for generation in self.generations:
            self._abort(generation, reason)

    async def wait(self, seconds: float) -> bool:
        """Wait for news; return whether there are any. Raises ApiError (504) at the request's
        deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.abort("timeout")
            raise for_failure(Failure("timeout", "the request took longer than the "
                                      f"{self._timeout:g} s that this server "
                                      "allows"))
        try:
            async with asyncio.timeout(min(seconds, left)):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        return True
