"""Rank 0's end of the socket to the HTTP process.

A thread reads, so that the loop that owns MPI never blocks on the socket. Sends go out as far as
the socket accepts them; the rest waits in a bounded backlog. This module does not interpret
frames.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from pipeinfer.errors import ClusterError, ProtocolError
from pipeinfer.server.frames import (
    FROM_CLIENT,
    GREETING,
    ClientFrame,
    EngineFrame,
    FrameReader,
    Kinds,
    Welcome,
    encode,
)
from pipeinfer.server.settings import Settings

#: who has started the HTTP process need not read its greeting first
_KINDS: Kinds[ClientFrame | Welcome] = {**FROM_CLIENT, **GREETING}
MAX_BACKLOG = 64 << 20  #: unsent bytes above which the other end counts as dead


class Link:
    """Rank 0's end of the socket. `on_frame` is called from the reading thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.on_frame: Callable[[], None] = lambda: None
        self.closed = False  #: whether the other end has gone
        self.problem = ""  #: error in a received frame, after which nothing is read
        self._sock = sock
        self._arrived: deque[ClientFrame] = deque()
        self._backlog: deque[memoryview] = deque()
        self._unsent = 0
        self._reader = threading.Thread(target=self._read, name="server link", daemon=True)
        self._reader.start()

    def take(self) -> ClientFrame | None:
        """Return the oldest frame that has arrived, or None."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, frame: Settings | EngineFrame) -> None:
        """Queue a frame and send what the socket takes now; never blocks.

        Raises ClusterError when the other end has stopped reading (MAX_BACKLOG bytes wait).
        """
        self.send_bytes(encode(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send a frame's bytes, see `send`."""
        self._backlog.append(memoryview(data))
        self._unsent += len(data)
        self.pump()
        if self._unsent > MAX_BACKLOG:
            raise ClusterError(f"the HTTP process hangs: it has left {self._unsent >> 20} MiB "
                               "unread")

    def pump(self) -> bool:
        """Send more of the backlog; return whether some is left."""
        try:
            # never waits: the engine's loop sends between two runs
            while self._backlog and not self.closed:
                sent = self._sock.send(self._backlog[0], socket.MSG_DONTWAIT)
                self._unsent -= sent
                if sent == len(self._backlog[0]):
                    self._backlog.popleft()
                else:
                    self._backlog[0] = self._backlog[0][sent:]
        except BlockingIOError:
            return True
        except OSError:
            self.closed = True
        if self.closed:
            self._backlog.clear()
            self._unsent = 0
        return bool(self._backlog)

    def flush(self, timeout: float) -> bool:
        """Send everything within `timeout` seconds; return whether that succeeded."""
        deadline = time.monotonic() + timeout
        # at the end nobody else pumps
        while self.pump():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return not self.closed

    def close(self) -> None:
        """Close the socket; the reading thread ends."""
        self.closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join(timeout=2.0)
        self._sock.close()

    def _read(self) -> None:
        frames = FrameReader(_KINDS)
        try:
            while data := self._sock.recv(1 << 16):
                self._arrived.extend(frame for frame in frames.feed(data)
                                     if not isinstance(frame, Welcome))
                self.on_frame()
        except OSError:
            pass
        except ProtocolError as error:
            self.problem = str(error)
        self.closed = True
        self.on_frame()
