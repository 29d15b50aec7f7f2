"""The answers of a server: those in progress, and with a journal those that can be requested again.

A request runs by itself. Readers follow it, from its first token or from a later event, as often as
they like. For each of them the text is made from the tokens; where events have numbers, one token
at a time, so that every event has the same number for every reader. This module uses no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.choice import Generation, Reading
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.errors import ApiError, Failure, bad
from pipeinfer.server.journal import Begun, ChoiceEnded, Entry, Journal, TokenRows, encode
from pipeinfer.server.keys import digest
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.settings import Settings

_TURN = 64  #: tokens that a reader takes before it yields to other tasks
_LEAVING = ("failed", "stopped", "draining")
_MOST_KEY = 255


class Answer:
    """A request and what the engine has returned for it.

    begun: its entry in the journal, None if it is not journaled.
    alone: whether it ends when its last reader leaves.
    """

    def __init__(self, answers: Answers, asked: EngineRequest, tokenizer: Tokenizer,
                 begun: Begun | None = None) -> None:
        self.answers, self.asked, self.begun = answers, asked, begun
        self.alone = begun is None or not begun.key
        self.size, self.ended_at = 0, 0.0  # in the journal
        self.runs = False
        self._written = [0] * asked.count
        self._readers: set[asyncio.Event] = set()
        self._limit: asyncio.TimerHandle | None = None
        self.generations = [
            Generation(answers.client.new_id(), index, len(asked.choice(index)[0]), self._changed,
                       asked.text_of(tokenizer) if asked.stops else None)
            for index in range(asked.count)]

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(one.ended for one in self.generations)

    def run(self) -> None:
        """Submit the choices that have not ended."""
        self.runs = True
        client = self.answers.client
        for one in self.generations:
            if not one.ended:
                client.add(one, self.asked)
        # here, not in the engine: it counts over restarts of the job
        self._limit = asyncio.get_running_loop().call_later(
            client.settings.serve.request_timeout, self._late)

    def _late(self) -> None:
        seconds = self.answers.client.settings.serve.request_timeout
        self.abort("timeout", Failure(
            "timeout", f"the request took longer than the {seconds:g} s that this server allows"))

    def abort(self, reason: str, failure: Failure | None = None) -> None:
        """End every choice in the engine, and here at once where there is a failure."""
        for one in self.generations:
            self.answers.client.abort(one, reason)
            if failure is not None:
                one.fail(failure)

    def leave(self, reader: asyncio.Event) -> None:
        """Remove a reader. A request that no other client can read ends with its last one."""
        if reader in self._readers:
            self._readers.discard(reader)
            if self.alone and not self.ended and not self._readers:
                self.answers.drop(self, "disconnected")

    def enter(self) -> asyncio.Event:
        """Return an event that is set whenever there is something to read."""
        news = asyncio.Event()
        self._readers.add(news)
        return news

    def _changed(self, one: Generation) -> None:
        for reader in self._readers:
            reader.set()
        if one.ended:
            self.answers.ended(self, one)
            if self.ended:
                self.ended_at = self.ended_at or time.time()
                if self._limit is not None:
                    self._limit.cancel()

    # --- the journal --------------------------------------------------------------------------

    def restore(self, entries: list[Entry]) -> None:
        """Set what the journal has of it: entries behind the first one."""
        assert self.begun is not None
        self.alone = False
        for one in self.generations:
            one.before, one.bits = True, self.begun.bits
        for entry in entries:
            self.size += len(encode(entry))
            if isinstance(entry, Begun):
                continue
            one = self.generations[entry.choice]
            if isinstance(entry, TokenRows):
                one.restore(entry.rows)
                one.bits = entry.bits or one.bits
            else:
                one.counts.first, one.counts.last = (
                    None if s is None else one.counts.submitted + s for s in entry.seconds)
                one.reason, one.failure, one.stats = entry.reason, entry.failure, entry.stats
                one.restarts, one.same_bits = entry.restarts, entry.same_bits
                self.ended_at = max(self.ended_at, entry.at)
        self._written = [len(one.rows) for one in self.generations]

    def news(self, index: int) -> Entry | None:
        """Return the tokens of a choice that are not in the journal yet, None if there are none."""
        one, start = self.generations[index], self._written[index]
        self._written[index] = len(one.rows)
        return TokenRows(index, one.rows[start:], one.bits or "") if one.rows[start:] else None


class Answers:
    """The answers of a server. client: of the engine; opens the journal with its vocabulary."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        client.prepare = self._open
        self._journal: Journal | None = None
        self._kept: dict[str, Answer] = {}  # those in the journal, by their ids
        self._abandoned: list[Answer] = []  # by an earlier process's clients, in order
        self._task: asyncio.Task[None] | None = None

    @property
    def journaled(self) -> bool:
        return self._journal is not None

    async def _open(self, tokenizer: Tokenizer) -> None:
        """Open the journal, if there is one, and continue its requests that have not ended.

        Clients that named no key may never ask again. Their requests run one after the other, so
        that those of others do not wait for all of them. Raises UsageError.
        """
        if not self.client.settings.serve.journal or self.journaled:
            return
        journal = await asyncio.to_thread(Journal, Path(self.client.settings.serve.journal))
        for name, entries in journal.read().items():
            if isinstance(begun := entries[0], Begun):
                self._kept[name] = Answer(self, begun.asked, tokenizer, begun)
                self._kept[name].restore(entries)
        self._journal = journal
        for one in [one for one in self._kept.values() if not one.ended]:
            if one.begun is not None and one.begun.key:
                self._go_on(one)
            else:
                self._abandoned.append(one)
        self._next()
        self._task = asyncio.get_running_loop().create_task(self._write())

    def _go_on(self, one: Answer) -> None:
        if one.begun is not None and one.begun.model == identity(self.client.settings):
            one.run()
        else:
            one.abort("", Failure("failed", "the server has come back with another model"))

    def _next(self) -> None:
        if self._abandoned and self.client.state not in _LEAVING \
                and not any(one.runs for one in self._abandoned):
            self._go_on(self._abandoned[0])

    def wanted(self, one: Answer) -> None:
        """Run a request now if it waits, because a client asks for it."""
        if one in self._abandoned and not one.runs:
            self._go_on(one)

    # --- requests -----------------------------------------------------------------------------

    async def begin(self, asked: EngineRequest, begun: Begun | None = None) -> Answer:
        """Journal a new request, if it has an entry, and submit it. Raises ApiError when the queue
        is full."""
        tokenizer = self.client.check_ready()
        self.client.check_room(asked.count)
        one = Answer(self, asked, tokenizer, begun)
        if begun is not None and self._journal is not None:
            self._kept[begun.id] = one
            self._add(one, begun)
            # before its first token: a client that has one may ask for the rest
            await asyncio.to_thread(self._journal.write)
        if begun is None or self._kept.get(begun.id, one) is one:
            one.run()
        return one

    def find(self, owner: str, name: str) -> Answer:
        """Return the journaled request of this answer. Raises ApiError (404, 409)."""
        one = self._kept.get(name)
        if one is None or one.begun is None or one.begun.owner != owner:
            raise ApiError(404, "no answer has this id: it is unknown, was made with another key, "
                                "was deleted, or has expired", code="not_found")
        return self._same_model(one)

    def of_key(self, owner: str, kind: str, key: str, body: str) -> Answer | None:
        """Return the earlier request with this Idempotency-Key, None if there is none.

        owner: see `owner_of`. body: digest of the request. Raises ApiError (409, 422).
        """
        for one in self._kept.values():
            begun = one.begun
            if begun and key and (begun.owner, begun.kind, begun.key) == (owner, kind, key):
                if begun.body != body:
                    raise ApiError(422, "another request came with this Idempotency-Key: give each "
                                        "request a key of its own", code="idempotency_key_reused")
                return self._same_model(one)
        return None

    def _same_model(self, one: Answer) -> Answer:
        if one.begun is not None and one.begun.model != identity(self.client.settings):
            raise ApiError(409, "this answer was begun by another model than the one that is "
                                "served now", code="other_model")
        return one

    def drop(self, one: Answer, reason: str) -> None:
        """End a request if it runs, and delete it."""
        if one.begun is not None and one.begun.id in self._kept and self._journal is not None:
            del self._kept[one.begun.id]
            self._journal.drop(one.begun.id)
        one.abort(reason)
        self._leave_queue(one)

    def ended(self, answer: Answer, one: Generation) -> None:
        """Journal the end of a choice. If it failed because the server ends, it continues after
        the restart."""
        if self.client.state not in _LEAVING or one.failure is None:
            counts = one.counts
            first, last = (None if at is None else at - counts.submitted
                           for at in (counts.first, counts.last))
            self._add(answer, answer.news(one.index), ChoiceEnded(
                one.index, time.time(), one.reason or "", one.stats, one.failure, (first, last),
                one.restarts, one.same_bits))
        if answer.ended:
            self._leave_queue(answer)

    def _leave_queue(self, one: Answer) -> None:
        """Run the next of the requests that wait."""
        if one in self._abandoned:
            self._abandoned.remove(one)
            asyncio.get_running_loop().call_soon(self._next)

    # --- the file -----------------------------------------------------------------------------

    def _add(self, one: Answer, *entries: Entry | None) -> None:
        if self._journal is not None and one.begun is not None and one.begun.id in self._kept:
            for entry in entries:
                if entry is not None:
                    one.size += self._journal.add(one.begun.id, entry)

    async def close(self) -> None:
        """Write everything and close the file."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self) -> None:
        """Write new tokens and delete old requests, repeatedly."""
        journal, settings = self._journal, self.client.settings
        assert journal is not None
        try:
            while True:
                await asyncio.sleep(settings.serve.journal_sync)
                self._collect()
                self._forget()
                # in a thread: a slow disk must not stop the streams
                await asyncio.to_thread(journal.write, sync=True)
                self.client.metrics.journal(journal.size, bool(journal.problem))
        finally:
            self._collect()
            journal.close()

    def _collect(self) -> None:
        for one in self._kept.values():
            self._add(one, *(one.news(choice) for choice in range(one.asked.count)))

    def _forget(self) -> None:
        """Delete requests whose time is over, and the oldest if there are too many bytes."""
        settings = self.client.settings
        total = sum(one.size for one in self._kept.values())
        for one in sorted((one for one in self._kept.values() if one.ended),
                          key=lambda one: one.ended_at):
            if time.time() - one.ended_at > settings.serve.journal_keep \
                    or total > settings.serve.journal_size << 19:
                total -= one.size
                self.drop(one, "")


class Reader:
    """A reading of an answer, in the form that `streaming` needs.

    numbered: whether its events have numbers.
    """

    def __init__(self, answer: Answer, tokenizer: Tokenizer, *, numbered: bool = False) -> None:
        asked = answer.asked
        self._answer, self._news, self._steps = answer, answer.enter(), 0
        self._most = 1 if numbered else None
        self.readings = [Reading(one, asked.text_of(tokenizer)) for one in answer.generations]

    @property
    def failure(self) -> Failure | None:
        """The reason why the request cannot be answered, None if there is none."""
        return next((one.generation.failure for one in self.readings
                     if one.ended and one.generation.failure), None)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended, as far as it was read."""
        return all(one.ended for one in self.readings)

    def leave(self) -> None:
        """Stop reading; see `Answer.leave`."""
        self._answer.leave(self._news)

    async def wait(self, seconds: float) -> bool:
        """Wait for news and read them; return whether there were any."""
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
        try:
            return any([one.advance(self._most) for one in self.readings])
        except Exception as error:  # its text would fail for every reader
            self._answer.abort("error", Failure("internal", f"a token cannot be shown: {error}"))
            raise


def owner_of(key: bytes, settings: Settings) -> str:
    """Return a digest of the API key, which the journal stores instead of the key; "" without
    keys."""
    return digest(key).hex() if settings.keys else ""


def digest_of(body: str) -> str:
    """Return a digest that identifies a request's content."""
    return hashlib.blake2b(body.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def identity(settings: Settings) -> str:
    """Return the identity of the model file: an answer can only be continued by the same model."""
    try:
        facts = os.stat(settings.model)
    except OSError:
        return settings.model
    return f"{settings.model} {facts.st_size} {facts.st_mtime_ns}"


def check_key(key: str) -> str:
    """Return a client's Idempotency-Key. Raises ApiError (400) if it is not valid."""
    if len(key) > _MOST_KEY or not key.isascii() or (key and not key.isprintable()):
        raise bad(f"Idempotency-Key must be at most {_MOST_KEY} printable ASCII characters",
                  "Idempotency-Key")
    return key
