"""The HTTP process from both sides: rank 0 starts it, enters it and ends it; the process lets
engines in at its `EngineListener`.

Rank 0 starts one in a session of its own, or enters that of the supervisor, which outlives the job.
It is started before MPI, because a process that uses MPI must not fork. It receives its settings
over the link, so that keys are on no command line and in no environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import ipaddress
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from msgspec import structs

from pipeinfer.errors import ClusterError, ProtocolError, UsageError
from pipeinfer.server.frames import FIRST, GREETING, HEADER, Failed, Kinds, Welcome, decode, encode
from pipeinfer.server.link import Link
from pipeinfer.server.orders import is_ours
from pipeinfer.server.settings import Settings

_BACKLOG = 1024
_SEND_BUFFER = 512 << 10  #: bytes of an answer that the kernel holds for a slow reader
_NOT_ITS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PIPEINFER_API_KEY")  #: of its environment
_WORDS_SECONDS = 2.0
_ENTER_SECONDS = 20.0
_HANDOVER_SECONDS = 45.0  #: less than other ranks wait in MPI_Init
_LOOK_SECONDS, _HEALTH_SECONDS, _MOST_HEALTH = 0.3, 2.0, 1 << 16
UNIX = "unix:"  #: before the path of a socket
DOOR = "PIPEINFER_DOOR"  #: host:path of the supervisor's HTTP process
T = TypeVar("T")


@dataclass(slots=True)
class HttpProcess:
    """The HTTP process and the link to it.

    process: None if it is no child of this process. url: its address for clients.
    """

    process: subprocess.Popen[bytes] | None
    link: Link
    url: str
    failed: bool = False  #: whether `fail` was called

    def fail(self, message: str) -> None:
        """Send it (once) the reason why the job ends; it ends its streams and exits by itself."""
        if self.failed:
            return
        self.failed = True
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
    """Return a listening socket. Raises UsageError when the address cannot be used.

    host: a name or address, or unix:PATH for a Unix socket that only this user can use.
    client_timeout: seconds after which a connection with unacknowledged data is closed.
    """
    if host.startswith(UNIX):
        return _listen_privately(host.removeprefix(UNIX))
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, ValueError) as error:  # the latter for a name that cannot exist, as a..b
        raise UsageError(f"--host {host} is not an address of this host: "
                         f"{getattr(error, 'strerror', error)}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        with contextlib.suppress(OSError, AttributeError):  # accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
                            min(int(client_timeout * 1000), 2**31 - 1))
        _bind(sock, address, host, port)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            who = "a server that is still shutting down: end it, or" if _shuts_down(host, port) \
                else "another program:"
            raise UsageError(f"port {port} of {host} is in use by {who} choose another with --port"
                             ) from error
        raise UsageError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return sock


def _listen_privately(path: str) -> socket.socket:
    mask = os.umask(0o177)
    try:
        return unix_listener(path)
    finally:
        os.umask(mask)


def _bind(sock: socket.socket, address: Any, host: str, port: int) -> None:
    """Bind a socket; wait for a server that shuts down there, because a restart should not fail
    while the last answers end. Raises OSError."""
    # other ranks wait in MPI_Init meanwhile, which has a limit of its own
    deadline, noted = time.monotonic() + _HANDOVER_SECONDS, False
    while True:
        try:
            sock.bind(address)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline \
                    or not _shuts_down(host, port):
                raise
        if not noted:
            sys.stderr.write(f"pipeinfer: port {port} is that of a server that completes its last "
                             "answers: waiting for it\n")
            noted = True
        time.sleep(_LOOK_SECONDS)


def _shuts_down(host: str, port: int) -> bool:
    """Whether a server of pipeinfer has the port that takes no more requests, as /health says."""
    connection = http.client.HTTPConnection(host or "127.0.0.1", port, timeout=_HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        status = json.loads(connection.getresponse().read(_MOST_HEALTH))["status"]
        return status in ("draining", "stopped", "failed")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        connection.close()


def unix_listener(path: str) -> socket.socket:
    """Return a listening Unix socket, such as that at which engines enter. Raises UsageError if it
    cannot be made."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot make the socket {path}: {error.strerror or error}; remove "
                         "it, or set TMPDIR to another folder with a short name") from error
    sock.listen(4)
    return sock


def start(listener: socket.socket, environ: Mapping[str, str],
          control: socket.socket | None = None) -> subprocess.Popen[bytes]:
    """Start the HTTP process, see `server.__main__`.

    listener: from `entrance`. control: at which a supervisor sends orders, if there is one.
    Close both afterwards.
    """
    files = [sock.fileno() for sock in (listener, control) if sock is not None]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeinfer.server", *map(str, files)], pass_fds=files,
        env={k: v for k, v in environ.items() if not k.startswith(_NOT_ITS)},
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def start_own(settings: Settings, listener: socket.socket) -> HttpProcess:
    """Start an HTTP process with `listener`, which is closed here, and enter it as rank 0."""
    link = socket.socket(socket.AF_UNIX)
    # when the folder has gone, no other process can enter
    with listener, tempfile.TemporaryDirectory(prefix="pipeinfer-") as folder, \
            unix_listener(f"{folder}/engines") as waiting:
        link.connect(waiting.getsockname())
        process = start(waiting, os.environ)
        url = url_of(listener, settings)
        _send_settings(link, settings, url, listener)
    return HttpProcess(process, Link(link), url)


def door_here() -> str | None:
    """Return the path of the supervisor's HTTP process, None if there is none on this host."""
    host, _, path = os.environ.get(DOOR, "").partition(":")
    return path if path and host == socket.gethostname() else None


def enter(path: str, settings: Settings, make: Callable[[], socket.socket]) -> HttpProcess:
    """Connect as rank 0 to the HTTP process at `path`.

    make: returns a listening socket, if the process has none yet.
    Raises ClusterError when it does not answer, and what `make` raises.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_ENTER_SECONDS)
    try:
        sock.connect(path)
        url = first_frame(sock, GREETING).url
        if url:
            _send_settings(sock, settings, url)
        else:
            with make() as listener:
                url = url_of(listener, settings)
                _send_settings(sock, settings, url, listener)
    except (OSError, EOFError) as error:
        sock.close()
        raise ClusterError(f"the HTTP process at {path} does not answer ({error}): start the "
                           "server again") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return HttpProcess(None, Link(sock), url)


def first_frame(sock: socket.socket, kinds: Kinds[T], begun: bytes = b"") -> T:
    """Return the first frame of a blocking socket, without reading beyond it.

    begun: bytes of its header that were already read. Raises EOFError, OSError, ProtocolError.
    """
    (size,) = HEADER.unpack(_exactly(sock, HEADER.size, begun))
    return decode(_exactly(sock, size), kinds)


def _exactly(sock: socket.socket, count: int, data: bytes = b"") -> bytes:
    # a stream gives what is there, not what was asked for
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError("the other end has gone")
        data += part
    return data


def url_of(listener: socket.socket, settings: Settings) -> str:
    """Return the address for clients, "unix:PATH" for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.serve.ssl_cert_file else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _send_settings(link: socket.socket, settings: Settings, url: str,
                   listener: socket.socket | None = None) -> None:
    """Send the first frame and the listening socket. On a loopback address only this host's names
    are accepted."""
    host = urlsplit(url).hostname
    local = host is None or ipaddress.ip_address(host).is_loopback
    body = encode(structs.replace(settings, check_hosts=True) if local else settings)
    sent = socket.send_fds(link, [body], [listener.fileno()] if listener is not None else [])
    link.sendall(body[sent:])


_SETTINGS_SECONDS = 30.0  #: for the settings of a rank 0 that enters
_log = logging.getLogger("pipeinfer.server")


class EnteringEngine(NamedTuple):
    """A rank 0 that has connected: the link to it, its settings, and the listening socket if it
    passed one."""

    link: socket.socket
    settings: Settings
    listener: socket.socket | None


class EngineListener:
    """The listening socket for engines."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener

    def accept_first(self) -> EnteringEngine | None:
        """Wait for one rank 0; None if it cannot enter."""
        return self.admit(self._socket.accept()[0], "")

    async def accept(self, url: str) -> EnteringEngine:
        """Wait for the next rank 0. url: the address for clients."""
        self._socket.setblocking(False)
        while True:
            link, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            # in a thread, with a limit: who connects and says nothing must not stop the streams
            if (guest := await asyncio.to_thread(self.admit, link, url)) is not None:
                return guest

    def close(self) -> None:
        """Remove the socket and its folder."""
        path = Path(self._socket.getsockname())
        self._socket.close()
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()

    def admit(self, link: socket.socket, url: str) -> EnteringEngine | None:
        """Accept a rank 0; None for another user's process or an invalid message."""
        try:
            return _enter(link, url)
        except (OSError, EOFError, ProtocolError) as error:
            _log.warning("a rank 0 could not enter: %s", error)
            link.close()
            return None


def _enter(link: socket.socket, url: str) -> EnteringEngine:
    link.settimeout(_SETTINGS_SECONDS)
    if not is_ours(link):
        raise EOFError("it belongs to another user")
    link.sendall(encode(Welcome(url)))
    begun, files, _, _ = socket.recv_fds(link, HEADER.size, 1)
    listener = socket.socket(fileno=files[0]) if files else None
    if listener is None and not url:
        raise EOFError("it sends no socket for clients")
    settings = first_frame(link, FIRST, begun)
    link.setblocking(False)
    return EnteringEngine(link, settings, listener)
