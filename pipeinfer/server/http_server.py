"""The HTTP process: `python -m pipeinfer.server LINK LISTENER`, started by rank 0 only. The
process that the supervisor starts is `door`.

LINK is one end of a socket pair to rank 0, LISTENER a listening socket. The process ends when rank
0 sends Bye (exit status 0) or has gone (1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from pipeinfer.errors import PipeinferError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text import chat_template
from pipeinfer.server import tls
from pipeinfer.server.app import Server
from pipeinfer.server.engine_client import Hub
from pipeinfer.server.frames import FIRST
from pipeinfer.server.http_process import first_frame
from pipeinfer.server.journal import Journal
from pipeinfer.server.kept import Archive
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.middleware import Connection

_START_SECONDS = 30.0
_STATE_SECONDS = 3.0  #: how long a failure can be read at /health
_GRACE_SECONDS = 5  #: how long answers may take to reach their clients at the end
_KEEP_ALIVE = 30
_MOST_CONNECTIONS = 4096


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: rank 0 decides when this process ends."""
        yield


def main() -> int:
    """Serve until rank 0 has gone; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    prepare()
    link, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    link.settimeout(_START_SECONDS)
    try:
        settings = first_frame(link, FIRST)
    except (EOFError, OSError):
        return 1  # rank 0 has gone already
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        hub = Hub(settings, Metrics())
        return runner.run(serve(hub, hub.run(link), Server(hub).asgi, listener))


def prepare() -> None:
    """Set the limits and the log format of a process that serves HTTP."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a socket per client
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    logging.basicConfig(format="pipeinfer: %(message)s", level=logging.WARNING)


async def serve(hub: Hub, follow: Coroutine[Any, Any, None], app: ASGIApp, listener: socket.socket
                ) -> int:
    """Answer clients until `follow`, which handles rank 0's link, has ended, or no rank 0
    follows; return the exit status."""
    settings = hub.settings
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", log_level="warning",
        access_log=False,
        timeout_keep_alive=max(1, int(min(_KEEP_ALIVE, settings.client_timeout))),
        server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS, backlog=1024,
        limit_concurrency=_MOST_CONNECTIONS,
        ssl_certfile=settings.certificate or None, ssl_keyfile=settings.private_key or None,
    )
    config.load()
    server = _Uvicorn(config)
    following = asyncio.create_task(follow)
    loading = asyncio.create_task(load(hub))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    renewing = None
    if config.ssl is not None:
        files = tls.Files(settings.certificate, settings.private_key)
        renewing = asyncio.create_task(tls.renew(config.ssl, files))
    await asyncio.wait((asyncio.create_task(hub.left.wait()), serving, following),
                       return_when=asyncio.FIRST_COMPLETED)
    failed = hub.state != "stopped"
    if failed:
        await asyncio.wait((serving,), timeout=_STATE_SECONDS)
    server.should_exit = True
    if hub.left.is_set():
        following.cancel()
    await asyncio.gather(serving, following, loading, return_exceptions=True)
    if renewing is not None:
        renewing.cancel()
    if hub.archive is not None:
        await hub.archive.close()
    if hub.tracer is not None:
        hub.tracer.close()
    return int(failed)


async def load(hub: Hub) -> None:
    """Load the vocabulary and the journal, while the stages load."""
    chat_template.prepare()
    try:
        tokenizer = await asyncio.to_thread(open_tokenizer, hub.settings.model)
        await asyncio.to_thread(lambda: (tokenizer.eog_ids, tokenizer.marks.pattern))
        if hub.settings.journal and hub.archive is None:
            journal = await asyncio.to_thread(Journal, Path(hub.settings.journal))
            hub.archive = Archive(hub, journal)
            hub.archive.go_on(tokenizer)
        hub.tokenizer = tokenizer
    except PipeinferError as error:
        logging.getLogger("pipeinfer.server").error("%s", error)
        hub.fail(str(error))
