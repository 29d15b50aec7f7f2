"""Which web pages reach a server: host names, origins, what forms can send."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest
import requests

from pipeinfer.cli.serve import host_names
from pipeinfer.config import ServeConfig
from pipeinfer.errors import UsageError
from pipeinfer.server.errors import ApiError
from pipeinfer.server.middleware import MAX_HEADERS, Origins
from tests.kit.server_peer import MODEL, SECONDS, front
from tests.server.test_http import error

pytestmark = pytest.mark.slow
HERE = {b"host": b"localhost:8080"}


@pytest.fixture(scope="module")
def server():
    with front(MODEL, allow_host=("llm.example.org",),
               cors_origin=("https://friend.example",)) as made:
        yield made


def reasons(origins, method, **headers):
    """The code of the refusal, None for none."""
    sent = {**HERE, **{name.replace("_", "-").encode(): value.encode()
                       for name, value in headers.items()}}
    try:
        origins.check(method, sent)
    except ApiError as refusal:
        return refusal.code
    return None


@pytest.mark.parametrize("host", [
    "localhost", "LOCALHOST:8080", "127.0.0.1:8080", "[::1]:8080", "[::1]", "192.168.1.5:80",
    "llm.example.org", "llm.example.org.:443"])
def test_names_that_the_server_goes_by(host):
    assert reasons(Origins(("llm.example.org",), True), "GET", host=host) is None


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
    "llm.example.org.evil.example", "xlocalhost", "127.0.0.1@evil.example", "[::1", ":8080", "a b"])
def test_a_rebound_name_is_refused_where_the_server_is_local(host):
    assert reasons(Origins(("llm.example.org",), True), "GET", host=host) == "host_not_allowed"
    assert reasons(Origins((), False), "GET", host=host) is None


@pytest.mark.parametrize(("headers", "passes"), [
    ({}, True),  # no browser
    ({"origin": "http://localhost:8080"}, True),
    ({"origin": "https://localhost:8080"}, True),  # behind a proxy that speaks TLS
    ({"origin": "http://localhost:9999"}, False),
    ({"origin": "null"}, False),
    ({"origin": "https://evil.example"}, False),
    ({"origin": "https://friend.example"}, True),
    ({"origin": "https://llm.example.org"}, True),
    ({"sec_fetch_site": "same-origin", "origin": "https://behind.a.proxy"}, True),
    ({"sec_fetch_site": "none"}, True),
    ({"sec_fetch_site": "cross-site"}, False),
    ({"sec_fetch_site": "same-site", "origin": "http://localhost:9999"}, False),
    ({"sec_fetch_site": "cross-site", "origin": "https://friend.example"}, True),
])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_of_pages_of_other_sites_are_refused(method, headers, passes):
    origins = Origins(("llm.example.org",), True, ("https://friend.example",))
    assert (reasons(origins, method, **headers) is None) == passes
    assert reasons(Origins((), True, ("*",)), method, **headers) is None


def test_a_link_on_another_site_leads_to_the_page_but_posts_nothing():
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate",
            "sec_fetch_dest": "document"}
    assert reasons(Origins((), True), "GET", **link) is None
    assert reasons(Origins((), True), "POST", **link) == "origin_not_allowed"
    frame = {**link, "sec_fetch_dest": "iframe"}
    assert reasons(Origins((), True), "GET", **frame) == "origin_not_allowed"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/pipeline", "/nowhere"])
def test_a_rebound_name_reaches_nothing(server, path):
    answer = server.get(path, headers={"Host": "evil.example"})
    found = error(answer, 403)
    assert found["code"] == "host_not_allowed"
    assert "--allow-host" in found["message"]


def test_the_page_and_programs_go_on_working(server):
    port = urlsplit(server.url).port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "llm.example.org"):
        own = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert server.post("/v1/completions", {"prompt": "x"}, headers=own).status_code == 200
        assert server.get("/", headers={"Host": host, "Sec-Fetch-Site": "none"}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_a_page_of_another_site_gets_nothing_and_an_allowed_one_its_answer(server):
    evil = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    answer = server.post("/v1/completions", {"prompt": "x"}, headers=evil)
    found = error(answer, 403)
    assert found["code"] == "origin_not_allowed"
    assert "--cors-origin" in found["message"]
    assert "Access-Control-Allow-Origin" not in answer.headers
    friend = {"Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"}
    answer = server.post("/v1/completions", {"prompt": "x"}, headers=friend)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == "https://friend.example"


@pytest.mark.parametrize("kind", [
    None, "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"])
@pytest.mark.parametrize("path", ["/rebalance", "/v1/completions", "/v1/chat/completions"])
def test_what_a_form_can_send_changes_nothing(server, path, kind):
    server.peer.reset()
    answer = requests.post(server.url + path, b"{}", timeout=SECONDS,
                           headers={"Content-Type": kind} if kind else None)
    assert "application/json" in error(answer, 400)["message"]
    assert server.peer.seen == []


@pytest.mark.parametrize("one", [True, False])
def test_headers_have_a_limit_however_they_arrive(server, one):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    line = b"A: %s\r\n" % (b"x" * (MAX_HEADERS if one else 1000))
    with server.connect() as client:
        client.sendall(head + line * (1 if one else 80) + b"\r\n")
        assert client.recv(4096)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431")
    with server.connect() as client:
        client.sendall(head + b"A: %s\r\n\r\n" % (b"x" * (MAX_HEADERS - 200)))
        assert client.recv(4096)[:12] == b"HTTP/1.1 200"


def test_names_of_hosts_are_names():
    config = ServeConfig(allow_host=("LLM.example.org.",), host="box")
    assert host_names(config) == ("llm.example.org", "box")
    for wrong in ("https://llm.example.org", "a:80", "a/b", ""):
        with pytest.raises(UsageError, match="--allow-host"):
            host_names(ServeConfig(allow_host=(wrong,)))


def told(server, *lines, body=b"", version="1.1", host="localhost"):
    """The status and the headers that raw bytes are answered with, and whether the end follows."""
    head = [f"POST /v1/completions HTTP/{version}", f"Host: {host}", *lines, "", ""]
    answer = server.raw("\r\n".join(head).encode() + body)
    return int(answer[9:12]), answer


@pytest.mark.parametrize(("lines", "body", "version"), [
    (("Content-Length: 5", "Transfer-Encoding: chunked"), b"0\r\n\r\n", "1.1"),
    (("Content-Length: 2",), b"{}", "9.9"),
    (("Content-Length: 2",), b"{}", "2.0"),
    (("Content-Length: 2", "Content-Encoding: gzip"), b"\x1f\x8b", "1.1"),
    (("Content-Length: 2", "Content-Encoding: br"), b"{}", "1.1"),
])
def test_what_another_program_may_read_otherwise_is_refused(server, lines, body, version):
    status, _ = told(server, *lines, body=body, version=version)
    assert 400 <= status < 500
    assert server.peer.seen == []


@pytest.mark.parametrize("host", [
    "[::1].evil.com", "localhost#evil.com", "evil.com@localhost", "localhost:80:evil.com",
    "localhost/evil", "localhost, evil.com", "local host", "localhost?x", "[::1", "localhost:x"])
def test_a_host_is_a_name_or_an_address(server, host):
    status, answer = told(server, "Content-Length: 2", body=b"{}", host=host)
    assert 400 <= status < 500
    assert b"evil.com@" not in answer


def test_headers_that_drip_have_a_deadline():
    """A byte now and then does not start it again; an idle connection is closed as well."""
    with front(MODEL, client_timeout=1.0) as server:
        with server.connect() as client:
            client.settimeout(0.2)
            begin, sent = time.monotonic(), b""
            for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 1000:
                try:
                    client.sendall(bytes([byte]))
                    if client.recv(100) == b"":
                        break
                except TimeoutError:
                    sent += bytes([byte])
                except OSError:
                    break
            assert len(sent) < 100, "it was still open"
            assert time.monotonic() - begin < SECONDS
        answer = requests.get(server.url + "/health", timeout=SECONDS)
        assert answer.status_code == 200
