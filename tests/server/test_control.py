"""What the supervisor may ask and tell the HTTP process that outlives the job."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from types import SimpleNamespace

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ClusterError, ModelError
from pipeinfer.server import engine_client, orders
from pipeinfer.server.answers import Answers
from pipeinfer.server.app import Server
from pipeinfer.server.choice import Generation
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.engines import ConnectedEngine
from pipeinfer.server.errors import ApiError, Failure
from pipeinfer.server.frames import Bye, Draining, Loading, Ready, Submit, encode
from pipeinfer.server.http_process import unix_listener
from pipeinfer.server.http_server import obey
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.orders import Hold, Look, Move, Sleep
from tests.kit.server_peer import FACTS, settings_of

pytestmark = pytest.mark.anyio
SETTINGS = settings_of("m", parallel=1, queue=0)


@pytest.fixture
async def client():
    """The part of the HTTP process that outlives the engines."""
    return EngineClient(SETTINGS, Metrics(), outlives=True, url="http://h")


async def test_new_requests_wait_for_the_next_engine_and_not_for_its_predecessors_goodbye(client):
    client.handle(Ready(FACTS))
    assert obey(client, Look())["state"] == "loading"  # until there is a vocabulary
    assert obey(client, Hold(True))["open"] == 0
    waiting = asyncio.create_task(client.admission())
    await asyncio.sleep(0)
    assert obey(client, Look())["waiting"] == 1
    await client.admission()  # more than may wait are let in, to be refused
    with pytest.raises(ApiError, match="enough requests wait") as refused:
        client.check_room(1)
    assert refused.value.status == 429
    assert obey(client, Move("to more hosts", True))["open"] == 0
    assert (client.state, client.reason) == ("restarting", "to more hosts")
    assert client._new_model
    for frame in (Draining(1.0), Bye()):
        client.handle(frame)
    assert (client.state, waiting.done()) == ("restarting", False)
    client.handle(Ready(FACTS))
    await asyncio.sleep(0)
    assert not waiting.done()  # another model's vocabulary is still being read
    client.tokenizer = SimpleNamespace()
    client.handle(Ready(FACTS))
    await asyncio.wait_for(waiting, 10)
    client.check_room(1)
    client.handle(Bye())
    assert client.state == "stopped"


async def test_an_order_is_answered_also_one_that_fails_or_is_long(client, tmp_path):
    """The supervisor kills an HTTP process that does not answer, with every stream."""
    path = str(tmp_path / "control")

    async def execute(order, _):
        return obey(client, order)

    server = orders.OrderServer(orders.Order, execute)
    await server.start(unix_listener(path))
    client.move = None
    failed = await orders.ask(path, Move("x", False), 30)
    assert failed.error.startswith("TypeError: ")
    del client.move
    client.handle(Ready(FACTS))
    assert len((await orders.ask(path, Move("x" * 100_000, False), 30)).reason) == 100_000
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b'{"op":"hold","on":"yes"}\n')
    assert b'"error": "there is no such command' in await reader.readline()
    writer.close()
    await server.close()
    client._patience.cancel()


async def test_an_order_that_comes_too_late_changes_nothing(client):
    """The supervisor has gone on: a move would take a job for one that ends."""
    client.handle(Ready(FACTS))
    with pytest.raises(ClusterError, match="too late"):
        obey(client, Move("to more hosts", False, until=time.monotonic() - 1))
    assert client.state == "ready"


@pytest.mark.parametrize(("error", "reason"), [
    (ModelError("no such file"), "no such file"),
    (RuntimeError("odd"), "RuntimeError: odd (this is a bug)"),
    (MemoryError(), "MemoryError:  (this is a bug)")])
async def test_every_error_while_the_vocabulary_loads_is_shown(monkeypatch, caplog, error, reason):
    """Otherwise /health would be at "loading" without end."""
    def fails(model):
        raise error

    monkeypatch.setattr(engine_client, "vocabulary", fails)
    client = EngineClient(SETTINGS, Metrics(), outlives=False, url="http://h")
    await client.load(SETTINGS)
    answer = await Server(Answers(client)).health()
    assert answer.status_code == 503
    assert json.loads(answer.body) == {"status": "failed", "reason": reason}
    assert [record.message for record in caplog.records] == [reason]
    assert bool(caplog.records[0].exc_info) == ("bug" in reason)


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


async def test_a_choice_that_was_late_when_its_engine_died_takes_no_place_in_the_next_one(client):
    client.tokenizer = SimpleNamespace()
    client.handle(Ready(FACTS))
    late = client.open[7] = Generation(7, 0, 3, lambda _: None)
    late.frame = Submit(7, (1, 2, 3), 4, SamplingParams())
    client.abort(late, "timeout")
    late.fail(Failure("timeout", "too late"))
    assert client.open == {7: late}  # until the engine has ended it
    client.move("to more hosts", new_model=False)
    client.handle(Ready(FACTS))
    assert client.open == {}
    client.check_room(1)


async def gone(client, *engines):
    for engine in engines:
        engine.die()
    await until(lambda: client.state == "restarting" and not client._tasks)


async def test_the_next_engine_serves_at_once_and_a_former_one_is_dropped(client, monkeypatch):
    monkeypatch.setattr(engine_client, "vocabulary", lambda model: None)
    old = await Engine.into(client)
    old.say(Ready(FACTS | {"bits": "old"}))
    await until(lambda: client.state == "ready")
    new = await Engine.into(client)
    assert client.state == "restarting"
    new.say(Loading({"1": {}}), Ready(FACTS | {"bits": "new"}))
    await until(lambda: client.state == "ready")
    assert client.facts["bits"] == "new"
    await gone(client, old, new)


async def test_an_engine_sleeps_only_without_requests_and_its_end_is_no_failure(
        client, monkeypatch):
    monkeypatch.setattr(engine_client, "vocabulary", lambda model: None)
    assert obey(client, Sleep())["state"] == "loading"
    first = await Engine.into(client)
    first.say(Ready(FACTS))
    await until(lambda: client.state == "ready")
    client.open[7] = None
    obey(client, Sleep())
    assert client.state == "ready"
    client.open.clear()
    obey(client, Sleep())
    assert client.state == "asleep"
    first.say(Draining(1.0), Bye())
    first.die()
    await until(lambda: not client._tasks)
    assert (client.state, client.reason, client._patience) == ("asleep", "", None)
    assert not client.left.is_set()
    answer = await Server(Answers(client)).health()
    assert (answer.status_code, json.loads(answer.body)) == (200, {"status": "asleep"})
    second = await Engine.into(client)
    assert client.state == "asleep"
    second.say(Ready(FACTS))
    await until(lambda: client.state == "ready")
    await gone(client, second)
