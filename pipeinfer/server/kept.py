"""Requests that outlive their connection and the process: those in the journal.

A journaled request runs by itself. Clients follow it, from its first token or from a later event,
as often as they like. For each of them the answer is written again from the request and its
tokens, one token at a time, so that every event has the same number for every client. This module
uses choices, the engine client and the journal, no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.choice import Choices, Generation, PromptProgress
from pipeinfer.server.errors import ApiError, Failure, bad
from pipeinfer.server.journal import Begun, ChoiceEnded, Gone, Journal, Record, Story, TokenRows
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.settings import Settings


class JournaledClient(Protocol):
    """What journaled requests need of the engine; see `engine_client.EngineClient` for each."""

    settings: Settings
    metrics: Metrics
    facts: dict[str, Any]

    @property
    def state(self) -> str:
        """The state of the cluster, as /health shows it."""

    def new_id(self) -> int:
        """Return the id of a new choice."""

    def add(self, generation: Generation, request: EngineRequest, before: bool = False,
            bits: object = None) -> None:
        """Send a choice of a request to the engine."""

    def abort(self, generation: Generation, reason: str) -> None:
        """End a choice whose client has gone."""

    def check_ready(self) -> Tokenizer:
        """Return the vocabulary if requests can be accepted. Raises ApiError (503)."""

    def check_room(self, count: int) -> None:
        """Raise ApiError where `count` choices are too many."""


_TURN = 64  #: tokens that a follower takes before it yields to other tasks
_LEAVING = ("failed", "stopped", "draining")
_MOST_KEY = 255


class Recorded(Generation):
    """A choice whose tokens are journaled."""

    story: Story
    kept: Kept

    def push(self, token: int, speculated: bool, logprob: float | None,
             top: Sequence[tuple[int, float]], seen: bytes | None = None) -> bool:
        """Store tokens; the text is dropped, as followers make it themselves."""
        before = len(self.tokens)
        stopped = super().push(token, speculated, logprob, top, seen)
        if len(self.tokens) > before:
            self.story.rows.append((token, speculated, logprob, tuple(top), seen))
            self.story.bits = self.kept.bits
            self._taken()
        return stopped

    def read(self, progress: PromptProgress) -> None:
        """Record how much of the prompt is computed."""
        super().read(progress)
        self.kept.ring()

    def end(self, reason: str, stats: dict[str, Any]) -> None:
        """End the choice. reason: stop, length, context, or that of an abort. The end is
        journaled."""
        if not self.ended:
            super().end(reason, stats)
            self._over()

    def fail(self, failure: Failure) -> None:
        """End the choice with an error. The end is journaled unless the choice continues after a
        restart."""
        if not self.ended:
            super().fail(failure)
            self._over()

    def tell_again(self) -> None:
        """Add the tokens that are in the journal."""
        for row in self.story.rows:
            super().push(*row)
        self._taken()

    def _taken(self) -> None:
        super().take()
        self.kept.ring()

    def _over(self) -> None:
        counts = self.counts
        seconds = (None if counts.first is None else counts.first - counts.submitted,
                   None if counts.last is None else counts.last - counts.submitted)
        end = ChoiceEnded(self.kept.record.begun.id, self.index, time.time(), len(self.story.rows),
                    self.reason or "", self.stats, self.failure, seconds, self.restarts,
                    self.same_bits)
        self.kept.over(self, end)
        self._taken()


class Kept:
    """A request in the journal.

    alone: whether only its own connection can read the answer, as the client has named no key.
    """

    def __init__(self, archive: Archive, record: Record, alone: bool) -> None:
        self.archive, self.record, self.alone = archive, record, alone
        self.generations: list[Recorded | None] = [None] * len(record.stories)
        self.last: list[ChoiceEnded | None] = [story.end for story in record.stories]
        self.readers: set[asyncio.Event] = set()
        self._limit: asyncio.TimerHandle | None = None

    @property
    def bits(self) -> str:
        """`bits` of the present engine."""
        return str(self.archive.client.facts.get("bits", ""))

    @property
    def runs(self) -> bool:
        """Whether it was submitted."""
        return any(self.generations)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes, at least for now."""
        return all(end is not None for end in self.last)

    def run(self, tokenizer: Tokenizer, before: bool) -> None:
        """Submit the choices that have not ended. before: whether an earlier process has begun
        them."""
        client, begun = self.archive.client, self.record.begun
        for index, story in enumerate(self.record.stories):
            if story.end is None:
                client.add(self._make(tokenizer, index), begun.asked, before,
                           story.bits or begun.bits)
        self._limit = asyncio.get_running_loop().call_later(
            client.settings.request_timeout, self.abort, "timeout")

    def refuse(self, tokenizer: Tokenizer, reason: str) -> None:
        """End with an error the choices that have not ended."""
        for index, story in enumerate(self.record.stories):
            if story.end is None:
                self._make(tokenizer, index).fail(Failure("failed", reason))

    def _make(self, tokenizer: Tokenizer, index: int) -> Recorded:
        asked, story = self.record.begun.asked, self.record.stories[index]
        prompt, _ = asked.choice(index)
        made = Recorded(self.archive.client.new_id(), index, len(prompt), tokenizer, asked.stops,
                        asyncio.Event())
        made.story, made.kept = story, self
        self.generations[index] = made
        made.tell_again()
        return made

    def abort(self, reason: str) -> None:
        """End every choice."""
        for generation in self.generations:
            if generation is not None:
                self.archive.client.abort(generation, reason)

    def over(self, generation: Recorded, end: ChoiceEnded) -> None:
        """Handle the end of a choice. If it failed because the server ends, it continues after
        the restart."""
        self.last[generation.index] = end
        if self.archive.client.state not in _LEAVING or end.failure is None:
            generation.story.end = end
            self.archive.write(self, generation.index, end)
        if self.ended:
            if self._limit is not None:
                self._limit.cancel()
            self.archive.over(self)

    def ring(self) -> None:
        """Wake the followers."""
        for reader in self.readers:
            reader.set()


class Archive:
    """The journaled requests of a server and their journal."""

    def __init__(self, client: JournaledClient, journal: Journal) -> None:
        """Read the journal. Raises UsageError."""
        self.client, self._journal = client, journal
        self._kept = {name: Kept(self, record, alone=False)
                      for name, record in journal.read().items()}
        self._rewritten = journal.size
        self._tokenizer: Tokenizer
        self._abandoned: list[Kept] = []  # by an earlier process's clients, in order
        self._task = asyncio.get_running_loop().create_task(self._run())

    def go_on(self, tokenizer: Tokenizer) -> None:
        """Continue the requests that had not ended when this process began.

        Clients that named no key may never ask again. Their requests run one after the other, so
        that those of others do not wait for all of them.
        """
        self._tokenizer = tokenizer
        for kept in [kept for kept in self._kept.values() if not kept.ended]:
            if kept.record.begun.key:
                self._go_on(kept)
            else:
                self._abandoned.append(kept)
        self._next()

    def wanted(self, kept: Kept) -> None:
        """Run a request now if it waits, because a client asks for it."""
        if kept in self._abandoned and not kept.runs:
            self._go_on(kept)

    def _go_on(self, kept: Kept) -> None:
        if kept.record.begun.model == identity(self.client.settings):
            kept.run(self._tokenizer, before=True)
        else:
            kept.refuse(self._tokenizer, "the server has come back with another model")

    def _next(self) -> None:
        idle = not any(kept.runs for kept in self._abandoned)
        if idle and self._abandoned and self.client.state not in _LEAVING:
            self._go_on(self._abandoned[0])

    def over(self, kept: Kept) -> None:
        """Run the next of the requests that wait, after the end of one."""
        if kept in self._abandoned:
            self._abandoned.remove(kept)
            asyncio.get_running_loop().call_soon(self._next)

    # --- requests -----------------------------------------------------------------------------

    def find(self, owner: str, name: str) -> Kept:
        """Return the request of this answer. Raises ApiError (404, 409)."""
        kept = self._kept.get(name)
        if kept is None or kept.record.begun.owner != owner:
            raise ApiError(404, "no such answer is kept: it was never here, was made with another "
                                "key, has been deleted, or its time is over", code="not_found")
        self._check_model(kept)
        return kept

    def of_key(self, owner: str, kind: str, key: str, body: str) -> Kept | None:
        """Return the earlier request with this Idempotency-Key, None if there is none.

        owner: see `owner_of`. body: digest of the request. Raises ApiError (409, 422).
        """
        for kept in self._kept.values():
            begun = kept.record.begun
            if key and (begun.owner, begun.kind, begun.key) == (owner, kind, key):
                if begun.body != body:
                    raise ApiError(422, "another request came with this Idempotency-Key: give each "
                                        "request a key of its own", code="idempotency_key_reused")
                self._check_model(kept)
                return kept
        return None

    def begin(self, begun: Begun) -> Kept:
        """Journal a new request and submit it. Raises ApiError when the queue is full."""
        tokenizer = self.client.check_ready()
        self.client.check_room(begun.asked.count)
        record = Record(begun, [Story() for _ in range(begun.asked.count)])
        kept = self._kept[begun.id] = Kept(self, record, alone=not begun.key)
        self._journal.hold(record, begun)
        self._journal.flush()  # before its first token: a client that has one may ask for the rest
        kept.run(tokenizer, before=False)
        return kept

    def drop(self, kept: Kept, reason: str) -> None:
        """Delete a request, and end it if it runs."""
        if self._kept.pop(kept.record.begun.id, None) is not None:
            self._journal.hold(kept.record, Gone(kept.record.begun.id))
        kept.abort(reason)
        self.over(kept)

    def _check_model(self, kept: Kept) -> None:
        if kept.record.begun.model != identity(self.client.settings):
            raise ApiError(409, "this answer was begun by another model than the one that is "
                                "served now", code="other_model")

    # --- the file -----------------------------------------------------------------------------

    async def close(self) -> None:
        """Write everything and close the file."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Write, sync and delete old requests, repeatedly."""
        journal = self._journal
        try:
            while True:
                await asyncio.sleep(self.client.settings.journal_sync)
                self._write()
                if not journal.problem and (error := await asyncio.to_thread(journal.sync)):
                    journal.failed(error)
                self._forget()
                if journal.problem or journal.size > max(self._limit, 2 * self._rewritten):
                    await self._rewrite()
                self.client.metrics.journal(journal.size, bool(journal.problem))
        finally:
            self._write()
            journal.close()

    def write(self, kept: Kept, choice: int, end: ChoiceEnded | None = None) -> None:
        """Queue the new tokens of a choice, and its end, for the file."""
        story, name = kept.record.stories[choice], kept.record.begun.id
        if story.written < len(story.rows):
            self._journal.hold(kept.record, TokenRows(
                name, choice, story.written, story.rows[story.written:], story.bits))
            story.written = len(story.rows)
        if end is not None:
            self._journal.hold(kept.record, end)

    def _write(self) -> None:
        for kept in self._kept.values():
            for choice in range(len(kept.record.stories)):
                self.write(kept, choice)
        self._journal.flush()

    @property
    def _limit(self) -> int:
        return self.client.settings.journal_size << 20

    def _forget(self) -> None:
        """Delete requests whose time is over, and the oldest if there are too many bytes."""
        now, settings = time.time(), self.client.settings
        done = sorted((kept for kept in self._kept.values() if kept.record.ended),
                      key=lambda kept: kept.record.ended)
        total = sum(kept.record.size for kept in self._kept.values())
        for kept in done:
            if now - kept.record.ended > settings.journal_keep or total > self._limit // 2:
                total -= kept.record.size
                self.drop(kept, "")

    async def _rewrite(self) -> None:
        self._journal.remember()
        copies = [kept.record.copy() for kept in self._kept.values()]
        self._journal.replace(await asyncio.to_thread(self._journal.render, copies))
        self._rewritten = self._journal.size


class Follower(Choices):
    """One reading of a journaled request, in the form that `streaming` needs (`Work`)."""

    def __init__(self, kept: Kept, tokenizer: Tokenizer) -> None:
        asked = kept.record.begun.asked
        self._kept = kept
        self._news = asyncio.Event()
        self._steps = 0
        self._read = [0] * asked.count
        kept.readers.add(self._news)
        self.generations = [
            Generation(0, index, len(asked.prompts[index // asked.n]), tokenizer, asked.stops,
                       asyncio.Event(), asked.shown) for index in range(asked.count)]

    def abort(self, reason: str) -> None:
        """Remove this reader. A request that no other client can read ends with it."""
        kept = self._kept
        if self._news not in kept.readers:
            return
        kept.readers.discard(self._news)
        if kept.alone and not kept.ended and not kept.readers:
            kept.archive.drop(kept, reason)

    async def wait(self, seconds: float) -> bool:
        """Wait for news, and take one token of each choice that has some; return whether there
        were any."""
        self._news.clear()
        if self._step():
            self._steps += 1
            if self._steps % _TURN == 0:
                await asyncio.sleep(0)
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return self._step()

    def _step(self) -> bool:
        return any([self._advance(generation) for generation in self.generations])

    def _advance(self, generation: Generation) -> bool:
        kept = self._kept
        rows, end = kept.record.stories[generation.index].rows, kept.last[generation.index]
        read = self._read[generation.index]
        if generation.ended:
            return False
        if read < len(rows):
            generation.push(*rows[read])
            self._read[generation.index] += 1
            return True
        if end is None:
            known, source = generation.progress, kept.generations[generation.index]
            if source is not None and source.progress is not None:
                generation.read(source.progress)
            return generation.progress is not known
        counts = generation.counts
        counts.first, counts.last = (
            None if s is None else counts.submitted + s for s in end.seconds)
        generation.restarts, generation.same_bits = end.restarts, end.same_bits
        if end.failure is not None:
            generation.stats = end.stats
            generation.fail(end.failure)
        else:
            generation.end(end.reason, end.stats)
        return True


def owner_of(key: bytes, settings: Settings) -> str:
    """Return a digest of the API key, which the journal stores instead of the key; "" without
    keys."""
    return hashlib.blake2b(key, digest_size=16).hexdigest() if settings.api_keys else ""


def digest_of(body: str) -> str:
    """Return a digest that identifies a request's content."""
    return hashlib.blake2b(body.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def identity(settings: Settings) -> str:
    """Return the identity of the model file: an answer can only be continued by the same model."""
    try:
        return f"{settings.model} {os.stat(settings.model).st_size}"
    except OSError:
        return settings.model


def check_key(key: str) -> str:
    """Return a client's Idempotency-Key. Raises ApiError (400) if it is not valid."""
    if len(key) > _MOST_KEY or not key.isascii() or (key and not key.isprintable()):
        raise bad(f"Idempotency-Key must be at most {_MOST_KEY} printable ASCII characters",
                  "Idempotency-Key")
    return key
