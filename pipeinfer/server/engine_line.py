"""The HTTP process's end of a link to one engine: its frames, to whoever hears them now.

Knows frames and a socket, not what they mean.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from pipeinfer.errors import ProtocolError
from pipeinfer.server.frames import (
    FROM_ENGINE,
    HEADER,
    MAX_FRAME,
    ClientFrame,
    EngineFrame,
    decode,
    encode,
)

_log = logging.getLogger("pipeinfer.server")


def nobody(frame: EngineFrame) -> None:
    """Hears nothing."""
    del frame


class EngineLine:
    """hear: gets every frame; may be another function from the next frame on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hear: Callable[[EngineFrame], None] = nobody
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> EngineLine:
        """The line over a connected socket."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, frame: ClientFrame) -> None:
        """To the engine, unless it has gone."""
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def run(self, until: Callable[[], bool] = lambda: False) -> str:
        """Read until the engine has gone, or `until` after a frame; why, then."""
        try:
            while not until():
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_FRAME:
                    raise ProtocolError(f"a frame announces {size} bytes")
                self.hear(decode(await self._reader.readexactly(size), FROM_ENGINE))
        except (asyncio.IncompleteReadError, OSError):
            return "rank 0 has died"
        except Exception as error:  # whatever it is, clients must not wait for nothing
            _log.exception("a frame of rank 0 cannot be handled")
            return f"a message of rank 0 is malformed: {error}"
        finally:
            self.close()
        return ""

    def close(self) -> None:
        """Say and hear nothing more."""
        self.hear = nobody
        self._writer.close()
