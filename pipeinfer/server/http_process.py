"""Starts and ends the HTTP process, a child of rank 0 in a session of its own.

It is started before MPI, because a process that talks MPI must not fork, and gets a listening
socket, one end of a pair and its settings over that pair: keys are on no command line and in no
environment. This module knows processes and sockets, no HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from pipeinfer.errors import UsageError
from pipeinfer.server.frames import Failed
from pipeinfer.server.link import Link
from pipeinfer.server.settings import Settings

_BACKLOG = 1024
_SEND_BUFFER = 512 << 10  #: bytes of an answer that the kernel holds for a slow reader
_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
_WORDS_SECONDS = 2.0


@dataclass(slots=True)
class Child:
    """The HTTP process and the link to it. url: where it listens."""

    process: subprocess.Popen[bytes]
    link: Link
    url: str
    told: bool = False  #: it knows why the job cannot go on

    def fail(self, message: str) -> None:
        """Tell it (once) why the job cannot go on; it ends its streams and exits by itself."""
        if self.told:
            return
        self.told = True
        with contextlib.suppress(Exception):
            self.link.send(Failed(message))
            self.link.flush(_WORDS_SECONDS)

    def end(self, timeout: float) -> int:
        """Wait for its end, kill it after `timeout` seconds; its exit status."""
        self.link.flush(_WORDS_SECONDS)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            code = self.process.wait()
        self.link.close()
        return code


def listen(host: str, port: int, client_timeout: float) -> socket.socket:
    """A listening TCP socket. Raises UsageError when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"--host {host} is not an address of this "
                         f"host: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        with contextlib.suppress(OSError, AttributeError):  # accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
                            min(int(client_timeout * 1000), 2**31 - 1))
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} of {host} is in use by another program: choose another "
                             "with --port") from error
        raise UsageError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return sock


def start(settings: Settings, listener: socket.socket) -> Child:
    """Start the HTTP process on `listener`, which it takes over."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_loopback:
        settings = dataclasses.replace(settings, check_hosts=True)
    ours, theirs = socket.socketpair()
    environ = {k: v for k, v in os.environ.items()
               if not k.startswith(_LAUNCHER) and k != "PIPEINFER_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeinfer.server", str(theirs.fileno()), str(listener.fileno())],
        pass_fds=(theirs.fileno(), listener.fileno()), env=environ, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )
    theirs.close()
    listener.close()
    link = Link(ours)
    link.send(settings)
    return Child(process, link, f"http://{f'[{host}]' if ':' in host else host}:{port}")
