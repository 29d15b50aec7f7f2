"""What the supervisor may ask and tell the HTTP process that outlives the job."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from pipeinfer.server.door_control import MovingHub, obey
from pipeinfer.server.engine_line import EngineLine
from pipeinfer.server.entered import Entered
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import Bye, Draining, Failed, Loading, Ready, Status, encode
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings
from tests.rig.server_peer import FACTS

SETTINGS = Settings("m", "m", parallel=1, queue=0)


def test_new_requests_wait_for_the_next_engine_and_its_predecessors_goodbye_is_not_heeded():
    async def run():
        hub = MovingHub(SETTINGS, Metrics(), "http://h")
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
        assert await ask(4, op="move", why="to more hosts", new_model=True) == {"open": 0}
        assert (hub.state, hub.reason, hub.new_model) == ("restarting", "to more hosts", True)
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


class Engine:
    """A rank 0 that has entered `hub`."""

    def __init__(self, sock):
        self._sock = sock

    @classmethod
    async def into(cls, hub):
        ours, theirs = socket.socketpair()
        hub.enter(Entered(await EngineLine.open(theirs), SETTINGS))
        return cls(ours)

    def say(self, *frames):
        for frame in frames:
            self._sock.sendall(encode(frame))

    def die(self):
        self._sock.close()


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def gone(hub, *engines):
    for engine in engines:
        engine.die()
    await until(lambda: hub.state == "restarting" and not hub._reading)


def test_the_next_engine_waits_for_its_turn_and_the_old_one_is_not_heard_any_more():
    async def run():
        hub = MovingHub(SETTINGS, Metrics(), "http://h")
        old = await Engine.into(hub)
        old.say(Ready(FACTS | {"bits": "old"}))
        await until(lambda: hub.state == "ready")
        hub.wait_for_swap(True, False)
        assert hub.look()["beside"] == "expected"
        assert not hub.swap("nobody has come", False)
        new = await Engine.into(hub)
        new.say(Loading({"1": {}}), Ready(FACTS | {"bits": "new"}), Status(1.0, {}))
        await until(lambda: hub.look()["beside"] == "ready")
        assert (hub.state, hub.facts["bits"], hub.loading) == ("ready", "old", {})
        assert hub.swap("moved", False)
        assert (hub.state, hub.facts["bits"], hub.look()["beside"]) == ("ready", "new", "")
        assert hub.swap("said again", False)
        old.say(Failed("the old one"), Bye())
        old.die()
        new.say(Status(2.0, {"x": 1}))
        await until(lambda: hub.status.get("x"))
        assert (hub.state, hub.facts["bits"]) == ("ready", "new")
        await gone(hub, new)

    asyncio.run(run())


def test_one_that_fails_before_its_turn_changes_nothing():
    async def run():
        hub = MovingHub(SETTINGS, Metrics(), "http://h")
        old = await Engine.into(hub)
        old.say(Ready(FACTS))
        await until(lambda: hub.state == "ready")
        hub.wait_for_swap(True, False)
        new = await Engine.into(hub)
        new.say(Failed("no memory"))
        await until(lambda: hub.look()["beside"] == "gone")
        assert hub.look()["beside_reason"] == "no memory"
        assert not hub.swap("moved", False)
        hub.wait_for_swap(False, False)
        assert (hub.state, hub.look()["beside"]) == ("ready", "")
        old.say(Status(2.0, {"x": 1}))
        await until(lambda: hub.status.get("x"))
        await gone(hub, old, new)

    asyncio.run(run())


def test_where_the_old_one_dies_the_next_one_takes_over_when_it_is_told_to():
    async def run():
        hub = MovingHub(SETTINGS, Metrics(), "http://h")
        old = await Engine.into(hub)
        old.say(Ready(FACTS))
        await until(lambda: hub.state == "ready")
        hub.wait_for_swap(True, False)
        new = await Engine.into(hub)
        new.say(Loading({"1": {}}))
        old.die()
        await until(lambda: hub.state == "restarting")
        assert hub.look()["beside"] == "loading"
        assert hub.swap("the job has ended", True)
        assert hub.state == "restarting"
        new.say(Ready(FACTS | {"bits": "new"}))
        await until(lambda: hub.state == "ready")
        assert hub.facts["bits"] == "new"
        await gone(hub, new)

    asyncio.run(run())
