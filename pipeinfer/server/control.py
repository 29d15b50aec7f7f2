"""Executes the supervisor's orders (`orders`) in the HTTP process.

They come over a socket pair, whose other end the supervisor has since it started this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any, assert_never

from pipeinfer.errors import ProtocolError
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.orders import Hold, Look, Move, Standby, Swap, decode, number_of


async def obey(client: EngineClient, sock: socket.socket) -> None:
    """Execute orders until the other end is closed."""
    reader, writer = await asyncio.open_connection(sock=sock)
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            writer.write(json.dumps(_answer(client, line)).encode() + b"\n")
            await writer.drain()
    writer.close()


def _answer(client: EngineClient, line: bytes) -> dict[str, Any]:
    try:
        order = decode(line)
    except ProtocolError as error:
        return {"error": str(error), "number": number_of(line)}
    found: dict[str, Any] = {}
    match order:
        case Look():
            found = _state(client)
        case Hold(on):
            client.hold(on)
        case Move(why, new_model):
            client.move(why, new_model)
        case Standby(on, new_model):
            client.wait_for_swap(on, new_model)
        case Swap(why, lost):
            found = {"swapped": client.swap(why, lost)}
        case _:
            assert_never(order)
    return {"open": len(client.open), **found, "number": order.number}


def _state(client: EngineClient) -> dict[str, Any]:
    loads = client.tokenizer is None and client.state == "ready"
    progress, reason = client.standby()
    return {"beside": progress, "beside_reason": reason,
            "state": "loading" if loads else client.state, "reason": client.reason,
            "url": client.url, "waiting": client.waiting, "model": client.settings.model,
            "name": client.settings.name, "lost": client.facts.get("lost", []),
            "ranks": client.facts.get("ranks", []),
            "stages": len({one["stage"] for one in client.facts.get("stages", ())})}
