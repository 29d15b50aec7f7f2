"""Runs a request: its choices, the stream to its client, the client's disconnection.

Uses ASGI and choices; `responses` writes the content. Waits are limited by `asyncio.timeout`:
before Python 3.12 `wait_for` can swallow a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeinfer.server.answer_writer import AnswerWriter
from pipeinfer.server.answers import Reader
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.errors import ApiError, for_failure

_PING_SECONDS = 15.0  #: silence after which a comment keeps proxies from closing a stream
_log = logging.getLogger("pipeinfer.server")
T = TypeVar("T")


class ClientLeft(Exception):
    """The client disconnected before its answer was complete."""


async def whole(job: Reader, writer: AnswerWriter, request: Request) -> Mapping[str, Any]:
    """Wait for the end of every choice; return the answer.

    Raises ApiError, or ClientLeft when the client disconnects.
    """
    await finished(job, request)
    return writer.whole()


async def finished(job: Reader, request: Request) -> None:
    """Wait for the end of every choice. Raises ApiError, or ClientLeft when the client
    disconnects."""
    try:
        await unless_left(_until_ended(job), request)
    finally:
        job.leave()
    if (failure := job.failure) is not None:
        raise for_failure(failure)


async def _until_ended(job: Reader) -> None:
    # each wait is short, so that the end of the client is noticed beside it
    while not job.ended and job.failure is None:
        await job.wait(_PING_SECONDS)


async def unless_left(work: Awaitable[T], request: Request) -> T:
    """Return the result of `work`, or cancel it and raise ClientLeft if the client disconnects."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(job: Reader, writer: AnswerWriter, after: int | None = None
                 ) -> AsyncGenerator[bytes, None]:
    """Yield the stream of a request. A failure becomes the last event of this stream only.

    after: number of the last event that the client has (-1: none). The stream begins after it, and
        events have numbers. None: no numbers.
    """
    numbers = itertools.count() if after is not None else None
    # An empty line ends an event. The official openai client takes one that has nothing but the
    # number of the event before for an event, and fails on it.
    comment = b": waiting\n\n" if numbers is None else b": waiting\n"

    def encoded(chunk: Mapping[str, Any]) -> bytes:
        if numbers is None or after is None or "prompt_progress" in chunk:
            return event(chunk)  # a reader of the journal has missed what was passing
        number = next(numbers)
        return event(chunk, number) if number > after else b""

    try:
        for chunk in writer.opening():
            if data := encoded(chunk):
                yield data
        waiting = list(writer.choices)
        while waiting:
            if not await job.wait(_PING_SECONDS):
                yield event(writer.ping) if writer.ping else comment
            for choice in list(waiting):
                for chunk in writer.chunks(choice):
                    if data := encoded(chunk):
                        yield data
                if choice.done:
                    waiting.remove(choice)
            if (failure := job.failure) is not None:
                raise for_failure(failure)
        for chunk in writer.closing():
            if data := encoded(chunk):
                yield data
        if writer.ends_with_mark:
            yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield event(writer.failed(error))
    except Exception:
        _log.exception("a request's stream failed")
        yield event(writer.failed(ApiError(500, "internal server error; see its log")))
    finally:
        job.leave()


def event(data: Mapping[str, Any], number: int | None = None) -> bytes:
    """Return `data` as one server-sent event with its empty line; its type becomes the event's
    name."""
    kind = data.get("type")
    name = f"event: {kind}\n".encode() if kind else b""
    if number is not None:
        name += f"id: {number}\n".encode()
    text = msgspec.json.encode(data)
    if not text.isascii():  # clients that split at every Unicode line break must find none
        text = json.dumps(data, separators=(",", ":")).encode()
    return name + b"data: " + text + b"\n\n"


class EventStream(Response):
    """Sends events as fast as the client takes them; closes the source as soon as the client has
    gone.

    timeout: seconds without progress after which the client is disconnected.
    on_end: called in every case, also if the source was never started.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], timeout: float,
                 on_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source, self._timeout, self._on_end = source, timeout, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()
            for task in (pump, leaving):
                task.cancel()
            results = await asyncio.gather(pump, leaving, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _pump(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._source):
            try:
                await self._give(send, {"type": "http.response.start", "status": self.status_code,
                                        "headers": self.raw_headers})
                async for data in self._source:
                    await self._give(send, {"type": "http.response.body", "body": data,
                                            "more_body": True})
                await self._give(send, {"type": "http.response.body", "body": b"",
                                        "more_body": False})
            except TimeoutError:
                transport = scope.get("state", {}).get("transport")
                if transport is not None:
                    transport.abort()

    async def _give(self, send: Send, message: dict[str, Any]) -> None:
        # a client that reads nothing would keep its answer in memory for ever
        async with asyncio.timeout(self._timeout):
            await send(message)


async def pipeline(client: EngineClient) -> AsyncGenerator[bytes, None]:
    """Yield the events for the web page: the facts, then status and runs as they come."""
    with client.watch() as watcher:
        yield event({"op": "facts", "state": client.shown, "reason": client.recovering,
                     "facts": client.facts})
        if client.status:
            yield event(client.status)
        while not client.left.is_set():
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await watcher.news.wait()
            except TimeoutError:
                yield b": waiting\n\n"
            watcher.news.clear()
            while watcher.frames:
                yield event(watcher.frames.popleft())
