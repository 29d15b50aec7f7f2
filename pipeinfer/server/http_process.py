"""Starts and ends the HTTP process, a child of rank 0 in a session of its own; or connects to
the one of the supervisor, which outlives the job (`door`).

The child is started before MPI, because a process that uses MPI must not fork. It inherits a
listening socket and one end of a socket pair, over which it receives its settings, so that keys
are on no command line and in no environment.
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
DOOR = "PIPEINFER_DOOR"  #: host:path of the supervisor's HTTP process
T = TypeVar("T")


@dataclass(slots=True)
class Child:
    """The HTTP process and the link to it.

    process: None if it is no child of this process. url: its address for clients.
    """

    process: subprocess.Popen[bytes] | None
    link: Link
    url: str
    told: bool = False  #: whether `fail` was called

    def fail(self, message: str) -> None:
        """Send it (once) the reason why the job ends; it ends its streams and exits by itself."""
        if self.told:
            return
        self.told = True
        with contextlib.suppress(Exception):
            self.link.send(Failed(message))
            self.link.flush(_WORDS_SECONDS)

    def end(self, timeout: float) -> int:
        """Wait for its end, kill it after `timeout` seconds; return its exit status.

        A process that is no child is only disconnected; then the result is 0.
        """
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
    """Return a listening TCP socket. Raises UsageError when the address cannot be used.

    client_timeout: seconds after which a connection with unacknowledged data is closed.
    """
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
    """Start the HTTP process with `listener`, which is closed here."""
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
    """Return the path of the supervisor's HTTP process, None if there is none on this host."""
    host, _, path = os.environ.get(DOOR, "").partition(":")
    return path if path and host == socket.gethostname() else None


def enter(path: str, settings: Settings, make: Callable[[], socket.socket]) -> Child:
    """Connect as rank 0 to the HTTP process at `path`.

    make: returns a listening socket, if the process has none yet.
    Raises ClusterError when it does not answer, and what `make` raises.
    """
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
    """Connect, and wait for the socket if it does not exist yet."""
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
    """Return the first frame of a blocking socket, without reading beyond it.

    begun: bytes of its header that were already read. Raises EOFError, OSError, ProtocolError.
    """
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
    """Return the address for clients."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _for_url(settings: Settings, url: str) -> Settings:
    """Return the settings; on a loopback address only this host's names are accepted."""
    local = ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback
    return structs.replace(settings, check_hosts=True) if local else settings
