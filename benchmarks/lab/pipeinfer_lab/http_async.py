"""The HTTP client of commands (`transport.http_client`) for use in an event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx2

from pipeinfer.transport.http_client import (
    END,
    MOST_EVENT,
    HttpAnswer,
    HttpFailure,
    content_of,
    event,
    failures,
    headers_of,
    options,
    whole,
)


async def ask(method: str, url: str, body: Any = None, *, timeout: float,
              headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """Like `http_client.ask`."""
    async with stream(method, url, body, timeout=timeout, headers=headers) as response:
        return whole(response, await response.aread())


@contextlib.asynccontextmanager
async def stream(method: str, url: str, body: Any = None, *, timeout: float,
                 headers: Mapping[str, str] | None = None) -> AsyncIterator[httpx2.Response]:
    """Like `http_client.stream`."""
    with failures():
        async with (httpx2.AsyncClient(**options(url, timeout, False)) as client,
                    client.stream(method, url, headers=headers_of(headers, body),
                                  content=content_of(body)) as response):
            yield response


async def events(response: httpx2.Response) -> AsyncGenerator[dict[str, Any], None]:
    """Like `http_client.events`."""
    with failures():
        async for sent in httpx2.EventSource(response, MOST_EVENT):
            if sent.data == END:
                return
            yield event(sent.data)
    raise HttpFailure("the stream ended early")


def is_stream(response: httpx2.Response) -> bool:
    """Whether the answer is a stream of events."""
    return str(response.headers.get("content-type", "")).startswith("text/event-stream")
