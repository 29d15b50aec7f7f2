"""Executes the supervisor's orders (`orders`) in the HTTP process.

They come over a socket pair, whose other end the supervisor has since it started this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import assert_never

from pipeinfer.errors import ProtocolError
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.orders import (
    MOST_LINE,
    Hold,
    Look,
    Move,
    ServerState,
    decode,
    encode_answer,
    number_of,
)

_log = logging.getLogger("pipeinfer.server")


async def obey(client: EngineClient, sock: socket.socket) -> None:
    """Execute orders until the other end is closed."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=MOST_LINE)
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            writer.write(encode_answer(_guarded(client, line)))
            await writer.drain()
    writer.close()


def _guarded(client: EngineClient, line: bytes) -> ServerState:
    """Return the answer to an order, and one with the error where that cannot be carried out:
    without any answer the supervisor would kill this process and with it every stream."""
    try:
        return _answer(client, line)
    except Exception as error:
        _log.exception("an order of the supervisor cannot be carried out")
        return ServerState(number=number_of(line), state=client.state,
                           error=f"{type(error).__name__}: {error} (this is a bug)")


def _answer(client: EngineClient, line: bytes) -> ServerState:
    try:
        order = decode(line)
    except ProtocolError as error:
        return ServerState(error=str(error), number=number_of(line))
    match order:
        case Look():
            pass
        case Hold(on):
            client.hold(on)
        case Move(why, new_model):
            client.move(why, new_model)
        case _:
            assert_never(order)
    loads = client.tokenizer is None and client.state == "ready"
    return ServerState(
        number=order.number, state="loading" if loads else client.state,
        reason=client.reason or client.loading_text, url=client.url, open=len(client.open),
        waiting=client.waiting,
        model=client.settings.model, name=client.settings.name,
        lost=tuple(client.facts.get("lost", ())))
