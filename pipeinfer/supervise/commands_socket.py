"""The socket by which `pipeinfer status`, `down`, `rescale` and `reload` control the supervisor.

A command is one JSON object in one line. The answer is lines of {"say": TEXT} and one last object.
This module contains no command; it checks the user and ensures that each command is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from pipeinfer.errors import PipeinferError, RequestError
from pipeinfer.supervise.state import Folder, is_ours

_MOST = 1 << 18  #: bytes of a command
_READ = 10.0  #: seconds for a command to arrive
Command: TypeAlias = Callable[[dict[str, Any], Callable[[str], None]], Awaitable[dict[str, Any]]]


class Commands:
    """The supervisor's end of the socket, in `folder`. known: the commands by name."""

    def __init__(self, folder: Folder, known: Mapping[str, Command]) -> None:
        self._folder, self._known = folder, known
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start to accept commands."""
        self._server = await asyncio.start_unix_server(self._hear, sock=self._folder.listen(),
                                                       limit=_MOST)

    async def close(self) -> None:
        """Stop accepting commands; commands in progress are cancelled without an answer."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._folder.unlisten()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)

        def send(answer: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(answer).encode() + b"\n")

        try:
            if is_ours(writer.get_extra_info("socket")):
                async with asyncio.timeout(_READ):
                    line = await reader.readline()
                send(await self._answer(line, lambda text: send({"say": text})))
                await writer.drain()
        except (OSError, ValueError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, line: bytes, tell: Callable[[str], None]) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            command = self._known.get(asked.get("op"))
        except (ValueError, AttributeError):
            return {"error": "that is no command"}
        if command is None:
            return {"error": f"there is no command {asked.get('op')!r}"}
        try:
            return {"ok": True, **await command(asked, tell)}
        except PipeinferError as error:
            return {"error": str(error)}
        except Exception as error:  # the caller gets the error, and the job goes on
            return {"error": f"{type(error).__name__}: {error} (this is a bug)"}


def call(folder: Folder, tell: Callable[[str], None], timeout: float, **asked: Any
         ) -> dict[str, Any]:
    """Send a command to the supervisor of `folder`; return the answer.

    tell: called with each line of progress. timeout: seconds.
    Raises UsageError if there is no supervisor, RequestError if it refuses or does not answer.
    """
    with folder.connect() as link:
        link.settimeout(timeout)
        try:
            link.sendall(json.dumps(asked).encode() + b"\n")
            with link.makefile("rb") as lines:
                for line in lines:
                    found: dict[str, Any] = json.loads(line)
                    if "say" in found:
                        tell(str(found["say"]))
                    elif "error" in found:
                        raise RequestError(str(found["error"]))
                    else:
                        return found
        except TimeoutError as error:
            raise RequestError(f"no answer within {timeout:g} s: see `pipeinfer status` and "
                               f"{folder.path / 'logs'}") from error
        except (OSError, ValueError) as error:
            raise RequestError(f"the connection was lost: {error}") from error
    with contextlib.suppress(OSError):
        if folder.alive:
            raise RequestError("no answer came")
    raise RequestError("it has ended before it answered")
