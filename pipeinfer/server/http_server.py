"""What the HTTP process does once its first engine has entered: it answers clients.

`__main__` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, assert_never

import uvicorn
import uvloop
from msgspec import structs
from starlette.types import Receive, Scope, Send

from pipeinfer.errors import ClusterError
from pipeinfer.models.text import chat_template
from pipeinfer.server import tls
from pipeinfer.server.answers import Answers
from pipeinfer.server.app import Server
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.engines import ConnectedEngine
from pipeinfer.server.errors import ApiError
from pipeinfer.server.http_process import UNIX, EngineListener, EnteringEngine, url_of
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.middleware import Connection
from pipeinfer.server.orders import (
    Hold,
    Look,
    Move,
    Offer,
    Order,
    OrderServer,
    Report,
    ServerState,
    Sleep,
)

_STATE_SECONDS = 3.0  #: how long a failure can be read at /health
_GRACE_SECONDS = 5  #: how long answers may take to reach their clients at the end
_KEEP_ALIVE = 100  #: seconds; longer than the 90 for which clients keep connections, as Go's do
_MOST_CONNECTIONS = 4096
_SPARE_FILES = 24  #: for connections that are refused, the journal, engines
_FEW_CONNECTIONS = 256  #: below which a note names the limit
_log = logging.getLogger("pipeinfer.server")


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: rank 0 decides when this process ends."""
        yield


class _Current:
    """The application with the settings of the present engine. New requests wait while the client
    holds them, and are refused where there are too many connections.

    most: connections.
    """

    def __init__(self, answers: Answers, most: int) -> None:
        self._client, self._answers, self._most = answers.client, answers, most
        self.connections: Sized = ()
        self._client.renewed = self._renew
        self._renew()

    def _renew(self) -> None:
        self._app = Server(self._answers).asgi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.connections) > self._most:
            full = ApiError(503, f"this server has {self._most} connections open, and takes no "
                                 "more", code="too_many_connections",
                            headers={"Connection": "close"})
            await full.reply(scope["path"])(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._client.admission()
        await self._app(scope, receive, send)


def run(engines: EngineListener, guest: EnteringEngine, control: socket.socket | None) -> int:
    """Serve until no further engine comes; return the exit status.

    guest: the first engine. control: link to the supervisor, None if there is none; then no other
        engine follows.
    """
    prepare()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(engines, guest, control))


def prepare() -> None:
    """Set the limits and the log format of a process that serves HTTP."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a socket per client
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    logging.basicConfig(format="pipeinfer: %(message)s", level=logging.WARNING)
    chat_template.prepare()


def _most_connections() -> int:
    """Return how many connections the limit of open files allows; log a note if these are few."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    most = max(1, min(_MOST_CONNECTIONS, room - _SPARE_FILES))
    if most < _FEW_CONNECTIONS:
        _log.warning("note: the limit of open files (ulimit -n) leaves room for %d connections",
                     most)
    return most


async def _serve(engines: EngineListener, guest: EnteringEngine, control: socket.socket | None
                 ) -> int:
    settings, listener = guest.settings, guest.listener
    assert listener is not None
    client = EngineClient(settings, Metrics(), outlives=control is not None,
                          url=url_of(listener, settings))
    answers = Answers(client)
    app = _Current(answers, _most_connections())

    async def execute(order: Order, _: Report) -> dict[str, Any]:
        return obey(client, order)

    orders = OrderServer(Order, execute)
    tasks = []
    if control is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.leave)
        await orders.start(control)
    config = uvicorn.Config(
        app, http=Connection.patient(settings.serve.client_timeout), ws="none", lifespan="off",
        log_level="warning", access_log=False, timeout_keep_alive=_KEEP_ALIVE,
        server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS, backlog=1024,
        ssl_certfile=settings.serve.ssl_cert_file or None,
        ssl_keyfile=settings.serve.ssl_key_file or None,
    )
    config.load()
    server = _Uvicorn(config)
    app.connections = server.server_state.connections
    following = asyncio.create_task(_follow(client, engines, guest))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    if config.ssl is not None:
        files = tls.Files(settings.serve.ssl_cert_file, settings.serve.ssl_key_file)
        tasks.append(asyncio.create_task(tls.renew(config.ssl, files)))
    await asyncio.wait((asyncio.create_task(client.left.wait()), serving, following),
                       return_when=asyncio.FIRST_COMPLETED)
    failed = client.state != "stopped"
    if failed:
        # a client that asks now shall read at /health why
        await asyncio.wait((serving,), timeout=_STATE_SECONDS)
    server.should_exit = True
    if client.left.is_set():
        following.cancel()
    await asyncio.gather(serving, following, return_exceptions=True)
    for task in tasks:
        task.cancel()
    # after the streams: the supervisor may ask for the state until they have ended
    await orders.close()
    await answers.close()
    client.close()
    if client.url.startswith(UNIX):
        Path(client.url.removeprefix(UNIX)).unlink(missing_ok=True)
    return int(failed)


async def _follow(client: EngineClient, engines: EngineListener, guest: EnteringEngine) -> None:
    """Accept one engine after the other."""
    while True:
        client.enter(await ConnectedEngine.over(guest.link, guest.settings))
        guest = await engines.accept(client.url)


def obey(client: EngineClient, order: Order) -> dict[str, Any]:
    """Execute an order; return the fields of the state after it. Raises ClusterError for an order
    that comes too late: its supervisor has gone on without it."""
    if time.monotonic() > order.until:
        raise ClusterError("the order came too late")
    match order:
        case Look():
            pass
        case Offer(names, refused):
            client.others.names = names
            for name, why in refused.items():
                client.others.refuse(name, why)
        case Hold(on):
            client.hold(on)
        case Move(why, new_model):
            client.move(why, new_model)
        case Sleep():
            client.sleep()
        case _:
            assert_never(order)
    loads = client.tokenizer is None and client.state == "ready"
    return structs.asdict(ServerState(
        state="loading" if loads else client.state,
        reason=client.reason or client.loading_text, url=client.url, open=len(client.open),
        waiting=client.waiting + client.others.waiting, newest=client.newest,
        wanted=client.others.wanted, model=client.settings.model, name=client.settings.name,
        lost=tuple(client.facts.get("lost", ())),
        work=tuple(one.get("does", "") for one in client.facts.get("ranks", ()))))
