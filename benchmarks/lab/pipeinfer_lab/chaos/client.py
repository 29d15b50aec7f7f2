"""Clients for experiments: honest ones that store tokens and times, and a storm of bad ones.

`complete` is the project's own client, `by_openai` the official library with its default time-outs
and repetitions, which users' programs have. The bad ones write to bare sockets, since no library
sends half a request. Knows no job, rank or fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pipeinfer.transport.http_client import HttpFailure
from pipeinfer_lab import http_async

_SILENCE = 600.0  #: seconds without a byte after which an answer is given up; pings come sooner


@dataclass(slots=True)
class Answer:
    """What came back for one request.

    tokens: ids of the output
    times: when each token came (time.monotonic)
    text: the output
    status: HTTP status, 0 without an answer
    reason: why it ended
    trouble: why it is not complete; "" for a good answer
    left: whether the client hung up on purpose
    usage: as the server counted, where the request asks for it
    others: tokens of further choices (`n`), which follow those of the first once all are there
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    status: int = 0
    reason: str = ""
    trouble: str = "no answer"
    left: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    others: dict[int, list[int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what came of an earlier attempt, but for its times."""
        self.tokens.clear()
        self.others.clear()
        self.usage.clear()
        self.text, self.reason, self.status, self.trouble = "", "", 0, "no answer"

    def whole(self) -> None:
        """Note that all has come."""
        self.tokens += [token for _, tokens in sorted(self.others.items()) for token in tokens]
        self.trouble = ""


async def get(url: str, path: str, timeout: float = 10.0) -> tuple[int, Any]:
    """Status and JSON (or text) of a GET; (0, None) when nobody answers in time."""
    try:
        async with asyncio.timeout(timeout):
            answer = await http_async.ask("GET", url + path, timeout=timeout)
    except (HttpFailure, TimeoutError):
        return 0, None
    try:
        return answer.status, answer.json()
    except ValueError:
        return answer.status, answer.text


async def complete(url: str, body: dict[str, Any], *, leave_after: int | None = None,
                   read_pause: float = 0.0, on_token: Callable[[], None] | None = None,
                   answer: Answer | None = None, key: str = "") -> Answer:
    """Stream a completion; never raises for what goes wrong on the way, see `Answer.trouble`.

    leave_after: hang up after so many tokens
    read_pause: seconds to sleep between two pieces of the stream (a slow reader)
    on_token: called after each
    answer: filled while tokens come, for onlookers; its tokens begin anew, its times go on
    key: under which it can be asked for again
    """
    got = Answer() if answer is None else answer
    got.begin()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"Idempotency-Key": key} if key else {}
    try:
        async with http_async.stream("POST", url + path, _asked(body), timeout=_SILENCE,
                                            headers=headers) as response:
            got.status = response.status_code
            if not http_async.is_stream(response):
                raw = await response.aread()
                got.trouble = f"status {got.status}: {raw[:300].decode('utf-8', 'replace')}"
                return got
            got.trouble = "the answer is not whole"
            async with contextlib.aclosing(http_async.events(response)) as events:
                async for chunk in events:
                    if "error" in chunk:
                        error = chunk["error"]
                        got.trouble = f"error: {error.get('message', error)}"
                        return got
                    take(got, chunk, on_token)
                    if leave_after is not None and len(got.tokens) >= leave_after:
                        got.left, got.trouble = True, ""
                        return got
                    if read_pause:
                        await asyncio.sleep(read_pause)
            got.whole()
    except HttpFailure as failure:
        got.trouble = f"{got.trouble}: {failure}"
    return got


async def by_openai(url: str, body: dict[str, Any], *,
                    on_token: Callable[[], None] | None = None, answer: Answer | None = None,
                    key: str = "") -> Answer:
    """Stream a completion by the official library; as `complete`."""
    from openai import APIStatusError, AsyncOpenAI, OpenAIError

    got = Answer() if answer is None else answer
    got.begin()
    more = {name: value for name, value in body.items() if name != "prompt"}
    try:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="any", prompt=body["prompt"], stream=True,
                extra_headers={"Idempotency-Key": key} if key else {},
                extra_body={**more, "pipeinfer": {"detail": True}})
            got.status, got.trouble = stream.response.status_code, "the answer is not whole"
            async with stream:
                async for chunk in stream:
                    take(got, chunk.model_dump(), on_token)
            if got.reason:  # the library takes a broken connection's end for the stream's
                got.whole()
    except APIStatusError as error:
        got.status, got.trouble = error.status_code, f"status {error.status_code}: {error}"
    except OpenAIError as error:
        got.trouble = f"{got.trouble}: {error or type(error).__name__}"
    return got


async def storm(url: str, clients: int, rng: random.Random, stop: asyncio.Event) -> int:
    """Clients that connect, ask for something or half of it, and leave, until `stop`; how many.

    `clients` of them at a time.
    """
    count = 0

    async def one() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await _bad_client(url, rng)
            await asyncio.sleep(rng.uniform(0.05, 0.5))

    await asyncio.gather(*(one() for _ in range(clients)))
    return count


async def _bad_client(url: str, rng: random.Random) -> None:
    """Sends a part of a request (or all of it) and disappears."""
    where = urlsplit(url)
    whole = _request({"prompt": "import os\n" * rng.randint(1, 20), "max_tokens": 200})
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        part = rng.choice((0, rng.randrange(len(whole)), len(whole)))
        writer.write(whole[:part])
        await writer.drain()
        if part == len(whole) and rng.random() < 0.5:
            await reader.read(rng.randint(1, 2000))
        await asyncio.sleep(rng.uniform(0.0, 0.2))
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()  # a reset instead of a goodbye
        writer.close()


# --- requests and answers ---------------------------------------------------------------------


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    return {"stream": True, "pipeinfer": {"detail": True}, **body}


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(_asked(body)).encode()
    return ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n").encode() + data


def take(got: Answer, chunk: dict[str, Any], on_token: Callable[[], None] | None) -> None:
    """Add a chunk of a stream to an answer."""
    tokens = (chunk.get("pipeinfer") or {}).get("tokens", [])
    choices = chunk.get("choices", [])
    index = choices[0]["index"] if choices else 0
    (got.others.setdefault(index, []) if index else got.tokens).extend(tokens)
    got.times += [time.monotonic()] * len(tokens)
    for choice in choices if not index else ():
        delta = choice.get("delta") or {}
        got.text += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            got.text += call["function"].get("arguments") or ""
        got.reason = choice.get("finish_reason") or got.reason
    got.usage = chunk.get("usage") or got.usage
    for _ in tokens if on_token is not None else ():
        assert on_token is not None
        on_token()
