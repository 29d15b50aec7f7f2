"""A small client for measurements: one connection per request, streamed answers, exact times.

Over the same library as the project's other clients; the tests use the official client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.lab import http_async

_SILENCE = 600.0  #: seconds without a byte after which an answer is given up


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
    answer = await http_async.ask("GET", f"http://{host}:{port}{path}", timeout=_SILENCE)
    return answer.status, answer.text


async def complete(
    port: int, request: dict[str, Any], *, leave_after: int | None = None,
    read_pause: float = 0.0, host: str = "127.0.0.1", path: str = "/v1/completions",
) -> Answer:
    """Stream a completion with token ids.

    leave_after: hang up after so many tokens. read_pause: seconds to sleep between two pieces of
    the stream (a slow reader).
    """
    body = {"stream": True, "stream_options": {"include_usage": True},
            "pipeinfer": {"detail": True}, **request}
    answer = Answer()
    begin = time.perf_counter()
    try:
        async with http_async.stream("POST", f"http://{host}:{port}{path}", body,
                                            timeout=_SILENCE) as response:
            answer.status, answer.headers = response.status_code, dict(response.headers)
            if not http_async.is_stream(response):
                await response.aread()
                answer.body = response.json() if response.content else {}
                answer.error = answer.body.get("error", {})
                return answer
            async with contextlib.aclosing(http_async.events(response)) as events:
                async for chunk in events:
                    if "error" in chunk:
                        answer.error = chunk["error"]
                        return answer
                    _take(answer, chunk, time.perf_counter() - begin)
                    if leave_after is not None and len(answer.tokens) >= leave_after:
                        return answer
                    if read_pause:
                        await asyncio.sleep(read_pause)
            answer.ended = True
        return answer
    finally:
        answer.seconds = time.perf_counter() - begin


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    detail = chunk.get("pipeinfer") or {}
    tokens = detail.get("tokens", [])
    answer.tokens += tokens
    answer.times += [now] * len(tokens)
    for choice in chunk.get("choices", []):
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.reason = choice.get("finish_reason") or answer.reason
    answer.usage = chunk.get("usage") or answer.usage
    answer.timings = chunk.get("timings") or answer.timings
