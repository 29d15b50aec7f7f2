"""Passes this process's standard input on to rank 0, for `pipeinfer chat`.

Rank 0 gets none from its launcher: mpirun of Open MPI 5.0 damages long input, and does not end
after passing a pipe on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator

from pipeinfer.cli.chat_terminal import INPUT
from pipeinfer.supervise.launcher import name_terminal

_PIECE = 1 << 16


@contextlib.contextmanager
def passed_on(environ: dict[str, str]) -> Iterator[None]:
    """Let rank 0 on this host read standard input through a local socket, which `environ` names.

    Where standard input and output are a terminal, rank 0 opens that itself instead.
    """
    if os.isatty(1) and name_terminal(environ, 0):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pipeinfer-input-") as folder, \
            socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "socket")
        listener.bind(path)
        listener.listen()
        environ[INPUT] = f"{socket.gethostname()}:{path}"
        threading.Thread(target=_serve, args=(listener,), name="input", daemon=True).start()
        yield


def _serve(listener: socket.socket) -> None:
    """Send the input to who connects: rank 0, and after a restart its successor, which gets the
    rest."""
    rest, ended = b"", False
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the job has ended
            return
        with contextlib.suppress(OSError), connection:  # rank 0 may end first
            while rest or not ended:
                rest = rest or _read()
                ended = not rest
                connection.sendall(rest)
                rest = b""


def _read() -> bytes:
    """Return the next bytes of standard input, none at its end and where it cannot be read."""
    with contextlib.suppress(OSError):
        return os.read(0, _PIECE)
    return b""
