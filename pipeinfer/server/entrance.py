"""The listening Unix socket of the HTTP process, at which engines enter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import NamedTuple

from pipeinfer.errors import ProtocolError
from pipeinfer.server.frames import FIRST, HEADER, Welcome, encode
from pipeinfer.server.http_process import first_frame
from pipeinfer.server.orders import is_ours
from pipeinfer.server.settings import Settings

_ENTER_SECONDS = 30.0
_log = logging.getLogger("pipeinfer.server")


class Guest(NamedTuple):
    """A rank 0 that has connected: the link to it, its settings, and the listening socket if it
    passed one."""

    link: socket.socket
    settings: Settings
    listener: socket.socket | None


class Entrance:
    """The listening socket for engines."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener

    def first(self) -> Guest | None:
        """Wait for one rank 0; None if it cannot enter."""
        return self.admit(self._socket.accept()[0], "")

    async def next(self, url: str) -> Guest:
        """Wait for the next rank 0. url: the address for clients."""
        self._socket.setblocking(False)
        while True:
            link, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            if (guest := await asyncio.to_thread(self.admit, link, url)) is not None:
                return guest

    def close(self) -> None:
        """Remove the socket and its folder."""
        path = Path(self._socket.getsockname())
        self._socket.close()
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()

    def admit(self, link: socket.socket, url: str) -> Guest | None:
        """Accept a rank 0; None for another user's process or an invalid message."""
        try:
            return _enter(link, url)
        except (OSError, EOFError, ProtocolError) as error:
            _log.warning("a rank 0 could not enter: %s", error)
            link.close()
            return None


def _enter(link: socket.socket, url: str) -> Guest:
    link.settimeout(_ENTER_SECONDS)
    if not is_ours(link):
        raise EOFError("it belongs to another user")
    link.sendall(encode(Welcome(url)))
    begun, files, _, _ = socket.recv_fds(link, HEADER.size, 1)
    listener = socket.socket(fileno=files[0]) if files else None
    if listener is None and not url:
        raise EOFError("it sends no socket for clients")
    settings = first_frame(link, FIRST, begun)
    link.setblocking(False)
    return Guest(link, settings, listener)
