"""What the supervisor may ask and tell the HTTP process that outlives the job."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from pipeinfer.experiments.rig.server_peer import FACTS
from pipeinfer.server.door_control import MovingHub, obey
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import Bye, Draining, Ready
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings


def test_new_requests_wait_for_the_next_engine_and_its_predecessors_goodbye_is_not_heeded():
    async def run():
        hub = MovingHub(Settings("m", "m", parallel=1, queue=0), Metrics(), "http://h")
        ours, theirs = socket.socketpair()
        orders = asyncio.create_task(obey(hub, theirs))
        reader, writer = await asyncio.open_connection(sock=ours)

        async def ask(number, **order):
            writer.write(json.dumps({**order, "number": number}).encode() + b"\n")
            answer = json.loads(await reader.readline())
            assert answer.pop("number") == number
            return answer

        hub.handle(Ready(FACTS))
        assert (await ask(1, op="look"))["state"] == "loading"  # until there is a vocabulary
        assert await ask(2, op="hold", on=True) == {"open": 0}
        waiting = asyncio.create_task(hub.admission())
        await asyncio.sleep(0)
        assert (await ask(3, op="look"))["waiting"] == 1
        await hub.admission()  # more than may wait are let in, to be refused
        with pytest.raises(ApiError, match="enough requests wait") as refused:
            hub.check_room(1)
        assert refused.value.status == 429
        assert await ask(4, op="move", why="to more hosts", anew=True) == {"open": 0}
        assert (hub.state, hub.reason, hub.anew) == ("restarting", "to more hosts", True)
        for frame in (Draining(1.0), Bye()):
            hub.handle(frame)
        assert (hub.state, waiting.done()) == ("restarting", False)
        hub.handle(Ready(FACTS))
        await asyncio.wait_for(waiting, 10)
        hub.check_room(1)
        hub.handle(Bye())
        assert hub.state == "stopped"
        for order in ({"op": "nothing"}, {"op": "hold", "on": "yes"}):
            assert "error" in await ask(5, **order)
        writer.close()
        await asyncio.wait_for(orders, 10)

    asyncio.run(run())
