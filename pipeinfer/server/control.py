"""Executes the supervisor's orders (`orders`) in the HTTP process."""

from __future__ import annotations

import time
from typing import Any, assert_never

from msgspec import structs

from pipeinfer.errors import ClusterError
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.orders import Hold, Look, Move, Order, ServerState


def obey(client: EngineClient, order: Order) -> dict[str, Any]:
    """Execute an order; return the fields of the state after it. Raises ClusterError for an order
    that comes too late: its supervisor has gone on without it."""
    if time.monotonic() > order.until:
        raise ClusterError("the order came too late")
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
    return structs.asdict(ServerState(
        state="loading" if loads else client.state,
        reason=client.reason or client.loading_text, url=client.url, open=len(client.open),
        waiting=client.waiting, model=client.settings.model, name=client.settings.name,
        lost=tuple(client.facts.get("lost", ()))))
