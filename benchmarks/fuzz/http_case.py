"""HTTP requests as bytes: request lines, headers and JSON bodies changed, against the real process.

The HTTP process runs against a scripted engine (tests/kit/server_peer.py), so that a
case costs milliseconds; `benchmarks.serving.malformed` sends what a schema makes.
A case may end in any answer below 500, an error of which has a message, or in a closed connection;
at the end the process must live, answer a good request, have written no traceback and not have
grown.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import select
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fuzz.mutate import TEXTS, VALUES, change_bytes, change_value
from benchmarks.fuzz.runner import Kind

MODEL = Path(__file__).resolve().parents[2] / "pipeinfer/models/embedded/target.gguf"
SECONDS = 4.5
MOST_GROWTH = 400 << 20
_MOST_ANSWER = 8 << 20
_PATIENCE = 0.15  #: seconds without an answer after which nothing more is sent
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCHEMAS = ({"$ref": "#"}, {"type": "nothing"}, {"type": ["object"] * 50}, {"enum": []})
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "def f(", "max_tokens": 4, "temperature": 0.5, "stop": ["\n"], "n": 2,
        "logit_bias": {"5": 1.5}, "logprobs": 2, "seed": 5, "stream": True, "top_k": 5},
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [
            {"type": "text", "text": "hi"}]}],
        "max_tokens": 4, "response_format": {"type": "json_object"}, "stream": False,
        "tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "top_logprobs": 2,
        "logprobs": True},
    "/tokenize": {"content": "def f(", "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}], "tools": None},
}
_GETS = ("/", "/health", "/metrics", "/props", "/slots", "/v1/models", "/v1/models/m", "/app.js",
         "/openapi.json", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/%00", "/app.js%00", "//",
         "/static/../app.js", "*", "http://other/", "/?" + "a=b&" * 3000,
         "/v1/models/" + "x" * 5000)


class Refused(Exception):
    """The process did not take the request; that is fine."""


class _Running:
    """The process under test, started once and before any fork."""

    front: Any = None
    stack = contextlib.ExitStack()
    log: Any = None
    memory = 0


# --- making -----------------------------------------------------------------------------------


def make(draw: random.Random) -> bytes:
    """A request with one to three changes."""
    if draw.random() < 0.1:
        head = [f"GET {draw.choice(_GETS)} HTTP/1.1", "Host: localhost", "Connection: close"]
        raw = "\r\n".join([*_headers(draw, head), "", ""]).encode("utf-8", "surrogatepass")
        return change_bytes(draw, raw) if draw.random() < 0.5 else raw
    path = draw.choice(sorted(BODIES))
    body = _body(draw, path)
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close",
            "Content-Type: application/json"]
    way = draw.random()
    if way < 0.1:
        head.append("Transfer-Encoding: chunked")
        body = _chunks(draw, body)
    else:
        head.append(f"Content-Length: {len(body) if way < 0.9 else _length(draw, len(body))}")
    if draw.random() < 0.25:
        head = _headers(draw, head)
    raw = "\r\n".join([*head, "", ""]).encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        raw = change_bytes(draw, raw)
    return raw + body


def _body(draw: random.Random, path: str) -> bytes:
    value: Any = json.loads(json.dumps(BODIES[path]))
    act = draw.random()
    if act < 0.12:
        value[draw.choice(("stop", "logit_bias", "tools", "messages", "prompt", "tokens", "content",
                           "metadata", "response_format", "grammar", "n", "user"))] = _giant(draw)
    else:
        for _ in range(draw.choice((1, 1, 2, 3))):
            value = change_value(draw, value)
    if act < 0.2 and isinstance(value, dict):
        value[draw.choice(sorted(BODIES[path]))] = draw.choice((*VALUES, "\ud800", 10**400, {
            "type": "json_schema", "json_schema": {"schema": draw.choice(_SCHEMAS)}}))
    raw = json.dumps(value).encode("utf-8", "surrogatepass")
    way = draw.random()
    if way < 0.12:
        raw = change_bytes(draw, raw)
    elif way < 0.14:
        raw = draw.choice((b"[", b'{"a":', b'{"messages":[')) * draw.choice((1000, 100_000))
    elif way < 0.17:  # the same key twice
        raw = raw[:-1] + b"," + raw[1:]
    elif way < 0.2:
        raw = raw.decode("utf-8", "surrogatepass").encode(
            draw.choice(("utf-16", "utf-32", "latin-1", "utf-8-sig")), "replace")
    return raw


def _giant(draw: random.Random) -> Any:
    """Too many of something."""
    count = draw.choice((200, 2000, 20_000))
    return draw.choice((
        lambda: ["x"] * count, lambda: {str(i): 1 for i in range(count)},
        lambda: [[i, 1] for i in range(count)], lambda: [_TOOL] * count,
        lambda: [{"role": "user", "content": "x"}] * count, lambda: "a" * 30 * count,
        lambda: list(range(count)), lambda: int("9" * min(count, 4000)), lambda: [[]] * count,
        lambda: [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * count}}]}],
        lambda: 'root ::= "a"' + ' | "b"' * count, lambda: "\U0001f642" * count,
    ))()


def _length(draw: random.Random, true: int) -> str:
    return str(draw.choice((0, 1, true - 1, true + 1, true + 5000, -1, 10**10, "9" * 100, "0x10",
                            "1e3", " 5", "5, 5", "", "\u0665")))


def _chunks(draw: random.Random, body: bytes) -> bytes:
    """The body in chunks, some of them not what they say."""
    if draw.random() < 0.1:
        return b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n"
    out, at = b"", 0
    while at < len(body):
        part = body[at : at + draw.choice((1, 7, 1000, 100_000))]
        size: Any = f"{len(part):x}" if draw.random() < 0.95 else draw.choice(
            ("0", "-1", "ffffffffffffffffff", "g", "5;" + "x" * 9000, "0x5", ""))
        out += str(size).encode() + b"\r\n" + part + b"\r\n"
        at += len(part)
    return out + draw.choice((b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b""))


def _headers(draw: random.Random, head: list[str]) -> list[str]:
    """More headers, or others."""
    extra = draw.choice((
        lambda: [f"X-{i}: y" for i in range(draw.choice((50, 500, 5000)))],
        lambda: ["X: " + "y" * draw.choice((1000, 30_000, 200_000))],
        lambda: ["Content-Length: 5"], lambda: ["Content-Length: 5", "Content-Length: 6"],
        lambda: ["Transfer-Encoding: chunked"], lambda: ["Transfer-Encoding: gzip, chunked"],
        lambda: ["Expect: 100-continue"], lambda: ["Connection: upgrade", "Upgrade: websocket"],
        lambda: [f"Authorization: {draw.choice(TEXTS)}"], lambda: ["Authorization: Bearer é"],
        lambda: ["Content-Type: " + draw.choice(("text/plain", "", "a/b;;=", "a/json;x"))],
        lambda: ["Content-Encoding: gzip"], lambda: ["Host: a", "Host: b"], lambda: [": x"],
        lambda: ["A\0: b"], lambda: ["A: b\0c"], lambda: [" folded: x"], lambda: ["no colon"],
        lambda: ["Origin: https://evil.example", "Access-Control-Request-Method: POST"],
        lambda: ["Range: bytes=0-5,7-9,-1"], lambda: ["If-None-Match: *"],
    ))()
    first = head[0]
    if draw.random() < 0.2:
        first = draw.choice((first.replace("1.1", "1.0"), first.replace("1.1", "9.9"),
                             first.replace("POST", "BREW"), first.replace("POST", "GET"),
                             first + " x", "", "PRI * HTTP/2.0", "x" * 70_000))
    at = draw.randrange(1, len(head) + 1)
    return [first, *head[1:at], *extra, *head[at:]]


# --- use --------------------------------------------------------------------------------------


def prepare() -> None:
    """Start the process; what it writes to standard error is kept."""
    if _Running.front is not None:
        return
    from tests.kit.server_peer import Front

    _Running.log = tempfile.TemporaryFile()
    kept = os.dup(2)
    os.dup2(_Running.log.fileno(), 2)
    try:
        front = Front(MODEL, parallel=8, queue=1000, client_timeout=3.0)
        front.ready()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    _Running.front = front
    for _ in range(20):
        _good()
    _Running.memory = psutil.Process(front.child.process.pid).memory_info().rss


def finish() -> str:
    """End the process; what is wrong with how it has fared, if anything."""
    front = _Running.front
    wrong = []
    try:
        _good()
        grown = psutil.Process(front.child.process.pid).memory_info().rss - _Running.memory
        if grown > MOST_GROWTH:
            wrong.append(f"the process has grown by {grown >> 20} MiB")
    except (OSError, http.client.HTTPException, AssertionError, psutil.Error) as error:
        wrong.append(f"afterwards a good request fails: {error!r}")
    front.close()
    _Running.front = None
    _Running.log.seek(0)
    text = _Running.log.read().decode("utf-8", "replace")
    _Running.log.close()
    if "Traceback" in text:
        at = text.index("Traceback")
        wrong.append(f"standard error has {text.count('Traceback')} tracebacks, the first: "
                     f"{text[max(0, at - 200) : at + 6000]}")
    return "; ".join(wrong)


def _address() -> tuple[str, int]:
    host, _, port = _Running.front.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def _good() -> None:
    connection = http.client.HTTPConnection(*_address(), timeout=SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 2}),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
    finally:
        connection.close()


def examine(data: bytes, directory: Path) -> str:
    """Send the bytes, then nothing more, and read what comes."""
    del directory
    with socket.create_connection(_address(), timeout=SECONDS) as sock:
        with contextlib.suppress(ConnectionError):  # it may answer and leave before all is sent
            sock.sendall(data)
        if not select.select([sock], [], [], _PATIENCE)[0]:  # it waits for the rest
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        answer = _read(sock)
    if not answer:
        raise Refused("the connection was closed")
    line = answer.partition(b"\r\n")[0].decode("latin-1")
    assert line.startswith("HTTP/1.1 "), line
    status = int(line.split()[1])
    assert b"Traceback" not in answer
    assert status < 500, answer[:600]
    if status >= 400:
        head, _, told = answer.partition(b"\r\n\r\n")
        if b"application/json" in head.lower() and b"chunked" not in head.lower():
            assert json.loads(told)["error"]["message"], answer[:600]
        raise Refused(f"status {status}")
    return str(status)


def _read(sock: socket.socket) -> bytes:
    """One answer, or what there is until the connection ends."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while len(answer) < _MOST_ANSWER and (part := sock.recv(1 << 16)):
            answer += part
            head, end, body = answer.partition(b"\r\n\r\n")
            size = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            if end and size and len(body) >= int(size[1]):
                break
    return answer


KIND = Kind("http", make, examine, prepare, Refused, finish)
