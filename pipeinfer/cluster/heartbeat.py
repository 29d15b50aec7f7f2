"""Heartbeats over UDP, for failures that MPI does not report: a host that is cut off, or a rank
that exits with an error.

    rank k   sends heartbeats to the head from a thread, several within the allowed time
    head     answers each; a rank that was received before and is silent for too long is lost
    rank k   exits when a head that has answered before is silent for even longer: by then its
             layers have been given to others

Heartbeats carry a token that ranks exchanged over MPI, and whether the rank needs patience. A rank
whose heartbeats never arrive (a firewall) is not declared dead. This module uses no MPI, runs or
models.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import psutil

from pipeinfer import host
from pipeinfer.core.control import Meeting
from pipeinfer.runtime.pulse import Pulse

_LOOPBACK = "127.0.0.1"
_BEATS = 8  #: in the time after which silence counts
_TOKEN_BYTES = 16
_BODY = struct.Struct("<I?")  # rank, whether it is patient (see `watchdog.Pulse`)
_PATIENT = 5.0  #: times the time allowed, for patient ranks
_HEAD_LATE = 4.0  #: times the allowed time after which the head counts as gone
_LATE = 3.0  #: pauses that passed in one: then the thread itself was not running


class HeadPulse:
    """The head's side. `silent` returns the ranks whose heartbeats have stopped.

    seconds: of silence after which a rank counts as lost, if this rank's own timers are on time.
    pulse: says how late they are.
    """

    def __init__(self, seconds: float, pulse: Pulse | None = None) -> None:
        self.wake: Callable[[], None] = lambda: None  #: called when a rank falls silent
        self._seconds, self._pulse = seconds, pulse or Pulse()
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._heard: dict[int, tuple[float, float]] = {}  # when, and how long until it is late
        self._awake = time.monotonic()
        self._told: set[int] = set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_LOOPBACK if host.on_one_host() else "", 0))
        self._socket.settimeout(seconds / _BEATS)
        self._closed = False
        threading.Thread(target=self._listen, name="heartbeats", daemon=True).start()

    @property
    def meeting(self) -> Meeting:
        """Where ranks send heartbeats: this host's addresses, the port and the token."""
        bound, port = self._socket.getsockname()
        addresses = [bound] if bound == _LOOPBACK else [
            address.address for card in psutil.net_if_addrs().values() for address in card
            if address.family == socket.AF_INET]
        addresses.sort(key=lambda address: address.startswith("127."))
        return Meeting(tuple(addresses), port, self._token.hex(), self._seconds)

    def silent(self) -> set[int]:
        """Return the ranks that were received before and are silent now."""
        now = time.monotonic()
        if self._awake < now - self._seconds:  # the receiving thread itself has not run
            return set()
        more = _BEATS * self._pulse.late
        return {rank for rank, (heard, allowed) in list(self._heard.items())
                if now - heard > allowed + more}

    def close(self) -> None:
        """Stop receiving and close the socket."""
        self._closed = True
        self._socket.close()

    def _listen(self) -> None:
        # its own thread: the head's may be busy with a run for longer than a rank may be silent
        while not self._closed:
            try:
                data, source = self._socket.recvfrom(64)
            except OSError:  # in time nothing came, or the socket was closed
                data = b""
            now = time.monotonic()
            if now - self._awake > _LATE * self._seconds / _BEATS:
                self._heard = {rank: (now, allowed)  # what came meanwhile is still queued
                               for rank, (_, allowed) in self._heard.items()}
            self._awake = now
            if len(data) == _TOKEN_BYTES + _BODY.size and hmac.compare_digest(
                    data[:_TOKEN_BYTES], self._token):
                rank, patient = _BODY.unpack_from(data, _TOKEN_BYTES)
                self._heard[rank] = (now, self._seconds * (_PATIENT if patient else 1.0))
                with contextlib.suppress(OSError):
                    self._socket.sendto(data, source)
            if (silent := self.silent()) - self._told:
                self.wake()
            self._told = silent


class RankPulse:
    """A rank's side: sends heartbeats until `close`.

    rank: its number in the job.
    meeting: where the head receives heartbeats.
    pulse: whether the main thread needs patience.
    on_silence: called once, in the thread, when the head stops answering.
    """

    def __init__(self, rank: int, meeting: Meeting, pulse: Pulse, on_silence: Callable[[], None]
                 ) -> None:
        self._rank, self._token, self._pulse = rank, bytes.fromhex(meeting.token), pulse
        self._meeting, self._on_silence = meeting, on_silence
        self._closed = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if set(meeting.addresses) == {_LOOPBACK}:
            self._socket.bind((_LOOPBACK, 0))
        self._socket.setblocking(False)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Stop sending; the thread ends after its next pause."""
        self._closed = True

    def _run(self) -> None:
        targets: Sequence[str] = self._meeting.addresses
        pause = self._meeting.seconds / _BEATS
        answered: float | None = None
        # its own thread: the main one may compute for longer than the head waits
        while not self._closed:
            beat = self._token + _BODY.pack(self._rank, self._pulse.patient)
            for address in targets:
                with contextlib.suppress(OSError):
                    self._socket.sendto(beat, (address, self._meeting.port))
            asleep = time.monotonic()
            time.sleep(pause)
            now = time.monotonic()
            self._pulse.slept(pause, now - asleep)
            # the address that answers is used from then on; the others may be unreachable
            while (found := self._answer()) is not None:
                answered, targets = now, (found,)
            if answered is None:
                continue
            if now - asleep > _LATE * pause:
                answered = now  # this thread was not running
            if now - answered > _HEAD_LATE * self._meeting.seconds + _BEATS * self._pulse.late:
                self._on_silence()
                break
        self._socket.close()

    def _answer(self) -> str | None:
        """Return the address of the next answer from the head, None if there is none."""
        while True:  # what else arrives at this port is dropped
            try:
                data, source = self._socket.recvfrom(64)
            except OSError:
                return None
            if data.startswith(self._token):
                return str(source[0])
