"""Pieces of prompts on other hosts: what a lost host had, and what another split needs.

Each host serves its store at a port of its own, not over MPI, whose messages belong to the thread
that computes. A file that a stage has written is copied to the host of the next stage. A stage
that lacks a piece fetches it. Both sides of a connection know the job's key, which rank 0 makes and
sends over MPI: the server sends a nonce, and the client answers with its digest under the key.
Frames are a length and msgpack. A peer that does not answer is left alone for a while.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

from pipeinfer.core.control import Peers
from pipeinfer.runtime.kv_store import KvStore
from pipeinfer.scheduler.stored import Layers

_LENGTH = struct.Struct("<Q")
_MOST = 1 << 30
_NONCE, _DIGEST = 16, "sha256"
_CONNECT, _WAIT, _REST = 2.0, 20.0, 30.0  #: seconds: to connect, for an answer, without a peer


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """A request for the files of a piece that hold some of `layers`."""

    key: bytes
    layers: Layers


class Copy(msgspec.Struct, frozen=True, tag=True):
    """A file to store."""

    name: str
    data: bytes


_request = msgspec.msgpack.Decoder(Fetch | Copy)
_answer = msgspec.msgpack.Decoder(list[Copy])


class StorePeers:
    """This host's server, and its connections to others. store: of this host."""

    def __init__(self, store: KvStore) -> None:
        self._store, self._secret = store, b""
        self._buddy: tuple[str, ...] = ()
        self._others: list[tuple[str, ...]] = []
        self._open: dict[tuple[tuple[str, ...], int], socket.socket] = {}  # by peer and thread
        self._resting: dict[tuple[str, ...], float] = {}  # until when
        self._server = _Server(("", 0), _Handler)
        self._server.peers = self
        threading.Thread(target=self._server.serve_forever, name="kv-peers", daemon=True).start()
        store.fetch, store.copied = self.fetch, self.copy

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this host: one of its addresses with the port."""
        port = self._server.server_address[1]
        found = [one.address for card in psutil.net_if_addrs().values() for one in card
                 if one.family == socket.AF_INET and not one.address.startswith("127.")]
        return tuple(f"{address}:{port}" for address in found)

    def meet(self, message: Peers, stage: int) -> None:
        """Use other peers from now on. stage: of this process, from 1"""
        self._secret = bytes.fromhex(message.key)
        own, every = message.hosts[stage - 1], list(dict.fromkeys(message.hosts))
        after = [*message.hosts[stage:], *message.hosts[: stage - 1]]
        self._others = [one for one in every if one and one != own]
        self._buddy = next((one for one in after if one and one != own), ())

    def copy(self, name: str, data: bytes) -> None:
        """Send a file to the next stage's host. For the thread that has written it."""
        if self._buddy:
            self._ask(self._buddy, Copy(name, data))

    def fetch(self, key: bytes, layers: Layers) -> None:
        """Store what other hosts have of a piece, until it is whole."""
        for one in self._others:
            for found in self._ask(one, Fetch(key, layers)):
                self._store.accept(found.name, found.data)
            if self._store.covers(key, layers):
                return

    def answer(self, request: Fetch | Copy) -> list[Copy]:
        """Handle a request of another host."""
        match request:
            case Fetch(key, layers):
                return [Copy(name, data) for name, data in self._store.files_of(key, layers)]
            case Copy(name, data):
                self._store.accept(name, data)
                return []

    def close(self) -> None:
        """End the server and the connections."""
        self._server.shutdown()
        self._server.server_close()
        for opened in self._open.values():
            opened.close()

    def _ask(self, peer: tuple[str, ...], request: Fetch | Copy) -> list[Copy]:
        """Return a peer's answer; nothing from one that rests or fails."""
        if time.monotonic() < self._resting.get(peer, 0.0):
            return []
        place = peer, threading.get_ident()
        try:
            opened = self._open.get(place) or self._connect(peer)
            self._open[place] = opened
            _send(opened, msgspec.msgpack.encode(request))
            return _answer.decode(_receive(opened))
        except (OSError, msgspec.DecodeError, EOFError) as error:
            if (failed := self._open.pop(place, None)) is not None:
                failed.close()
            if not self._resting.get(peer):
                sys.stderr.write(f"pipeinfer: note: {peer[0]} gives and takes no prompts at the "
                                 f"moment: {error}\n")
            self._resting[peer] = time.monotonic() + _REST
            return []

    def _connect(self, peer: Sequence[str]) -> socket.socket:
        error: OSError = ConnectionError("it has no address")
        for one in peer:  # which of its addresses this host reaches is not known
            host, _, port = one.rpartition(":")
            try:
                opened = socket.create_connection((host, int(port)), _CONNECT)
            except OSError as found:
                error = found
                continue
            try:
                opened.settimeout(_WAIT)
                nonce = _exactly(opened, _NONCE)
                opened.sendall(hmac.digest(self._secret, nonce, _DIGEST))
            except BaseException:
                opened.close()
                raise
            return opened
        raise error

    def knows(self, nonce: bytes, proof: bytes) -> bool:
        """Whether a client has the job's key."""
        return bool(self._secret) and hmac.compare_digest(
            proof, hmac.digest(self._secret, nonce, _DIGEST))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    peers: StorePeers


class _Handler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        """Answer one client until it leaves."""
        peers, nonce = self.server.peers, secrets.token_bytes(_NONCE)
        with contextlib.suppress(OSError, msgspec.DecodeError, EOFError):
            self.request.settimeout(_WAIT)
            self.request.sendall(nonce)
            if not peers.knows(nonce, _exactly(self.request, 32)):
                return
            self.request.settimeout(None)  # the job may be idle for hours
            while True:  # until the client closes, which ends `_receive`
                found = peers.answer(_request.decode(_receive(self.request)))
                _send(self.request, msgspec.msgpack.encode(found))


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)) + data)


def _receive(of: socket.socket) -> bytes:
    size, = _LENGTH.unpack(_exactly(of, _LENGTH.size))
    if size > _MOST:
        raise EOFError(f"a frame of {size} bytes")
    return _exactly(of, size)


def _exactly(of: socket.socket, size: int) -> bytes:
    data: Any = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = of.recv_into(view[at:])
        if not count:
            raise EOFError("the connection ended")
        at += count
    return bytes(data)
