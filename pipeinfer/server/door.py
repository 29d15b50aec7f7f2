"""The HTTP process that outlives the job: `python -m pipeinfer.server.door PATH [LINK]`, started
by the supervisor. LINK is a socket by which the supervisor controls it (`door_control`).

PATH is a Unix socket that only this user can use. Every job's rank 0 connects to it and sends its
settings; the first one also passes the listening socket for clients. When a job has ended,
requests wait for the next one; if that has connected while the other one served, it continues them
at once. The process ends after rank 0's Bye, on SIGTERM, which means that no job follows, or with
its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeinfer.loading import uncollected

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pipeinfer.server.door_control import MovingHub
    from pipeinfer.server.settings import Settings

_SET_DEATH_SIGNAL = 1  #: of prctl
_ENTER_SECONDS = 30.0
_log = logging.getLogger("pipeinfer.server")


class Guest(NamedTuple):
    """A rank 0 that has connected: the link to it, its settings, and the listening socket if it
    passed one."""

    link: socket.socket
    settings: Settings
    listener: socket.socket | None


class Entrance:
    """The Unix socket at PATH. url: the address for clients, "" before the first rank 0."""

    def __init__(self, path: str) -> None:
        self.url = ""
        self._path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(4)

    def first(self) -> Guest:
        """Wait for the first rank 0."""
        while True:
            if (guest := self._admit(self._socket.accept()[0])) is not None:
                return guest

    async def next(self) -> Guest:
        """Wait for the next rank 0."""
        self._socket.setblocking(False)
        while True:
            link, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            if (guest := await asyncio.to_thread(self._admit, link)) is not None:
                return guest

    def close(self) -> None:
        """Remove the socket and its folder."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()

    def _admit(self, link: socket.socket) -> Guest | None:
        """Accept a rank 0; None for another user's process or an invalid message."""
        from pipeinfer.errors import ProtocolError

        try:
            return self._enter(link)
        except (OSError, EOFError, ProtocolError) as error:
            _log.warning("a rank 0 could not enter: %s", error)
            link.close()
            return None

    def _enter(self, link: socket.socket) -> Guest:
        from pipeinfer.server.frames import FIRST, HEADER, Welcome, encode
        from pipeinfer.server.http_process import first_frame

        link.settimeout(_ENTER_SECONDS)
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise EOFError("it belongs to another user")
        link.sendall(encode(Welcome(self.url)))
        begun, files, _, _ = socket.recv_fds(link, HEADER.size, 1)
        listener = socket.socket(fileno=files[0]) if files else None
        if listener is None and not self.url:
            raise EOFError("it brings no socket for clients")
        settings = first_frame(link, FIRST, begun)
        link.setblocking(False)
        return Guest(link, settings, listener)


class _Current:
    """The application with the settings of the present job. New requests wait while the hub
    holds them."""

    def __init__(self, app: ASGIApp, hub: MovingHub) -> None:
        self.app, self._hub = app, hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._hub.admission()
        await self.app(scope, receive, send)


def main(path: str, link: int | None = None) -> int:
    """Serve until no further job comes; return the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # before the socket exists
    _end_with_parent()
    entrance = Entrance(path)
    try:
        return _serve(entrance, entrance.first(), link)
    finally:
        entrance.close()


def _end_with_parent() -> None:
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def _serve(entrance: Entrance, guest: Guest, link: int | None) -> int:
    import uvloop

    with uncollected():
        from pipeinfer.server.app import Server
        from pipeinfer.server.door_control import MovingHub, obey
        from pipeinfer.server.http_process import url_of
        from pipeinfer.server.http_server import prepare, serve
        from pipeinfer.server.metrics import Metrics

    listener = guest.listener
    assert listener is not None
    prepare()
    entrance.url = url_of(listener, guest.settings)
    hub = MovingHub(guest.settings, Metrics(), entrance.url)
    app = _Current(Server(hub).asgi, hub)

    def renew() -> None:
        app.app = Server(hub).asgi

    hub.renewed = renew

    async def run() -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hub.leave)
        if link is not None:
            hub.orders = asyncio.create_task(obey(hub, socket.socket(fileno=link)))
        return await serve(hub, _follow(hub, entrance, guest), app, listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _follow(hub: MovingHub, entrance: Entrance, guest: Guest) -> None:
    """Accept one rank 0 after the other; the hub decides which one serves."""
    from pipeinfer.server.engine_line import EngineLine
    from pipeinfer.server.entered import Entered

    while True:
        hub.enter(Entered(await EngineLine.open(guest.link), guest.settings))
        guest = await entrance.next()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:3])))
