"""Starts and ends the HTTP process, a child of rank 0 in a session of its own; or enters one that a
launch script keeps, which outlives the job (`door`).

It is started before MPI, because a process that talks MPI must not fork, and gets a listening
socket, one end of a pair and its settings over that pair: keys are on no command line and in no
environment. This module knows processes and sockets, no HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from msgspec import structs

from pipeinfer.errors import ClusterError, UsageError
from pipeinfer.server.frames import GREETING, HEADER, Failed, Kinds, decode, encode
from pipeinfer.server.link import Link
from pipeinfer.server.settings import Settings

_BACKLOG = 1024
_SEND_BUFFER = 512 << 10  #: bytes of an answer that the kernel holds for a slow reader
_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
_WORDS_SECONDS = 2.0
_ENTER_SECONDS = 20.0
DOOR = "PIPEINFER_DOOR"  #: host:path of the launch script's HTTP process
T = TypeVar("T")


@dataclass(slots=True)
class Child:
    """The HTTP process and the link to it. url: where it listens. process: None for one that is no
    child of this process."""

    process: subprocess.Popen[bytes] | None
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
        """Wait for its end, kill it after `timeout` seconds; its exit status. One that is no child
        is left alone."""
        self.link.flush(_WORDS_SECONDS)
        if self.process is None:
            self.link.close()
            return 0
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
    url = url_of(listener, settings)
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
    link.send(_for_url(settings, url))
    return Child(process, link, url)


def door_here() -> str | None:
    """Where the launch script's HTTP process waits for rank 0, if it does and is on this host."""
    host, _, path = os.environ.get(DOOR, "").partition(":")
    return path if path and host == socket.gethostname() else None


def enter(path: str, settings: Settings, make: Callable[[], socket.socket]) -> Child:
    """Become the rank 0 of the HTTP process that waits at `path`. make: a listening socket, for one
    that has none yet. Raises ClusterError when it does not answer, and what `make` does."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_ENTER_SECONDS)
    try:
        _connect(sock, path)
        url = first_frame(sock, GREETING).url
        if url:
            sock.sendall(encode(_for_url(settings, url)))
        else:
            with make() as listener:
                url = url_of(listener, settings)
                body = encode(_for_url(settings, url))
                sent = socket.send_fds(sock, [body], [listener.fileno()])
                sock.sendall(body[sent:])
    except (OSError, EOFError) as error:
        sock.close()
        raise ClusterError(f"the HTTP process at {path} does not answer ({error}): start the "
                           "server again") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return Child(None, Link(sock), url)


def _connect(sock: socket.socket, path: str) -> None:
    """It may not be there yet."""
    deadline = time.monotonic() + _ENTER_SECONDS
    while True:
        try:
            sock.connect(path)
            return
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def first_frame(sock: socket.socket, kinds: Kinds[T], begun: bytes = b"") -> T:
    """The first frame of a socket that waits, and no byte of the next one. begun: what was read of
    its header. Raises EOFError, OSError, ProtocolError."""
    (size,) = HEADER.unpack(_exactly(sock, HEADER.size, begun))
    return decode(_exactly(sock, size), kinds)


def _exactly(sock: socket.socket, count: int, data: bytes = b"") -> bytes:
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError("the other end has gone")
        data += part
    return data


def url_of(listener: socket.socket, settings: Settings) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _for_url(settings: Settings, url: str) -> Settings:
    """On a loopback address only the names of this host are taken."""
    local = ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback
    return structs.replace(settings, check_hosts=True) if local else settings
