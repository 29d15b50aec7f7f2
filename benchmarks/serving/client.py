"""A small client for measurements: one connection per request, streamed answers, exact times.

It speaks just enough HTTP/1.1 for `pipeinfer serve`, so that what is measured is the server and
not a client library; the tests use the official client.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.experiments.chaos.client import read_events, read_head


@dataclass
class Answer:
    """What came back. Times in seconds since the request was sent. status: of HTTP.

    tokens, times: per output token. ended: whether the stream was complete. body: of an answer
    that is no stream.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    error: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.times[0] if self.times else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and body of a GET."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    status, headers = await read_head(reader)
    raw = await reader.read() if "content-length" not in headers else \
        await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return status, raw.decode()


async def complete(
    port: int, request: dict[str, Any], *, leave_after: int | None = None,
    read_pause: float = 0.0, host: str = "127.0.0.1", path: str = "/v1/completions",
) -> Answer:
    """Stream a completion with token ids.

    leave_after: hang up after so many tokens. read_pause: seconds to sleep between two pieces of
    the stream (a slow reader).
    """
    body = json.dumps({"stream": True, "stream_options": {"include_usage": True},
                       "pipeinfer": {"detail": True}, **request}).encode()
    answer = Answer()
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write((f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                      f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n").encode() + body)
        await writer.drain()
        answer.status, answer.headers = await read_head(reader)
        if "text/event-stream" not in answer.headers.get("content-type", ""):
            raw = await reader.read()
            answer.body = json.loads(raw) if raw else {}
            answer.error = answer.body.get("error", {})
            return answer
        async for data in read_events(reader):
            now = time.perf_counter() - begin
            if data == "[DONE]":
                answer.ended = True
                break
            _take(answer, json.loads(data), now)
            if leave_after is not None and len(answer.tokens) >= leave_after:
                break
            if read_pause:
                await asyncio.sleep(read_pause)
        return answer
    finally:
        answer.seconds = time.perf_counter() - begin
        writer.close()


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    detail = chunk.get("pipeinfer") or {}
    tokens = detail.get("tokens", [])
    answer.tokens += tokens
    answer.times += [now] * len(tokens)
    for choice in chunk.get("choices", []):
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.reason = choice.get("finish_reason") or answer.reason
    answer.usage = chunk.get("usage") or answer.usage
    answer.timings = chunk.get("timings") or answer.timings
