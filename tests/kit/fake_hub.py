"""A small server that speaks as much of the Hugging Face hub's protocol as clients need.

Files of git-lfs are led, as on the hub, to another host (the same server under another name), so
that a token which follows there is seen. Everything that was asked is in `asked`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
_BLOCK = 1 << 14


@dataclass
class Asked:
    """One request. sent: bytes of a file that went out."""

    method: str
    path: str
    start: int = 0
    token: str = ""
    sent: int = 0


@dataclass
class Hub:
    """Repositories and how the server misbehaves.

    repos: files by repository. gated, private: repositories that need the token `good`. cut_after:
    bytes of a file after which each answer breaks off. stall_after: likewise, after which it waits
    for `go_on`. damaged: files with a wrong byte. ignores_ranges: as some proxies do. status: of
    every answer, if not 0.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    cut_after: int = 0
    stall_after: int = 0
    damaged: set[str] = field(default_factory=set)
    ignores_ranges: bool = False
    status: int = 0
    asked: list[Asked] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def sent(self) -> int:
        """Bytes of files that went out."""
        return sum(one.sent for one in self.asked)

    def fetched(self) -> list[Asked]:
        """Requests for the bytes of files."""
        return [one for one in self.asked if one.path.startswith("/cdn/") and one.method == "GET"]


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join(5.0)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *args: Any) -> None:
            del args

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            found = re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
            start = int(found[1]) if found and not hub.ignores_ranges else 0
            self.asked = Asked(self.command, path, int(found[1]) if found else 0, token)
            hub.asked.append(self.asked)
            if hub.status:
                self._say(hub.status, b"{}", {})
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/\w+)?", path):
                self._info(found[1], token)
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
                self._resolve(found[1], found[2], found[3], token)
            elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
                self._file(hub.repos[found[1]][found[2]], start, damaged=found[2] in hub.damaged)
            else:
                self._say(404, b"", {})

        def _refused(self, repo: str, token: str, *, files: bool) -> bool:
            if repo not in hub.repos or (repo in hub.private and token != "good"):
                self._say(404 if token == "good" else 401, b'{"error":"Repository not found"}',
                          {"X-Error-Code": "RepoNotFound", "X-Error-Message":
                           "Repository not found"})
            elif files and repo in hub.gated and token != "good":
                self._say(403 if token else 401, b'{"error":"gated"}', {
                    "X-Error-Code": "GatedRepo",
                    "X-Error-Message": f"Access to model {repo} is restricted."})
            else:
                return False
            return True

        def _info(self, repo: str, token: str) -> None:
            if self._refused(repo, token, files=False):
                return
            files = [{"rfilename": name, "size": len(data), "blobId": "b" * 40,
                      "lfs": {"sha256": _sha(data), "size": len(data), "pointerSize": 134}}
                     if _is_lfs(name) else
                     {"rfilename": name, "size": len(data), "blobId": "b" * 40}
                     for name, data in hub.repos[repo].items()]
            self._say(200, json.dumps({
                "_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False,
                "gated": "auto" if repo in hub.gated else False, "disabled": False, "tags": [],
                "siblings": files}).encode(), {"Content-Type": "application/json"})

        def _resolve(self, repo: str, revision: str, name: str, token: str) -> None:
            if self._refused(repo, token, files=True):
                return
            data = hub.repos[repo].get(name)
            if data is None or revision not in ("main", COMMIT):
                kind = "EntryNotFound" if data is None else "RevisionNotFound"
                self._say(404, b"", {"X-Error-Code": kind, "X-Repo-Commit": COMMIT})
            elif _is_lfs(name):
                self._say(302, b"", {
                    "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data)),
                    "X-Linked-ETag": f'"{_sha(data)}"',
                    "Location": f"http://localhost:{hub.port}/cdn/{repo}/{name}"})
            else:
                self._say(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{"b" * 40}"'})

        def _say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _file(self, data: bytes, start: int, *, damaged: bool) -> None:
            if damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            if start >= len(data):
                self._say(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("ETag", f'"{_sha(data)}"')
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if self.command == "GET":
                self._send(data, start)

        def _send(self, data: bytes, start: int) -> None:
            for at in range(start, len(data), _BLOCK):
                if hub.stall_after and self.asked.sent >= hub.stall_after:
                    hub.stalled.set()
                    hub.go_on.wait(60)
                if hub.cut_after and self.asked.sent >= hub.cut_after:
                    self.close_connection = True
                    return
                try:
                    self.wfile.write(data[at : at + _BLOCK])
                except OSError:
                    self.close_connection = True
                    return
                self.asked.sent += len(data[at : at + _BLOCK])

    return Handler


def _is_lfs(name: str) -> bool:
    return name.endswith(".gguf")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
