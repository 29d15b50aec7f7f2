"""The HTTP process's end of the link to an engine, and a model's vocabulary."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from pipeinfer.errors import ProtocolError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.frames import (
    FROM_ENGINE,
    HEADER,
    MAX_FRAME,
    ClientFrame,
    EngineFrame,
    decode,
    encode,
)
from pipeinfer.server.settings import Settings

_log = logging.getLogger("pipeinfer.server")


class ConnectedEngine:
    """The link to an engine, and its settings."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 settings: Settings) -> None:
        self._reader, self._writer, self.settings = reader, writer, settings

    @classmethod
    async def over(cls, link: socket.socket, settings: Settings) -> ConnectedEngine:
        """Return the engine at the other end of a connected socket."""
        return cls(*await asyncio.open_connection(sock=link), settings)

    def send(self, frame: ClientFrame) -> None:
        """Send a frame, unless the engine has gone."""
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def read(self, on_frame: Callable[[EngineFrame], None], until: Callable[[], bool]) -> str:
        """Read frames until the engine has gone, or `until` returns True; return why, "" for the
        latter."""
        try:
            # what comes after the engine's end, or from one that was replaced, must change nothing
            while not until():
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_FRAME:
                    raise ProtocolError(f"a frame announces {size} bytes")
                on_frame(decode(await self._reader.readexactly(size), FROM_ENGINE))
        except (asyncio.IncompleteReadError, OSError):
            return "rank 0 has died"
        except Exception as error:  # of any kind: else clients would wait forever
            _log.exception("a frame of rank 0 cannot be handled")
            return f"a message of rank 0 is malformed: {error}"
        finally:
            self.close()
        return ""

    def close(self) -> None:
        self._writer.close()


def vocabulary(model: str) -> Tokenizer:
    """Return a model's vocabulary with what every request needs of it. Raises PipeinferError."""
    tokenizer = open_tokenizer(model)
    tokenizer.keep_apart()
    _ = tokenizer.eog_ids, tokenizer.marks.pattern
    return tokenizer
