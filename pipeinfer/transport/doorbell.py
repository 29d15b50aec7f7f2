"""Doorbells: ranks of one host wake each other, so that a waiting rank need not poll.

MPI has no wait that sleeps. After a send, ranks of one host ring each other over datagram sockets
in Linux's abstract namespace (no file, nothing to clean up). A ring carries no data and may be
lost: a rank that receives one polls MPI at once, one that misses it polls a little later.
"""

from __future__ import annotations

import contextlib
import select
import socket

_MESSAGE, _WAKE = b"m", b"w"


class Doorbell:
    """The doorbell of one rank.

    rung: the number of rings received so far, without `wake`.
    Raises OSError if the system has no such sockets.
    """

    def __init__(self, name: str) -> None:
        self.rung = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._own = _address(name)
        self._socket.bind(self._own)

    def ring(self, name: str) -> bool:
        """Ring another rank's bell; return whether it exists (a full queue counts as rung)."""
        return self._send(_MESSAGE, _address(name))

    def wake(self) -> None:
        """End the `sleep` of this bell's own rank; any thread may call this."""
        self._send(_WAKE, self._own)

    def sleep(self, seconds: float) -> None:
        """Sleep until a ring arrives or `seconds` have passed."""
        select.select([self._socket], (), (), max(seconds, 0.0))  # poll() rounds to milliseconds

    def drain(self) -> bool:
        """Receive and count all rings so far; return whether there were any."""
        some = False
        with contextlib.suppress(BlockingIOError):
            while True:
                self.rung += self._socket.recv(1) == _MESSAGE
                some = True
        return some

    def close(self) -> None:
        """Close the socket; rings to it are lost from now on."""
        self._socket.close()

    def _send(self, what: bytes, address: bytes) -> bool:
        try:
            self._socket.sendto(what, address)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def _address(name: str) -> bytes:
    return b"\0" + name.encode()
