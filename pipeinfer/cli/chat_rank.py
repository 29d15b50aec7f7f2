"""Rank 0 of a `pipeinfer chat` on ranks of its own: serves until the conversation has ended.

`chat_server` starts it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from types import FrameType
from typing import NoReturn

from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.serve import check_no_trace, child_settings, serve
from pipeinfer.cli.terminal import INTERRUPTED, Stopped, fetch_models, note
from pipeinfer.cluster.session import Session
from pipeinfer.config import JobConfig, RequestConfig, SamplingConfig, ServeConfig
from pipeinfer.models.locate import advice
from pipeinfer.server import http_process
from pipeinfer.server.engine import Engine


class _Conversation:
    """Ends the job when the conversation has ended, or its process."""

    def __init__(self, ending: int, folder: str) -> None:
        self.status = INTERRUPTED
        self._ending, self._folder = ending, folder
        self._engine: Engine | None = None
        for number in (signal.SIGINT, signal.SIGUSR1):  # they are for the conversation
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(-1)
        threading.Thread(target=self._watch, name="conversation", daemon=True).start()

    def begin(self, engine: Engine, session: Session) -> None:
        """Record that the engine is about to serve."""
        del session
        self._engine = engine

    def _watch(self) -> None:
        self.status = int(os.read(self._ending, 16) or INTERRUPTED)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self.status == INTERRUPTED or self._engine is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._engine.leave()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Stopped


def be_rank_0(job: JobConfig, sampling: SamplingConfig, listener: socket.socket, ending: int,
              folder: str, patience: float) -> NoReturn:
    """Serve until the conversation has ended.

    listener: for requests. ending: file descriptor from which the exit status is read.
    folder: of the socket; is deleted at the end. patience: seconds for any wait for the client.
    """
    conversation = _Conversation(ending, folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what is typed is not for this process
    config = ServeConfig(request_timeout=patience, client_timeout=patience)
    check_no_trace(job)
    fetch_models(job)
    if advised := advice(job):
        note(advised)
    child = http_process.start_own(child_settings(job, config, sampling), listener)
    show = progress_hook(RequestConfig())
    serve(job, config, child, show or (lambda _: None), conversation.begin)
    raise SystemExit(conversation.status)
