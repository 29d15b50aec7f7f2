"""A stage's backend and port that fail where `--hook fault=` wants it, see `faults.py`.

Each wrapper returns its argument untouched when no fault is for this rank. Knows the contracts of
backends and ports, no MPI, request, plan or server.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from pipeinfer.backends.base import Backend
from pipeinfer.core.messages import Cancel, Message, Tag
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError
from pipeinfer.transport.base import Envelope, Layout, Port
from pipeinfer_lab.faults.delaying import DelayingPort
from pipeinfer_lab.faults.faults import (
    SIGNALS,
    Die,
    Fault,
    Kind,
    begin,
    faults_of,
    happened_here,
    shift_clock,
    signal_self,
)

_MEMORY_STEP = 4 << 20
_MEMORY_ROOM = 64 << 20  #: bytes that `memory` leaves before it hits the limit


# --- the backend ------------------------------------------------------------------------------


def faulty_backend(backend: Backend, faults: Sequence[Fault], rank: int,
                   die: Die = signal_self) -> Backend:
    """A stage's backend that fails when it is told to.

    To be wrapped after its widths were measured, so that counts are those of requests' runs. die:
    what a process does to itself, with the signal's number.
    """
    kinds = (*SIGNALS, Kind.ERROR, Kind.MEMORY, Kind.CLOCK)
    mine = faults_of(faults, rank, kinds, ("prefill", "decode"))
    for fault in (slow := [f for f in faults if f.rank == rank and f.kind is Kind.SLOW]):
        begin(fault)
    if not mine and not slow:
        return backend
    return _FaultyBackend(backend, mine, die, sum(fault.ms for fault in slow) / 1e3)


class _FaultyBackend:
    """A backend with faults; in a run of a prompt's chunk at most the last row has an output."""

    def __init__(self, inner: Backend, faults: list[Fault], die: Die, late: float) -> None:
        self.info, self.capabilities = inner.info, inner.capabilities
        self.seq_rm, self.seq_cp, self.seq_keep = inner.seq_rm, inner.seq_cp, inner.seq_keep
        self._inner, self._faults, self._die, self._seconds = inner, faults, die, late
        self._seen = {"prefill": 0, "decode": 0}
        self._had_output: set[tuple[int, int]] = set()  # tokens with their positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # joins, and what else a backend has

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        moment = self._moment(rows)
        self._seen[moment] += 1
        for fault in self._faults:
            if fault in happened_here or fault.moment != moment or self._seen[moment] < fault.count:
                continue
            if fault.kind is Kind.ERROR and fault.layer > 0:
                self._fail_inside(fault, rows, hidden, should_stop)
                return None
            begin(fault)
            if fault.kind is Kind.ERROR:
                raise _exception(fault)
            if fault.kind is Kind.MEMORY:
                exhaust_memory()
            elif fault.kind is Kind.CLOCK:
                shift_clock(fault.s)
            else:
                self._die(SIGNALS[fault.kind])
        if self._seconds:
            time.sleep(self._seconds)
        return self._inner.decode(rows, hidden, should_stop)

    def _moment(self, rows: Rows) -> str:
        """Return which kind of run this is: "prefill" or "decode".

        Not every row of a decode has an output: there may be hint rows behind, and where layers
        keep a state, tokens in front that had an output in a run before.
        """
        without: set[tuple[int, int]] = set()
        having: set[tuple[int, int]] = set()
        for token, position, output in zip(*rows.lists, strict=True):
            (having if output else without).add((token, position))
        again = not self._had_output.isdisjoint(without)
        self._had_output |= having
        hints = any(rows.lists.outputs[:-1])
        return "decode" if again or hints or not without else "prefill"

    def _fail_inside(self, fault: Fault, rows: Rows, hidden: FloatArray | None,
                     should_stop: Callable[[], bool] | None) -> None:
        """Raise after `fault.layer` layers, after the last one where there are not so many.

        Returns where the run was stopped before that; the next one is tried then.
        """
        done = 0

        def look() -> bool:
            nonlocal done
            done += 1
            if done >= fault.layer:
                begin(fault)
                raise _exception(fault)
            return should_stop is not None and should_stop()

        if self._inner.decode(rows, hidden, look) is not None:
            begin(fault)
            raise _exception(fault)

    def close(self) -> None:
        """Release the model and its cache."""
        self._inner.close()


def _exception(fault: Fault) -> Exception:
    kinds: dict[str, type[Exception]] = {"runtime": RuntimeError, "backend": BackendError,
                                         "memory": MemoryError}
    return kinds[fault.type](f"injected: {fault}")


def exhaust_memory() -> None:
    """Allocate until the process's own limit answers; raises MemoryError, and gives all back.

    The limit is lowered to a little more than what is used now, so that the host keeps its memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(psutil.Process().memory_info().vms) + _MEMORY_ROOM
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    held = []
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        while True:
            held.append(bytearray(_MEMORY_STEP))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        held.clear()


# --- the port ---------------------------------------------------------------------------------


def faulty_port(port: Port, faults: Sequence[Fault], rank: int) -> Port:
    """A rank's port that loses cancellations or gets its messages late, or whose link to another
    rank is cut."""
    cut = [f for f in faults if f.kind is Kind.CUT_LINK and rank in (f.rank, f.peer)]
    if cut:
        port = _CutPort(port, cut[0], sum((cut[0].rank, cut[0].peer)) - rank)
    slow = faults_of(faults, rank, (Kind.SLOW_LINK,), ("",))
    lossy = faults_of(faults, rank, (Kind.LOSE_CANCEL,), ("",))
    if not slow and not lossy:
        return port
    for fault in (*slow, *lossy):
        sys.stderr.write(f"pipeinfer: fault: {fault}\n")
    return _FaultyPort(port, sum(f.ms for f in slow) / 1e3, lossy[0].every if lossy else 0)


class _FaultyPort(DelayingPort):
    """A port with faults. received: messages by tag; lost: cancellations among them.

    Rank 0 gets no cancellations, it sends them: there it is every n-th that is not sent.
    """

    def __init__(self, inner: Port, seconds: float, every: int) -> None:
        super().__init__(inner, self._late)
        self.received: dict[Tag, int] = dict.fromkeys(Tag, 0)
        self.lost = 0
        self._seconds, self._every, self._cancels = seconds, every, 0

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""
        if self.node == 0 and isinstance(message, Cancel) and self._loses():
            return
        super().send(dest, tag, message)

    def _late(self, tag: Tag, envelope: Envelope, now: float) -> float | None:
        self.received[tag] += 1
        lost = isinstance(envelope.message, Cancel) and self._loses()
        return None if lost else now + self._seconds

    def _loses(self) -> bool:
        if not self._every:
            return False
        self._cancels += 1
        lost = self._cancels % self._every == 0
        self.lost += lost
        return lost


class _CutPort(DelayingPort):
    """A port with a cut link: nothing is sent to rank `peer` any more."""

    def __init__(self, inner: Port, fault: Fault, peer: int) -> None:
        super().__init__(inner, lambda *_: time.monotonic())
        self._fault, self._peer, self._sent = fault, peer, 0

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """Queue `message` for node `dest`; returns at once."""
        layout = getattr(self._inner, "layout", None)  # of ranks other than 0, and only MPI has it
        if isinstance(layout, Layout) and layout.rank_of[dest] == self._peer:
            self._sent += 1
            if self._sent == self._fault.after + 1:
                begin(self._fault)
            if self._sent > self._fault.after:
                return
        super().send(dest, tag, message)
