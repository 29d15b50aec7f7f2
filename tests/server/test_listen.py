"""The port of a server that starts while another program has it."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from urllib.parse import urlsplit

import pytest

from pipeinfer.errors import UsageError
from pipeinfer.server import http_process
from tests.kit.served import serve


@contextlib.contextmanager
def occupied(answer, requests):
    """A program that has a port, answers so many requests with these bytes, and goes."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)

    def run():
        for _ in range(requests):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
        listener.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(20)
        assert not thread.is_alive()


def health(status, code=503):
    body = f'{{"status": "{status}"}}'.encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (code, len(body), body)


@pytest.mark.slow
def test_more_connections_than_files_are_refused_for_now():
    """And not a traceback, or an end without an answer: clients come again."""
    few = ["prlimit", "--nofile=64", sys.executable, "-m", "pipeinfer"]
    with serve(1, "-m", "embedded", "-c", "256", command=few) as server, \
            contextlib.ExitStack() as stack:
        server.wait_until_ready()
        where = urlsplit(server.url)
        answers = []
        for _ in range(60):
            client = stack.enter_context(
                socket.create_connection((where.hostname, where.port), 20))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers.append(client.recv(4096).lower())
        codes = [answer[9:12] for answer in answers]
        assert set(codes) == {b"200", b"503"}
        assert codes.count(b"200") >= 10
        assert all(b"retry-after:" in answer for answer in answers if answer[9:12] == b"503")
        assert "leaves room for" in "".join(server.log)
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("status", ["draining", "stopped", "failed"])
def test_a_restart_waits_for_the_server_before(status, capsys):
    with occupied(health(status), 3) as port:
        sock = http_process.listen("127.0.0.1", port, 60.0)
    with sock:
        assert sock.getsockname()[1] == port
    assert capsys.readouterr().err.count("completes its last answers: waiting") == 1


@pytest.mark.parametrize("answer", [
    health("ok", 200), health("loading"), b"SSH-2.0-OpenSSH\r\n", b"", b"HTTP/1.1 200 OK\r\n\r\n[]",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"\0" * 100,
    b"HTTP/1.1 404 X\r\nContent-Length: 5\r\n\r\nnull "])
def test_other_programs_are_not_waited_for(answer):
    with occupied(answer, 2) as port, pytest.raises(
            UsageError, match=f"port {port} of 127.0.0.1 is in use by another program: choose"):
        http_process.listen("127.0.0.1", port, 60.0)


def test_the_wait_ends(monkeypatch):
    monkeypatch.setattr(http_process, "_HANDOVER_SECONDS", 0.0)
    with occupied(health("draining"), 1) as port, pytest.raises(
            UsageError, match="in use by a server that is still shutting down: end it, or choose"):
        http_process.listen("127.0.0.1", port, 60.0)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "no-such-host.invalid"])
def test_a_name_that_is_no_address_is_said(host):
    with pytest.raises(UsageError, match=(
            rf"--host {re.escape(host)} is not an address of this host: \w")):
        http_process.listen(host, 0, 60.0)
