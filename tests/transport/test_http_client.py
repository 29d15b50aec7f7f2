"""Asking over HTTP: real sockets, answers that are whole, late, cut or none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading

import pytest

from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpFailure
from pipeinfer_lab import http_async

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def _request(connection):
    """All bytes of a request: a socket closed with unread ones is reset, and the answer lost. Who
    asks may leave before it has sent them all."""
    data = b""
    while not _is_whole(data) and (more := connection.recv(65536)):
        data += more
    return data


def _is_whole(data):
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


@contextlib.contextmanager
def server(*parts, hold=False):
    """Answers one request by these bytes; with `hold` the connection stays open."""
    asked, over = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve():
            connection, _ = listener.accept()
            with connection:
                asked.append(_request(connection))
                for part in parts:
                    connection.sendall(part)
                if hold:
                    over.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/x", asked
        finally:
            over.set()
            thread.join()


def sync_events(url, timeout=5.0):
    with http_client.stream("POST", url, {"a": "é"}, timeout=timeout) as response:
        assert http_async.is_stream(response)
        yield from http_client.events(response)


def async_events(url, timeout=5.0):
    async def collect(out):
        async with http_async.stream("POST", url, {"a": "é"}, timeout=timeout) as response:
            async for event in http_async.events(response):
                out.append(event)

    found = []
    try:
        asyncio.run(collect(found))
    finally:
        yield from found


def whole(url, timeout=5.0):
    return http_client.ask("GET", url, timeout=timeout, headers={"X-A": "b"})


def whole_async(url, timeout=5.0):
    return asyncio.run(http_async.ask("GET", url, timeout=timeout, headers={"X-A": "b"}))


@pytest.mark.parametrize("ask", [whole, whole_async])
def test_a_whole_answer(ask):
    body = json.dumps({"x": "é"}).encode()
    with server(b"HTTP/1.1 404 No\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n" % len(body),
                body) as (url, asked):
        answer = ask(url)
    assert (answer.status, answer.headers["retry-after"]) == (404, "3")
    assert answer.json() == json.loads(answer.text) == {"x": "é"}
    assert asked[0].startswith(b"GET /x HTTP/1.1\r\n")
    assert b"x-a: b" in asked[0].lower()


@pytest.mark.parametrize("ask", [sync_events, async_events])
def test_events_come_however_they_are_cut(ask):
    data = b': ping\n\ndata: {"n":1}\n\ndata: {"n":"\xc3\xa9"}\n\ndata: [DONE]\n\n'
    for size in (1, 7, len(data)):
        parts = [chunk(data[i : i + size]) for i in range(0, len(data), size)]
        with server(HEAD, *parts, chunk(b"")) as (url, asked):
            assert list(ask(url)) == [{"n": 1}, {"n": "é"}]
        assert b"content-type: application/json" in asked[0].lower()


@pytest.mark.parametrize("ask", [sync_events, async_events])
@pytest.mark.parametrize(("parts", "says"), [
    ((HEAD, chunk(b'data: {"n":1}\n\n'), chunk(b"")), "ended early"),
    ((HEAD, chunk(b'data: {"n":1}\n\n'), b"5\r\nda"), "ended early"),
    ((HEAD, chunk(b'data: {"n":1}\n\ndata: [1]\n\n')), "not a JSON object"),
    ((HEAD, chunk(b'data: {"n":1}\n\ndata: {\n\n')), "not a JSON object"),
    ((), "ended early"),
])
def test_what_is_not_whole_fails_after_what_came(ask, parts, says):
    found = []
    with server(*parts) as (url, _), pytest.raises(HttpFailure, match=says):
        found.extend(ask(url))
    assert found == [{"n": 1}] * bool(parts)


@pytest.mark.parametrize("ask", [whole, whole_async, lambda *a: list(sync_events(*a)),
                                 lambda *a: list(async_events(*a))])
@pytest.mark.parametrize("parts", [(), (HEAD,), (HEAD, chunk(b"data:"))])
def test_every_wait_has_a_deadline(ask, parts):
    with server(*parts, hold=True) as (url, _), pytest.raises(HttpFailure, match="in time"):
        ask(url, 0.2)


@pytest.mark.parametrize("ask", [whole, whole_async])
@pytest.mark.parametrize(("url", "says"), [
    ("http://host.invalid:80/", "no such host"), ("http://127.0.0.1:1/", "Connection refused"),
    ("nothing", "protocol"), ("http://[", "no such host"),
])
def test_who_cannot_be_reached_is_said_in_a_few_words(ask, url, says):
    with pytest.raises(HttpFailure, match=says):
        ask(url)


def test_leaving_a_stream_hangs_up():
    with server(HEAD, chunk(b'data: {"n":1}\n\n'), hold=True) as (url, _):
        for event in sync_events(url):
            assert event == {"n": 1}
            break
