"""Frames between rank 0 and the HTTP process: a length (4 bytes, big-endian), then JSON.

`Link` is rank 0's end. A thread of its own reads, so that the loop that owns MPI never blocks on
the socket; sends go out as far as the socket takes them and the rest waits in a bounded backlog.
This module knows frames, not what is in them.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pipeinfer.errors import ClusterError, ProtocolError

HEADER = struct.Struct(">I")
MAX_FRAME = 64 << 20  #: bytes of the longest frame
MAX_BACKLOG = 64 << 20  #: unsent bytes above which the other end counts as dead


def encode(frame: dict[str, Any]) -> bytes:
    """The bytes of one frame. Raises ProtocolError when it is too long."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The frames that are complete with `data`. Raises ProtocolError."""
        self._bytes += data
        out: list[dict[str, Any]] = []
        start = 0
        while len(self._bytes) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._bytes, start)
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame announces {size} bytes, more than {MAX_FRAME}")
            end = start + HEADER.size + size
            if len(self._bytes) < end:
                break
            out.append(decode_body(bytes(self._bytes[start + HEADER.size : end])))
            start = end
        del self._bytes[:start]
        return out


def decode_body(body: bytes) -> dict[str, Any]:
    """The object in a frame's body. Raises ProtocolError."""
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("op"), str):
        raise ProtocolError("a frame is no object with an op")
    return frame


class Link:
    """Rank 0's end of the socket. `on_frame` is called from the reading thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.on_frame: Callable[[], None] = lambda: None
        self.closed = False  #: the other end has gone
        self._sock = sock
        self._arrived: deque[dict[str, Any]] = deque()
        self._backlog: deque[memoryview] = deque()
        self._unsent = 0
        self._reader = threading.Thread(target=self._read, name="server link", daemon=True)
        self._reader.start()

    def take(self) -> dict[str, Any] | None:
        """The oldest frame that has arrived."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, frame: dict[str, Any]) -> None:
        """Queue a frame and send what the socket takes now; never blocks.

        Raises ClusterError when the other end has stopped reading (MAX_BACKLOG bytes wait).
        """
        data = encode(frame)
        self._backlog.append(memoryview(data))
        self._unsent += len(data)
        self.pump()
        if self._unsent > MAX_BACKLOG:
            raise ClusterError(f"the HTTP process has left {self._unsent >> 20} MiB unread: it "
                               "hangs")

    def pump(self) -> bool:
        """Send on; whether something still waits."""
        try:
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
        """Send everything within `timeout` seconds; whether that worked."""
        deadline = time.monotonic() + timeout
        while self.pump():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return not self.closed

    def close(self) -> None:
        """Shut the socket; the reading thread ends."""
        self.closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join(timeout=2.0)
        self._sock.close()

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self._sock.recv(1 << 16):
                self._arrived.extend(frames.feed(data))
                self.on_frame()
        except (OSError, ProtocolError):
            pass
        self.closed = True
        self.on_frame()
