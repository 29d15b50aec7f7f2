"""Rank program: `pipeinfer ARGS...` in which one rank's backend goes wrong.

Usage: faulty.py RANK KIND ARGS...; KIND is raise, exit, kill, hang, load, receive (killed in the
middle of receiving a shard) or shutdown (killed when it is told that the job is over).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from pipeinfer import host
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.cli.main import main
from pipeinfer.cluster import parts
from pipeinfer.core.messages import Shutdown
from pipeinfer.errors import BackendError
from pipeinfer.runtime.stage import Stage


def break_backend(kind: str) -> None:
    decode, load, search = LlamaCppBackend.decode, LlamaCppBackend.load, parts.known_widths
    calls = -1

    def known_widths(*args, **kwargs):
        nonlocal calls
        found = search(*args, **kwargs)
        calls = 0
        return found

    parts.known_widths = known_widths

    def broken(self, *args, **kwargs):
        nonlocal calls
        if calls >= 0:  # past the search for the exact width
            calls += 1
        if calls > 20:
            match kind:
                case "raise":
                    raise RuntimeError("injected fault")
                case "exit":
                    os._exit(9)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(1000)
        return decode(self, *args, **kwargs)

    def refuse(*args, **kwargs):
        raise BackendError("out of memory (injected): use a smaller context")

    LlamaCppBackend.decode = broken
    if kind == "load":
        LlamaCppBackend.load = refuse
    del load


def break_receiving() -> None:
    whole = parts.stage_shard

    def broken(config, port, setup, report):
        def count(phase, done, total):
            report(phase, done, total)
            if phase == "receiving" and done > total // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        return whole(config, port, setup, count)

    parts.stage_shard = broken


def break_shutdown() -> None:
    handle = Stage._handle

    def broken(self, message):
        if isinstance(message, Shutdown):
            os.kill(os.getpid(), signal.SIGKILL)
        return handle(self, message)

    Stage._handle = broken


if host.launched_rank() == int(sys.argv[1]):
    if sys.argv[2] == "receive":
        break_receiving()
    elif sys.argv[2] == "shutdown":
        break_shutdown()
    else:
        break_backend(sys.argv[2])
main(args=sys.argv[3:], prog_name="pipeinfer")
