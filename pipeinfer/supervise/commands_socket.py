"""The socket by which `pipeinfer status`, `down`, `rescale` and `reload` control the supervisor.

A command is one JSON object in one line. The answer is lines of {"say": TEXT} and one last object,
{"error": TEXT} if the command failed. This module executes no command; it checks the user and
ensures that each command is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from pipeinfer.errors import PipeinferError, RequestError
from pipeinfer.supervise.state import Folder, is_ours


class _UserCommand(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower):
    pass


class SocketStatus(_UserCommand, frozen=True):
    """Return the state."""


class Down(_UserCommand, frozen=True):
    """End the job and the supervisor. now: without waiting for running requests."""

    now: bool = False


class Rescale(_UserCommand, frozen=True):
    """Move the job to the hosts that answer.

    ranks: None for as many as before. wait: seconds for open requests to end, if they must.
    """

    ranks: int | None = None
    wait: float = 0.0


class Reload(_UserCommand, frozen=True):
    """Start the server again.

    words: its options, empty for the same. wait: as for `Rescale`.
    force: continue after `wait` with requests still open.
    """

    words: list[str] = []
    wait: float = 0.0
    force: bool = False


class LaunchDaemon(_UserCommand, frozen=True):
    """Start the launcher's daemon on a machine that has joined. host: its address."""

    host: str
    kind: str
    arguments: list[str]


class JoinedHosts(_UserCommand, frozen=True):
    """Return the machines that have joined, and the tokens.

    new: make a token first, which ends after `seconds`, 0 for never. revoke: the id of a token that
    admits nobody any more, "" for none.
    """

    new: bool = False
    seconds: float = 0.0
    revoke: str = ""


Command: TypeAlias = SocketStatus | Down | Rescale | Reload | LaunchDaemon | JoinedHosts
Report: TypeAlias = Callable[[str], None]
_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_MOST = 1 << 18  #: bytes of a command
_READ = 10.0  #: seconds for a command to arrive


async def end_server(server: asyncio.Server | None, connections: set[asyncio.Task[Any]]) -> None:
    """Stop accepting connections, and cancel the tasks of those that are open."""
    if server is not None:
        server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


class Commands:
    """The supervisor's end of the socket, in `folder`. execute: called with each command."""

    def __init__(self, folder: Folder,
                 execute: Callable[[Command, Report], Awaitable[dict[str, Any]]]) -> None:
        self._folder, self._execute = folder, execute
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start to accept commands."""
        self._server = await asyncio.start_unix_server(self._serve, sock=self._folder.listen(),
                                                       limit=_MOST)

    async def close(self) -> None:
        """Stop accepting commands; commands in progress are cancelled without an answer."""
        await end_server(self._server, self._open)
        self._folder.unlisten()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    async def _answer(self, line: bytes, report: Report) -> dict[str, Any]:
        try:
            command = _decoder.decode(line)
        except msgspec.DecodeError as error:
            return {"error": f"there is no such command: {error}"}
        try:
            return {"ok": True, **await self._execute(command, report)}
        except PipeinferError as error:
            return {"error": str(error)}
        except Exception as error:  # the caller gets the error, and the job goes on
            return {"error": f"{type(error).__name__}: {error} (this is a bug)"}


def call(folder: Folder, report: Report, timeout: float, command: Command) -> dict[str, Any]:
    """Send a command to the supervisor of `folder`; return the answer.

    report: called with each line of progress. timeout: seconds.
    Raises UsageError if there is no supervisor, RequestError if it refuses or does not answer.
    """
    with folder.connect() as link:
        link.settimeout(timeout)
        try:
            link.sendall(msgspec.json.encode(command) + b"\n")
            with link.makefile("rb") as lines:
                for line in lines:
                    match json.loads(line):
                        case {"say": str(text)}:
                            report(text)
                        case {"error": str(text)}:
                            raise RequestError(text)
                        case dict() as found:
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
