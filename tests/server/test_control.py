"""What the supervisor may ask and tell the HTTP process that outlives the job."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from pipeinfer.errors import ModelError
from pipeinfer.server import engine_client
from pipeinfer.server.app import Server
from pipeinfer.server.control import obey
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.engines import ConnectedEngine
from pipeinfer.server.errors import ApiError
from pipeinfer.server.frames import Bye, Draining, Loading, Ready, encode
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.orders import MOST_LINE, Look, Move, decode_answer
from pipeinfer.server.orders import encode as encode_order
from pipeinfer.server.settings import Settings
from tests.rig.server_peer import FACTS

SETTINGS = Settings("m", "m", parallel=1, queue=0)


def test_new_requests_wait_for_the_next_engine_and_its_predecessors_goodbye_is_not_heeded():
    async def run():
        client = EngineClient(SETTINGS, Metrics(), outlives=True, url="http://h")
        ours, theirs = socket.socketpair()
        orders = asyncio.create_task(obey(client, theirs))
        reader, writer = await asyncio.open_connection(sock=ours)

        async def ask(number, **order):
            writer.write(json.dumps({**order, "number": number}).encode() + b"\n")
            answer = json.loads(await reader.readline())
            assert answer.pop("number") == number
            return answer

        client.handle(Ready(FACTS))
        assert (await ask(1, op="look"))["state"] == "loading"  # until there is a vocabulary
        assert (await ask(2, op="hold", on=True))["open"] == 0
        waiting = asyncio.create_task(client.admission())
        await asyncio.sleep(0)
        assert (await ask(3, op="look"))["waiting"] == 1
        await client.admission()  # more than may wait are let in, to be refused
        with pytest.raises(ApiError, match="enough requests wait") as refused:
            client.check_room(1)
        assert refused.value.status == 429
        assert (await ask(4, op="move", why="to more hosts", new_model=True))["open"] == 0
        assert (client.state, client.reason) == ("restarting", "to more hosts")
        assert client._new_model
        for frame in (Draining(1.0), Bye()):
            client.handle(frame)
        assert (client.state, waiting.done()) == ("restarting", False)
        client.handle(Ready(FACTS))
        await asyncio.wait_for(waiting, 10)
        client.check_room(1)
        client.handle(Bye())
        assert client.state == "stopped"
        for order in ({"op": "nothing"}, {"op": "hold", "on": "yes"}):
            assert (await ask(5, **order))["error"]
        writer.close()
        await asyncio.wait_for(orders, 10)

    asyncio.run(run())


def test_an_order_that_fails_is_answered_and_so_are_later_ones(monkeypatch):
    """The supervisor kills an HTTP process that does not answer, with every stream."""
    async def run():
        client = EngineClient(SETTINGS, Metrics(), outlives=True, url="http://h")
        ours, theirs = socket.socketpair()
        obeying = asyncio.create_task(obey(client, theirs))
        reader, writer = await asyncio.open_connection(sock=ours)

        async def ask(order):
            writer.write(encode_order(order, 7))
            return decode_answer(await asyncio.wait_for(reader.readline(), 10))

        with monkeypatch.context() as patched:
            patched.setattr(client, "move", None)
            failed = await ask(Move(why="x", new_model=False))
        assert (failed.number, failed.state) == (7, "loading")
        assert failed.error.startswith("TypeError: ")
        assert (await ask(Look())).error == ""
        writer.close()
        await asyncio.wait_for(obeying, 10)

    asyncio.run(run())


def test_a_long_order_is_obeyed():
    async def run():
        client = EngineClient(SETTINGS, Metrics(), outlives=True, url="http://h")
        client.handle(Ready(FACTS))
        ours, theirs = socket.socketpair()
        obeying = asyncio.create_task(obey(client, theirs))
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_LINE)
        writer.write(encode_order(Move(why="x" * 100_000, new_model=False), 7))
        found = decode_answer(await asyncio.wait_for(reader.readline(), 10))
        assert (found.number, found.state, len(found.reason)) == (7, "restarting", 100_000)
        writer.close()
        await asyncio.wait_for(obeying, 10)
        client._patience.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(("error", "reason"), [
    (ModelError("no such file"), "no such file"),
    (RuntimeError("odd"), "RuntimeError: odd (this is a bug)"),
    (MemoryError(), "MemoryError:  (this is a bug)")])
def test_every_error_while_the_vocabulary_loads_is_shown(monkeypatch, caplog, error, reason):
    """Otherwise /health would be at "loading" without end."""
    def fails(model):
        raise error

    async def run():
        monkeypatch.setattr(engine_client, "vocabulary", fails)
        client = EngineClient(SETTINGS, Metrics(), outlives=False, url="http://h")
        await client.load(SETTINGS)
        answer = await Server(client).health()
        assert answer.status_code == 503
        assert json.loads(answer.body) == {"status": "failed", "reason": reason}
        assert [record.message for record in caplog.records] == [reason]
        assert bool(caplog.records[0].exc_info) == ("bug" in reason)

    asyncio.run(run())


class Engine:
    """A rank 0 that has entered `client`."""

    def __init__(self, sock):
        self._sock = sock

    @classmethod
    async def into(cls, client):
        ours, theirs = socket.socketpair()
        client.enter(await ConnectedEngine.over(theirs, SETTINGS))
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


async def gone(client, *engines):
    for engine in engines:
        engine.die()
    await until(lambda: client.state == "restarting" and not client._tasks)


def test_the_next_engine_serves_at_once_and_a_former_one_is_dropped():
    async def run():
        client = EngineClient(SETTINGS, Metrics(), outlives=True, url="http://h")
        old = await Engine.into(client)
        old.say(Ready(FACTS | {"bits": "old"}))
        await until(lambda: client.state == "ready")
        new = await Engine.into(client)
        assert client.state == "restarting"
        new.say(Loading({"1": {}}), Ready(FACTS | {"bits": "new"}))
        await until(lambda: client.state == "ready")
        assert client.facts["bits"] == "new"
        await gone(client, old, new)

    asyncio.run(run())
