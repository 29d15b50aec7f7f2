"""The HTTP process: `python -m pipeinfer.server ENGINES [CONTROL]`.

ENGINES is a listening Unix socket, at which engines enter: rank 0 connects and sends its settings;
the first one also passes the listening socket for clients. Rank 0 starts the process, or a
supervisor does, with CONTROL, by which it controls it (`orders`).

With a supervisor the process outlives the job: when a job has ended, requests wait for the next
one, which continues them. It ends after
rank 0's Bye (exit status 0), on SIGTERM, which means that no job follows, or with its parent.
Without one it ends with its first engine (exit status 0 after Bye, else 1).
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable

from pipeinfer import host
from pipeinfer.loading import uncollected
from pipeinfer.server.http_process import EngineListener, EnteringEngine


def main() -> int:
    """Serve until no further engine comes; return the exit status."""
    listener, *more = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if more:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        host.end_with_parent()
    engines = EngineListener(listener)
    try:
        # a rank 0 that could not enter is not the last one that a supervisor starts
        while (guest := engines.accept_first()) is None:
            if not more:
                return 1  # rank 0 has gone already
        return serving()(engines, guest, more[0] if more else None)
    finally:
        engines.close()


def serving() -> Callable[[EngineListener, EnteringEngine, socket.socket | None], int]:
    """Import what answers clients, after the first engine has entered, which need not wait."""
    with uncollected():
        from pipeinfer.server.http_server import run

    return run


if __name__ == "__main__":
    sys.exit(main())
