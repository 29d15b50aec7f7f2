"""The supervisor's orders to the HTTP process that outlives the job; and how they, and a user's
commands to the supervisor, travel: one connection each, with one JSON object in a line. The answer
is lines of {"say": TEXT} and one last object, {"error": TEXT} if it failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct, structs

from pipeinfer.errors import PipeinferError

MOST_LINE = 64 << 20  #: bytes of a line
_READ = 10.0  #: seconds for an order to arrive
Report: TypeAlias = Callable[[str], None]


class _Order(Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True,
             kw_only=True):
    """until: when the supervisor waits no longer (`time.monotonic`), so that it must not happen."""

    until: float = float("inf")


class Look(_Order, frozen=True):
    """Change nothing; as every answer, that to this order has the state."""


class Offer(_Order, frozen=True):
    """Let clients name these models; end requests for one that cannot be served.

    names: of the models, in the order of their table. refused: why some cannot be served.
    """

    names: tuple[str, ...]
    refused: dict[str, str] = {}


class Hold(_Order, frozen=True):
    """Let new requests wait while running ones continue; or admit them again."""

    on: bool


class Move(_Order, frozen=True):
    """Prepare for the end of the engine: another one will connect.

    why: for clients.
    new_model: whether it may have another model under the same name.
    """

    why: str
    new_model: bool


class Sleep(_Order, frozen=True):
    """Prepare for the end of the engine until the next request, unless one is open now."""


Order: TypeAlias = Look | Offer | Hold | Move | Sleep


class ServerState(Struct, frozen=True, kw_only=True):
    """The state of the HTTP process after an order. Without any field: no answer has come.

    state: "" without an answer. reason: why the engine failed. url: the address for clients.
    open: requests that have not ended. waiting: those that wait for admission. newest: id of the
        last one that came.
    model, name: path and name of the served model. wanted: the name of one that requests wait for,
        "" if they do for none. lost: the job's ranks that have died.
    work: what each rank does, in words.
    error: why the order was not executed.
    """

    state: str = ""
    reason: str = ""
    url: str = ""
    open: int = 0
    waiting: int = 0
    newest: int = 0
    model: str = ""
    name: str = ""
    wanted: str = ""
    lost: tuple[int, ...] = ()
    work: tuple[str, ...] = ()
    error: str = ""


class OrderServer:
    """Executes orders of this user's processes.

    kinds: the classes of orders. execute: called with each of them, and with what passes a line on
        to the other end.
    """

    def __init__(self, kinds: Any,
                 execute: Callable[[Any, Report], Awaitable[dict[str, Any]]]) -> None:
        self._decode, self._execute = msgspec.json.Decoder(kinds).decode, execute
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Accept orders at a listening socket."""
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=MOST_LINE)

    async def close(self) -> None:
        """Accept no more orders; those in progress are cancelled without an answer."""
        await end_server(self._server, self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)

        def send(answer: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(answer).encode() + b"\n")

        try:
            if is_ours(writer.get_extra_info("socket")):
                # who connects and sends nothing must not stay
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
            order = self._decode(line)
        except msgspec.DecodeError as error:
            return {"error": f"there is no such command: {error}"}
        try:
            return {"ok": True, **await self._execute(order, report)}
        except PipeinferError as error:
            return {"error": str(error)}
        except Exception as error:  # the other end gets the error, and this one goes on
            return {"error": f"{type(error).__name__}: {error} (this is a bug)"}


async def ask(path: str, order: Order, seconds: float) -> ServerState:
    """Send an order to the HTTP process; return its state. Raises OSError, ValueError.

    seconds: until it is too late for it.
    """
    order = structs.replace(order, until=time.monotonic() + seconds)
    reader, writer = await asyncio.open_unix_connection(path, limit=MOST_LINE)
    try:
        writer.write(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(await reader.readline(), type=ServerState)
    finally:
        writer.close()


async def end_server(server: asyncio.Server | None, connections: set[asyncio.Task[Any]]) -> None:
    """Stop accepting connections, and cancel the tasks of those that are open."""
    if server is not None:
        server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


def is_ours(link: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, according to the kernel."""
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", found)[1] == os.getuid())
