"""The HTTP process's end of the link to one engine: passes frames to a replaceable handler.

It decodes frames and does not interpret them.
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
    """Ignore a frame."""
    del frame


class EngineLine:
    """The link to one engine. hear: called with every frame; may be replaced at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hear: Callable[[EngineFrame], None] = nobody
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> EngineLine:
        """Return the line over a connected socket."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, frame: ClientFrame) -> None:
        """Send a frame, unless the engine has gone."""
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def run(self, until: Callable[[], bool] = lambda: False) -> str:
        """Read frames until the engine has gone, or `until` returns True; return why, "" for the
        latter."""
        try:
            while not until():
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_FRAME:
                    raise ProtocolError(f"a frame announces {size} bytes")
                self.hear(decode(await self._reader.readexactly(size), FROM_ENGINE))
        except (asyncio.IncompleteReadError, OSError):
            return "rank 0 has died"
        except Exception as error:  # of any kind: else clients would wait forever
            _log.exception("a frame of rank 0 cannot be handled")
            return f"a message of rank 0 is malformed: {error}"
        finally:
            self.close()
        return ""

    def close(self) -> None:
        """Close the link and ignore further frames."""
        self.hear = nobody
        self._writer.close()
