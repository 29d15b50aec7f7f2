"""Clients for experiments: honest ones that keep tokens and times, and a storm of bad ones.

Speaks just enough HTTP/1.1 for `pipeinfer serve`. Knows no job, rank or fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError)


@dataclass(slots=True)
class Answer:
    """What came back for one request.

    tokens: ids of the output. times: when each came (time.monotonic). reason: why it ended.
    trouble: why it is not whole, "" for a good answer. left: the client hung up on purpose.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    status: int = 0
    reason: str = ""
    trouble: str = "no answer"
    left: bool = False


async def get(url: str, path: str, timeout: float = 10.0) -> tuple[int, Any]:
    """Status and JSON (or text) of a GET; (0, None) when nobody answers in time."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await _connect(url)
            with contextlib.closing(writer):
                writer.write(f"GET {path} HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n\r\n"
                             .encode())
                status, headers = await read_head(reader)
                size = headers.get("content-length")
                raw = await (reader.readexactly(int(size)) if size else reader.read())
    except (*_BROKEN, TimeoutError):
        return 0, None
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode("utf-8", "replace")


async def complete(url: str, body: dict[str, Any], *, leave_after: int | None = None,
                   on_token: Callable[[], None] | None = None, answer: Answer | None = None
                   ) -> Answer:
    """Stream a completion; never raises for what goes wrong on the way, see `Answer.trouble`.

    leave_after: hang up after so many tokens. on_token: called after each. answer: filled while
    tokens come, for onlookers.
    """
    got = Answer() if answer is None else answer
    try:
        reader, writer = await _connect(url)
        with contextlib.closing(writer):
            writer.write(_request(body))
            await writer.drain()
            got.status, headers = await read_head(reader)
            if "text/event-stream" not in headers.get("content-type", ""):
                raw = await reader.read()
                got.trouble = f"status {got.status}: {raw[:300].decode('utf-8', 'replace')}"
                return got
            got.trouble = "the stream ended early"
            async for data in read_events(reader):
                if data == "[DONE]":
                    if got.trouble == "the stream ended early":
                        got.trouble = ""
                    break
                _take(got, json.loads(data), on_token)
                if leave_after is not None and len(got.tokens) >= leave_after:
                    got.left, got.trouble = True, ""
                    break
    except _BROKEN as error:
        got.trouble = f"{got.trouble}: {type(error).__name__} {error}".strip()
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
            with contextlib.suppress(*_BROKEN, TimeoutError):
                async with asyncio.timeout(10.0):
                    await _bad_client(url, rng)
            await asyncio.sleep(rng.uniform(0.05, 0.5))

    await asyncio.gather(*(one() for _ in range(clients)))
    return count


async def _bad_client(url: str, rng: random.Random) -> None:
    """Sends a part of a request (or all of it) and disappears."""
    whole = _request({"prompt": "import os\n" * rng.randint(1, 20), "max_tokens": 200})
    reader, writer = await _connect(url)
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


# --- HTTP -------------------------------------------------------------------------------------


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(url)
    return await asyncio.open_connection(where.hostname, where.port)


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps({"stream": True, "pipeinfer": {"detail": True}, **body}).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n").encode() + data


def _take(got: Answer, chunk: dict[str, Any], on_token: Callable[[], None] | None) -> None:
    if "error" in chunk:
        got.trouble = f"error: {chunk['error'].get('message', chunk['error'])}"
        return
    tokens = (chunk.get("pipeinfer") or {}).get("tokens", [])
    got.tokens += tokens
    got.times += [time.monotonic()] * len(tokens)
    for choice in chunk.get("choices", []):
        got.text += choice.get("text") or ""
        got.reason = choice.get("finish_reason") or got.reason
    for _ in tokens if on_token is not None else ():
        assert on_token is not None
        on_token()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers, names in lower case. Raises IndexError, ValueError."""
    status = int((await reader.readline()).split()[1])
    headers = {}
    while (line := (await reader.readline()).decode().strip()):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The data of server-sent events in a chunked body."""
    buffer = b""
    while size := (await reader.readline()).strip():
        count = int(size, 16)
        if count == 0:
            return
        buffer += await reader.readexactly(count)
        await reader.readexactly(2)
        while b"\n\n" in buffer:
            event, _, buffer = buffer.partition(b"\n\n")
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield line[6:].decode()
