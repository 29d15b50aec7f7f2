"""Pieces of prompts on other hosts: what a lost host had, and what another split needs.

Each host serves its store over HTTP at a port of its own, not over MPI, whose messages belong to
the thread that computes. A file that a stage has written is copied to the host of the next stage
(PUT), and a stage that lacks a piece fetches it (GET). A request carries the digest of its path
under the job's key, which rank 0 makes and sends over MPI. A peer that does not answer is left
alone for a while.
"""

from __future__ import annotations

import hmac
import http.client
import http.server
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import psutil
from typing_extensions import override

from pipeinfer.core.control import Peers
from pipeinfer.runtime.kv_store import KvStore
from pipeinfer.scheduler.stored import Layers

_CONNECT, _ANSWER, _REST = 2.0, 20.0, 30.0  #: seconds: to connect, for an answer, without a peer
_MOST = 1 << 30  #: bytes of a file
_files = msgspec.msgpack.Decoder(list[tuple[str, bytes]])


class StorePeers:
    """This host's server, and its requests to others. store: of this host."""

    def __init__(self, store: KvStore) -> None:
        self.store, self._secret = store, b""
        self._buddy: tuple[str, ...] = ()
        self._others: list[tuple[str, ...]] = []
        self._works: dict[tuple[str, ...], str] = {}  # the address of a peer that was reached
        self._resting: dict[tuple[str, ...], float] = {}  # until when
        self.server = http.server.ThreadingHTTPServer(
            ("", 0), type("Handler", (_Handler,), {"peers": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, name="kv-peers", daemon=True).start()
        store.fetch, store.copied = self.fetch, self.copy

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this host: its addresses, with the port."""
        found = [one.address for card in psutil.net_if_addrs().values() for one in card
                 if one.family == socket.AF_INET and not one.address.startswith("127.")]
        return tuple(f"{address}:{self.server.server_port}" for address in found)

    def meet(self, message: Peers, stage: int) -> None:
        """Use other peers from now on. stage: of this process, from 1"""
        self._secret = bytes.fromhex(message.key)
        own = message.hosts[stage - 1]
        after = dict.fromkeys((*message.hosts[stage:], *message.hosts[: stage - 1]))
        self._others = [one for one in after if one and one != own]
        self._buddy = next(iter(self._others), ())
        self._resting.clear()  # who did not answer may be another process by now

    def copy(self, name: str, data: bytes) -> None:
        """Send a file to the next stage's host. For the thread that has written it."""
        if self._buddy:
            self._ask(self._buddy, "PUT", f"/{name}", data)

    def fetch(self, key: bytes, layers: Layers) -> None:
        """Store what other hosts have of a piece, until it is whole."""
        for one in self._others:
            found = self._ask(one, "GET", f"/{key.hex()}.{layers[0]}-{layers[1]}")
            for name, data in _files.decode(found) if found else ():
                self.store.accept(name, data)
            if self.store.covers(key, layers):
                return

    def proof(self, method: str, path: str) -> str:
        """Return what a request of this job carries; nothing until the key is known."""
        if not self._secret:
            return ""
        return hmac.digest(self._secret, f"{method} {path}".encode(), "sha256").hex()

    def close(self) -> None:
        """End the server."""
        self.server.shutdown()
        self.server.server_close()

    def _ask(self, peer: tuple[str, ...], method: str, path: str, data: bytes = b"") -> bytes:
        """Return a peer's answer; nothing from one that rests or fails."""
        if time.monotonic() < self._resting.get(peer, 0.0):
            return b""
        why = "it has no address"
        for address in dict.fromkeys((*filter(None, [self._works.get(peer)]), *peer)):
            connection = http.client.HTTPConnection(address, timeout=_CONNECT)
            try:
                connection.connect()
                connection.sock.settimeout(_ANSWER)
                connection.request(method, path, data,
                                   {"Authorization": self.proof(method, path)})
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ConnectionError(f"it answers {answer.status}")
                found = answer.read()
                self._works[peer] = address
                return found
            except (OSError, http.client.HTTPException) as error:
                why = str(error)
            finally:
                connection.close()
        if not self._resting.get(peer):
            sys.stderr.write(f"pipeinfer: note: {peer[0]} gives and takes no prompts at the "
                             f"moment: {why}\n")
        self._resting[peer] = time.monotonic() + _REST
        return b""


class _Handler(http.server.BaseHTTPRequestHandler):
    peers: StorePeers
    timeout = _ANSWER

    def do_GET(self) -> None:
        """Answer with the files of a piece that hold some of the layers."""
        if self._allowed():
            key, _, layers = self.path[1:].partition(".")
            start, _, stop = layers.partition("-")
            self._reply(200, msgspec.msgpack.encode(self.peers.store.files_of(
                bytes.fromhex(key), (int(start), int(stop)))))

    def do_PUT(self) -> None:
        """Store a file."""
        if self._allowed():
            data = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), _MOST))
            self.peers.store.accept(self.path[1:], data)
            self._reply(200)

    def _allowed(self) -> bool:
        proof = self.peers.proof(self.command, self.path)
        given = self.headers.get("Authorization", "")
        good = bool(proof) and hmac.compare_digest(given.encode(), proof.encode())
        if not good:
            self._reply(403)
        return good

    def _reply(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a miss is no event."""
