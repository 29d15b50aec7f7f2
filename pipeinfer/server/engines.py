"""An engine that has connected to the HTTP process: the link to it, its vocabulary, and the frames
that it sent before the engine before it had gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from pipeinfer.errors import PipeinferError, ProtocolError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.frames import (
    FROM_ENGINE,
    HEADER,
    MAX_FRAME,
    Bye,
    ClientFrame,
    EngineFrame,
    Failed,
    Loading,
    Ready,
    decode,
    encode,
)
from pipeinfer.server.settings import Settings

_log = logging.getLogger("pipeinfer.server")


def _ignore(frame: EngineFrame) -> None:
    del frame


class ConnectedEngine:
    """An engine and its settings. gone: whether it has ended or failed; reason: why."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 settings: Settings) -> None:
        self._reader, self._writer, self.settings = reader, writer, settings
        self.reason = ""
        self.tokenizer: Tokenizer | None = None
        self._on_frame: Callable[[EngineFrame], None] = self._remember
        self._early: dict[str, EngineFrame] = {}
        self.gone = False

    @classmethod
    async def over(cls, link: socket.socket, settings: Settings) -> ConnectedEngine:
        """Return the engine at the other end of a connected socket."""
        return cls(*await asyncio.open_connection(sock=link), settings)

    def load(self, then: Callable[[], None]) -> None:
        """Start to load its vocabulary. then: called when `tokenizer` is set, or the engine has
        gone."""
        async def load() -> None:
            try:
                self.tokenizer = await asyncio.to_thread(vocabulary, self.settings.model)
            except PipeinferError as error:
                _log.error("%s", error)
                self.lose(str(error))
            then()

        self._loading = asyncio.create_task(load())

    def lose(self, reason: str) -> None:
        """Record that the engine has gone, and ignore further frames."""
        self._on_frame = _ignore
        if not self.gone:
            self.gone, self.reason = True, self.reason or reason

    def serve(self, on_frame: Callable[[EngineFrame], None]) -> None:
        """Pass all frames to `on_frame` from now on, beginning with those that were stored."""
        self._on_frame = on_frame
        for frame in self._early.values():
            on_frame(frame)

    def send(self, frame: ClientFrame) -> None:
        """Send a frame, unless the engine has gone."""
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def read(self, until: Callable[[], bool]) -> str:
        """Read frames until the engine has gone, or `until` returns True; return why, "" for the
        latter."""
        try:
            while not until():
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_FRAME:
                    raise ProtocolError(f"a frame announces {size} bytes")
                self._on_frame(decode(await self._reader.readexactly(size), FROM_ENGINE))
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
        self._on_frame = _ignore
        self._writer.close()

    def _remember(self, frame: EngineFrame) -> None:
        match frame:
            case Loading() | Ready():
                self._early[frame.op] = frame
            case Failed(message):
                self.lose(message)
            case Bye():
                self.lose("it has ended")
            case _:
                pass  # figures of an engine that does not serve yet


def vocabulary(model: str) -> Tokenizer:
    """Return a model's vocabulary with what every request needs of it. Raises PipeinferError."""
    tokenizer = open_tokenizer(model)
    tokenizer.keep_apart()
    _ = tokenizer.eog_ids, tokenizer.marks.pattern
    return tokenizer
