"""Requests as proxies and browsers send them: slashes, absolute-form targets, preflights."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import requests

from pipeinfer.cli.serve import origins
from pipeinfer.config import ServeConfig
from pipeinfer.errors import UsageError
from pipeinfer.server.middleware import normalized
from tests.kit.server_peer import MODEL, SECONDS, front
from tests.server.test_http import error

pytestmark = pytest.mark.slow
PAGE = "https://friend.example"


@pytest.fixture(scope="module")
def server():
    with front(MODEL, cors_origin=(PAGE,), keys=("k",)) as made:
        yield made


def exchange(server, first, *lines):
    """The status and the body of a request in these words."""
    answer = server.raw("\r\n".join([first, *lines, "Connection: close", "", ""]).encode()).decode()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


@pytest.mark.parametrize(("path", "meant"), [
    ("/", "/"), ("//", "/"), ("/health/", "/health"), ("//v1///models//", "/v1/models"),
    ("/v1/models/a/b", "/v1/models/a/b"), ("http://other:80/health", "/health"),
    ("HTTPS://other/v1/models/", "/v1/models"), ("http://other", "/"),
    ("/v1/models/http://a", "/v1/models/http:/a"), ("*", "/*")])
def test_the_path_that_is_meant(path, meant):
    headers = [(b"host", b"here"), (b"accept", b"*/*")]
    found = normalized({"path": path, "headers": headers})
    assert found["path"] == meant
    host = {"http://other:80/health": b"other:80", "http://other": b"other",
            "HTTPS://other/v1/models/": b"other"}.get(path, b"here")
    assert sorted(found["headers"]) == [(b"accept", b"*/*"), (b"host", host)]


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions//"])
def test_extra_slashes_are_answered_and_not_redirected(server, path):
    """A redirect to an absolute URL loses the path and the https of a proxy."""
    answer = requests.post(server.url + path, json={"prompt": "x"}, allow_redirects=False,
                           timeout=SECONDS, headers={"Authorization": "Bearer k"})
    assert answer.status_code == 200
    assert answer.json()["object"] == "text_completion"
    assert error(requests.post(server.url + path, json={"prompt": "x"}, timeout=SECONDS), 401)


def test_extra_slashes_of_a_get_lead_to_the_same(server):
    listed = server.get("/v1/models/", headers={"Authorization": "Bearer k"}, allow_redirects=False)
    assert (listed.status_code, listed.json()["object"]) == (200, "list")
    assert server.get("//health/", allow_redirects=False).status_code == 200  # and needs no key
    assert server.get("/nothing/", headers={"Authorization": "Bearer k"},
                      allow_redirects=False).status_code == 404


def test_an_absolute_form_target_is_answered_under_its_own_host(server):
    where = urlsplit(server.url).netloc
    status, body = exchange(server, f"GET http://{where}/health HTTP/1.1", "Host: other.example")
    assert (status, '"status":"ok"' in body) == (200, True)
    status, body = exchange(server, "GET http://evil.example/health HTTP/1.1", f"Host: {where}")
    assert (status, "evil.example" in body) == (403, True)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_a_preflight_allows_every_method_of_the_api(server, method):
    answer = requests.options(server.url + "/v1/responses/resp_1", timeout=SECONDS, headers={
        "Origin": PAGE, "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,x-stainless-lang"})
    assert answer.status_code == 200  # the JavaScript client sends headers of its own
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert method in answer.headers["Access-Control-Allow-Methods"].split(", ")


def test_a_page_may_read_the_headers_that_say_when_to_come_back(server):
    answer = server.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer k"})
    exposed = answer.headers["Access-Control-Expose-Headers"].lower().split(", ")
    assert {"retry-after", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests",
            "x-ratelimit-reset-requests", "x-ratelimit-remaining-tokens"} <= set(exposed)


def test_origins_are_those_that_browsers_send():
    given = ("https://X.example/", "http://localhost:3000", "*", "null")
    assert origins(ServeConfig(cors_origin=given)) == (
        "https://x.example", "http://localhost:3000", "*", "null")


@pytest.mark.parametrize("wrong", ["x.example", "https://x/chat", "https://x/?a", "https://", "",
                                   "https://x//", "https://a https://b", "https://*.x"])
def test_an_origin_that_would_never_match_is_refused(wrong):
    with pytest.raises(UsageError, match="is not an origin: write scheme, host and port"):
        origins(ServeConfig(cors_origin=(wrong,)))
