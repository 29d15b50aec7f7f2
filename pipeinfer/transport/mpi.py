"""Nodes as MPI ranks. The only file that imports mpi4py.MPI.

Facts behind the shape (docs/mpi.md): sends and receives are non-blocking and their buffers kept;
one matched probe for any tag drains everything that has arrived, so a cancellation is never stuck
behind activations and a large message is moved along by its receiver; waiting sleeps in
proportion to the time already waited, which bounds both the latency added and the processor
time burnt; before that it offers the processor to others for a moment. Ranks of one host wake each
other (`doorbell`) and need no polling.

Where the MPI library goes on after the death of a rank (ULFM), the dead are noted and nothing is
sent to them any more. The communicator is neither revoked nor shrunk: both wait for every rank,
also for one that hangs. A new epoch (`transport.base`) does what they are for, and is in the tag:

    tag = (epoch * 1024 + node) * 8 + kind      kind 7: an order from rank to rank, of no epoch

This module knows no runs and no models.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mpi4py import MPI

from pipeinfer import protocol
from pipeinfer.errors import ClusterError, ProtocolError, RankLost, TransportTimeout
from pipeinfer.protocol import Message, Tag
from pipeinfer.transport.base import Dismissed, Envelope, Layout, Mailbox, Regrouped, Traffic
from pipeinfer.transport.doorbell import Doorbell
from pipeinfer.transport.inproc import LocalPort

_TAGS_PER_NODE = 8
_MAX_NODES = 1024
_ORDER_TAG = 7  #: from rank to rank, of node 0 and epoch 0
_PR_SET_TIMERSLACK = 29
_SPIN_SECONDS = 150e-6
_MIN_SLEEP = 30e-6
_SHARE = 0.125
_LIVE_CAP = 1e-3
_IDLE_CAP = 10e-3
_RING_SECONDS = 50e-3  #: how long a ring announces a message
_BELL_CAP = 20e-3  #: between two looks of a rank that is rung for every message
_LEAVE = b'{"kind": "leave"}'
_PMIX_USERS = 8  #: at most, in one process
_DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


@dataclass(slots=True, eq=False)
class _Pending:
    """A send that MPI still reads from, or a receive that it still writes to."""

    request: MPI.Request
    rank: int
    tag: int
    frame: bytes | bytearray = field(repr=False)


@dataclass(slots=True)
class _House:
    """The ranks of this host and this rank's bell; names[rank] is the bell of a neighbour."""

    bell: Doorbell
    names: dict[int, str]


_bell: list[Doorbell] = []  #: at most one per process, made by `own_bell`
_bell_name: list[str] = []
_house: list[_House] = []  #: likewise, made by `meet`
_ports: list[MpiPort] = []  #: that this process has made


class MpiPort:
    """The port of a rank's first node; relays for further nodes of the same rank.

    A rank that holds no node has node -1 and hears orders only. Every method but `wake` belongs to
    the thread that initialised MPI.

    gone: ranks that MPI says are dead, or that others say have been given up.
    """

    def __init__(self, comm: MPI.Comm, layout: Layout) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.traffic = Traffic()
        self.gone: set[int] = set()
        self._wanted: dict[str, Any] | None = None
        self.silent: Callable[[], set[int]] = set  # ranks whose heartbeats have stopped
        self.node = -1
        self._layout = layout
        self._own = Mailbox(layout.epoch)
        self._mailboxes: dict[int, Mailbox] = {}
        self._local: list[LocalPort] = []
        self._pending: deque[_Pending] = deque()
        self._arriving: dict[int, deque[_Pending]] = {}
        self._buried: list[_Pending] = []  # of ranks that may still touch their buffers
        self._later: list[tuple[int, int, bytes | bytearray]] = []
        self._outbox: deque[tuple[int, Tag, bytes, int]] = deque()
        self._called: Layout | None = None
        self._dismissed = False
        self._noticed: set[int] = set()
        self._status = MPI.Status()
        self._house = _house[0] if _house else None
        self._all_near = False
        self._received = 0
        crowded = self._house is not None and len(self._house.names) > (os.cpu_count() or 1)
        self._spin = 0.0 if crowded else _SPIN_SECONDS
        self._rung_at = 0.0
        _sharpen_timers()
        self._move_to(layout)
        _ports.append(self)

    @property
    def mailbox(self) -> Mailbox:
        """Where `pump` puts what arrives for this node."""
        return self._own

    def local_port(self, node: int) -> LocalPort:
        """A port for another node of this rank, to be used by a thread of its own."""

        def forward(dest: int, tag: Tag, frame: bytes, epoch: int) -> None:
            self._outbox.append((dest, tag, frame, epoch))
            self.wake()

        port = LocalPort(node, self._mailboxes, forward)
        self._local.append(port)
        return port

    @property
    def layout(self) -> Layout:
        """Who holds what, in the epoch that this port has entered."""
        return self._layout

    def order(self, rank: int, data: dict[str, Any]) -> None:
        """Tell a rank something that is of no epoch; it gets there if the rank lives."""
        if rank not in self.gone:
            self._post(rank, _ORDER_TAG, json.dumps(data).encode())

    def regroup(self, layout: Layout, given_up: Collection[int]) -> None:
        """The head's part of a new epoch: every rank is told, and this port enters it.

        given_up: ranks that go on without; one that comes back to life leaves when it hears so.
        """
        for rank in set(given_up) - self.gone:
            self.order(rank, {"kind": "leave"})
        self.give_up(given_up)
        for rank in range(1, self.comm.Get_size()):
            self.order(rank, {"kind": "place", "rank_of": list(layout.rank_of),
                              "epoch": layout.epoch, "lost": sorted(self.gone)})
        self._move_to(layout)
        for port in self._local:
            port.call(layout.epoch)

    def adopt(self) -> None:
        """See `Port.adopt`."""
        if self._called is not None:
            layout, self._called = self._called, None
            self._move_to(layout)

    def new_losses(self) -> set[int]:
        """See `Port.new_losses`."""
        silent = self.silent() - self.gone
        for rank in silent:  # one that was stopped hears it when it goes on
            self.order(rank, {"kind": "leave"})
        self.give_up(silent)
        fresh = self.gone - self._noticed
        self._noticed |= fresh
        return fresh

    def take_wanted(self) -> dict[str, Any] | None:
        """See `Port.take_wanted`."""
        wanted, self._wanted = self._wanted, None
        return wanted

    def dismiss(self) -> None:
        """Tell every other rank to leave."""
        for rank in range(self.comm.Get_size()):
            if rank != self.rank:
                self.order(rank, {"kind": "leave"})

    def send(self, dest: int, tag: Tag, message: Message) -> None:
        """See `Port.send`."""
        frame = protocol.encode(message)
        self.traffic.count(tag, len(frame))
        box = self._mailboxes.get(dest)
        if box is not None:
            box.put(self.node, tag, frame, self._layout.epoch)
        else:
            self._isend(dest, tag, frame)

    def take(self, tag: Tag) -> Envelope | None:
        """See `Port.take`. Raises ClusterError when rank 0 is dead."""
        self.pump()
        if self._dismissed:
            raise Dismissed
        if self._called is not None:
            raise Regrouped
        return self._own.take(tag)

    def wait(self, timeout: float, *, live: bool = True) -> None:
        """See `Port.wait`."""
        start = time.monotonic()
        cap = _LIVE_CAP if live else _IDLE_CAP
        while True:
            self.pump()
            if not self._own.empty or self._own.arrived.is_set() or self._has_orders:
                self._own.arrived.clear()
                return
            waited = time.monotonic() - start
            if waited >= timeout:
                return
            if waited < self._spin:
                os.sched_yield()
            elif self._house is not None:
                if not self._heard():
                    self._house.bell.sleep(min(self._pause(waited, cap), timeout - waited))
            else:
                pause = min(max(waited * _SHARE, _MIN_SLEEP), cap, timeout - waited)
                self._own.arrived.wait(pause)

    def _heard(self) -> bool:
        """Whether someone rang since the last look at the bell."""
        assert self._house is not None
        bell = self._house.bell
        some = bell.drain()
        bell.rung = max(bell.rung, self._received)  # a ring can be lost, a message can not
        if some:
            self._rung_at = time.monotonic()
        return some

    def _pause(self, waited: float, cap: float) -> float:
        """How long to sleep if nobody rings."""
        assert self._house is not None
        bell = self._house.bell
        if bell.rung > self._received:  # rung for something that MPI still moves
            waited = time.monotonic() - self._rung_at
            if waited > _RING_SECONDS:  # no: its message had been received before the ring
                bell.rung = self._received
        if bell.rung == self._received and self._all_near and not self._pending:
            return _BELL_CAP
        return min(max(waited * _SHARE, _MIN_SLEEP), cap)

    def wake(self) -> None:
        """See `Port.wake`."""
        self._own.arrived.set()
        if self._house is not None:
            self._house.bell.wake()

    def close(self, timeout: float) -> None:
        """See `Port.close`."""
        deadline = time.monotonic() + timeout
        while (self._pending or self._outbox) and time.monotonic() < deadline:
            self.pump()
            time.sleep(_LIVE_CAP)

    def pump(self) -> None:
        """Receive all that has arrived, relay, and forget completed sends.

        Raises ClusterError when rank 0 is dead.
        """
        while self._outbox:
            dest, tag, relayed, epoch = self._outbox.popleft()
            if epoch == self._layout.epoch:
                self._isend(dest, tag, relayed)
        while self._pending and self._done(first := self._pending[0]):
            if self._pending and self._pending[0] is first:  # else its rank has just been given up
                self._pending.popleft()
        for rank in list(self._arriving):
            self._collect(rank)
        status = self._status
        while (probe := self._probe(status)) is not None:
            frame = bytearray(status.Get_count(MPI.BYTE))
            rank = status.Get_source()
            arriving = self._arriving.setdefault(rank, deque())
            arriving.append(_Pending(probe.Irecv([frame, MPI.BYTE]), rank, status.Get_tag(), frame))
            self._received += 1
            self._collect(rank)

    # --- messages -----------------------------------------------------------------------------

    def _probe(self, status: MPI.Status) -> MPI.Message | None:
        while True:
            try:
                return self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            except MPI.Exception as error:
                self._note_deaths(error)

    def _done(self, pending: _Pending) -> bool:
        """Whether MPI has finished with it, one way or the other."""
        try:
            return bool(pending.request.Test())
        except MPI.Exception as error:
            self._note_deaths(error)
            pending.tag = -1
            return True

    def _collect(self, rank: int) -> None:
        """Deliver what has arrived in full from a rank, in order."""
        arriving = self._arriving.get(rank)
        while arriving and self._done(arriving[0]):
            pending = arriving.popleft()
            if pending.tag >= 0 and rank not in self.gone:
                self._deliver(rank, pending.tag, pending.frame)
        if not arriving:
            self._arriving.pop(rank, None)

    def _deliver(self, rank: int, tag: int, frame: bytes | bytearray) -> None:
        if tag == _ORDER_TAG:
            self._hear(rank, frame)
            return
        place, kind = divmod(tag, _TAGS_PER_NODE)
        epoch, node = divmod(place, _MAX_NODES)
        if epoch > self._layout.epoch:
            self._later.append((rank, tag, frame))
            return
        if epoch < self._layout.epoch:
            return
        box = self._mailboxes.get(node)
        if box is None:
            raise ProtocolError(
                f"rank {self.rank} got a message for node {node} from rank {rank}")
        box.put(-1, Tag(kind), frame, epoch)

    def _hear(self, rank: int, frame: bytes | bytearray) -> None:
        """An order; only rank 0 gives any."""
        try:
            data = json.loads(frame)
            kind = data["kind"]
            if rank != 0 or kind not in ("place", "leave", "prepare"):
                raise ValueError(f"{kind} from rank {rank}")
            if kind == "leave":
                self._dismissed = True
                return
            if kind == "prepare":
                self._wanted = data
                return
            layout = Layout(tuple(map(int, data["rank_of"])), int(data["epoch"]))
            lost = set(map(int, data["lost"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"rank {self.rank} got an order that is none: {error}") from error
        self.give_up(lost)
        if layout.epoch > (self._called or self._layout).epoch:
            self._called = layout

    def _isend(self, dest: int, tag: Tag, frame: bytes) -> None:
        place = self._layout.epoch * _MAX_NODES + dest
        self._post(self._layout.rank_of[dest], place * _TAGS_PER_NODE + int(tag), frame)

    def _post(self, rank: int, tag: int, frame: bytes) -> None:
        if rank in self.gone:
            return
        try:
            request = self.comm.Isend([frame, MPI.BYTE], dest=rank, tag=tag)
        except MPI.Exception as error:
            self._note_deaths(error)
            return
        self._pending.append(_Pending(request, rank, tag, frame))
        if self._house is not None and (name := self._house.names.get(rank)):
            self._house.bell.ring(name)

    # --- epochs and the dead ------------------------------------------------------------------

    @property
    def _has_orders(self) -> bool:
        news = self.rank == 0 and not self.gone <= self._noticed
        return news or self._dismissed or self._called is not None

    def _move_to(self, layout: Layout) -> None:
        """Enter an epoch: other mailboxes, and what has come early for it."""
        self._layout = layout
        nodes = layout.local_nodes(self.rank)
        boxes = {node: self._mailboxes.get(node) or Mailbox(layout.epoch) for node in nodes[1:]}
        self._mailboxes.clear()
        self._mailboxes.update({node: self._own for node in nodes[:1]} | boxes)
        self.node = nodes[0] if nodes else -1
        self._own.enter(layout.epoch)
        self._all_near = self._house is not None and all(
            rank in self._house.names for rank in layout.rank_of)
        later, self._later = self._later, []
        for rank, tag, frame in later:
            self._deliver(rank, tag, frame)

    def _note_deaths(self, error: MPI.Exception) -> None:
        """Learn who has died. Raises the error again when it says something else."""
        if error.Get_error_class() not in _DEATH:
            raise ClusterError(f"rank {self.rank}: {error.Get_error_string()}") from error
        self.comm.Ack_failed()
        self.give_up(failed_ranks(self.comm))

    def give_up(self, ranks: Iterable[int]) -> None:
        """Have no more to do with ranks. MPI may still read and write buffers of those that hang,
        so these are kept."""
        self.gone |= set(ranks)
        if 0 in self.gone and self.rank != 0:
            raise ClusterError("rank 0 is dead, and with it the job")
        if not self.gone:
            return
        for pending in [one for one in self._pending if one.rank in self.gone]:
            self._pending.remove(pending)
            self._buried.append(pending)
        for rank in self.gone & set(self._arriving):
            self._buried += self._arriving.pop(rank)


def _sharpen_timers() -> None:
    """Let this thread's sleeps end within a microsecond of their time (Linux adds up to 50)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)


def world() -> MPI.Comm:
    """The communicator of all ranks. Checks thread support.

    Not a duplicate: making one is collective, and a rank that dies meanwhile would hold up the rest
    for ever. Nobody else in this process uses MPI.
    """
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise ProtocolError(
            "this MPI was started without thread support; pipeinfer needs MPI_THREAD_FUNNELED"
        )
    return MPI.COMM_WORLD


def own_bell() -> dict[str, str]:
    """Make this rank's doorbell, for `meet` at all ranks of its host. name: empty without one."""
    name = ""
    if _bell:
        return {"name": _bell_name[0], "host": _host_id()}
    if os.environ.get("PIPEINFER_DOORBELL", "1") != "0":
        with contextlib.suppress(OSError, AttributeError):
            wanted = f"pipeinfer-{secrets.token_hex(8)}"
            _bell.append(Doorbell(wanted))
            _bell_name.append(name := wanted)
    return {"name": name, "host": _host_id()}


def meet(bells: Sequence[Mapping[str, str]]) -> None:
    """Learn every rank's bell. Ranks of one host ring each other only where all of them have one.
    """
    me = MPI.COMM_WORLD.Get_rank()
    near = {rank: bell["name"] for rank, bell in enumerate(bells)
            if bell["host"] == bells[me]["host"]}
    if _bell and all(near.values()):
        _bell[-1].drain()
        _bell[-1].rung = 0
        _house.append(_House(_bell[-1], near))


def introduce(comm: MPI.Comm) -> None:
    """Exchange bells where no start-up does it along with other things."""
    texts = gather_json(comm, json.dumps(own_bell()))
    if texts is None:
        bells = json.loads(receive_json(comm, 0, 60.0))
    else:
        bells = [json.loads(text) for text in texts]
        for rank in range(1, comm.Get_size()):
            send_json(comm, rank, json.dumps(bells))
    meet(bells)


def _host_id() -> str:
    """The same for processes that see each other's abstract sockets."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    return secrets.token_hex(8)


def survivable() -> bool:
    """Whether the job goes on when a rank dies: asked for, and known to the library."""
    asked = os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")
    return asked and hasattr(MPI.Comm, "Ack_failed") and "Open MPI" in library_version()


def failed_ranks(comm: MPI.Comm) -> set[int]:
    """Ranks that MPI knows to be dead."""
    dead = comm.Get_failed()
    return set(MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), comm.Get_group()))


def has_losses() -> bool:
    """Whether this process has given up any rank."""
    return any(port.gone for port in _ports)


def abort(code: int) -> None:
    """End every rank of the job at once, with exit status `code`.

    Where a job survives the death of a rank, MPI_Abort leaves the others alive and hangs. There
    rank 0 tells them to leave; another rank ends itself only, and rank 0 hears of that.
    """
    if not survivable():
        MPI.COMM_WORLD.Abort(code)
    if MPI.COMM_WORLD.Get_rank() == 0:
        with contextlib.suppress(MPI.Exception, ClusterError):
            if not _ports:
                MpiPort(MPI.COMM_WORLD, Layout((0,)))
            port = _ports[-1]
            port.dismiss()
            port.close(timeout=0.5)
    elif 0 not in failed_ranks(MPI.COMM_WORLD):
        code = 0  # MPI does not tell of a rank that ends with another code
    os._exit(code)


def sign_off() -> None:
    """Tell the launcher that this process ends in order: what MPI_Finalize does after waiting for
    every rank, some of which may hang.

    Without it the launcher tells all others of a death, and where one of them has left meanwhile
    it writes an error of its own into the job's output. Whoever has to be missed must not call it.
    """
    with contextlib.suppress(OSError, AttributeError):  # another launcher
        pmix = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        for _ in range(_PMIX_USERS):
            if not pmix.PMIx_Initialized():
                break
            pmix.PMIx_Finalize(None, ctypes.c_size_t(0))


def leave() -> NoReturn:
    """End this process; the job goes on without it, or has ended."""
    sign_off()
    os._exit(0)


def library_version() -> str:
    """The MPI library's own name and version, first line."""
    return MPI.Get_library_version().split("\n")[0].strip(" \x00")


def gather_json(comm: MPI.Comm, text: str, timeout: float = 60.0, *,
                instead: str | None = None) -> list[str] | None:
    """Every rank's `text` at rank 0 (None elsewhere), without pickle; `instead` for the dead.

    Raises TransportTimeout or, without `instead`, RankLost naming the first rank that has not sent.
    """
    deadline = time.monotonic() + timeout
    if comm.Get_rank() > 0:
        request = comm.Isend([text.encode(), MPI.BYTE], dest=0, tag=_ORDER_TAG)
        _until(request.Test, comm, 0, deadline, timeout, "gather")
        return None
    texts = [text]
    for source in range(1, comm.Get_size()):
        try:
            texts.append(receive_json(comm, source, max(deadline - time.monotonic(), 0.0)))
        except RankLost:
            if instead is None:
                raise
            texts.append(instead)
    return texts


def send_json(comm: MPI.Comm, dest: int, text: str, timeout: float = 60.0) -> None:
    """A text for `receive_json` at `dest`, outside of any port. Raises TransportTimeout, RankLost.
    """
    request = comm.Isend([text.encode(), MPI.BYTE], dest=dest, tag=_ORDER_TAG)
    _until(request.Test, comm, dest, time.monotonic() + timeout, timeout, "start-up")


def receive_json(comm: MPI.Comm, source: int, timeout: float) -> str:
    """The next text that `source` sent to this rank. Raises TransportTimeout, RankLost, and
    Dismissed for the order to leave."""
    status, start = MPI.Status(), time.monotonic()
    found: list[MPI.Message] = []

    def arrived() -> bool:
        probe = comm.Improbe(source, _ORDER_TAG, status)
        found.extend([] if probe is None else [probe])
        return probe is not None

    _until(arrived, comm, source, start + timeout, timeout, "start-up")
    frame = bytearray(status.Get_count(MPI.BYTE))
    found[0].Recv([frame, MPI.BYTE])
    if source == 0 and frame == _LEAVE:
        raise Dismissed
    return frame.decode()


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link: one-way latency of 4 KiB in seconds, bandwidth of 1 MiB in bytes/s."""

    source: int
    dest: int
    latency: float
    bandwidth: float


def measure_links(comm: MPI.Comm, timeout: float = 20.0) -> list[Link]:
    """Collective: every rank bounces messages with its successor; a rank returns its own link.

    Raises TransportTimeout naming the neighbour that does not answer.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    links = []
    for first in range(size - 1):
        if rank == first:
            small = _bounce(comm, first + 1, 4096, 50, timeout, leads=True)
            large = _bounce(comm, first + 1, 1 << 20, 6, timeout, leads=True)
            links.append(Link(first, first + 1, small / 2, (1 << 20) / (large / 2)))
        elif rank == first + 1:
            _bounce(comm, first, 4096, 50, timeout, leads=False)
            _bounce(comm, first, 1 << 20, 6, timeout, leads=False)
    return links


def _bounce(comm: MPI.Comm, peer: int, size: int, rounds: int, timeout: float, *, leads: bool
            ) -> float:
    """The median round trip in seconds."""
    frame, times = bytearray(size), []
    deadline = time.monotonic() + timeout
    for turn in range(2 * rounds):
        start = time.perf_counter()
        if (turn % 2 == 0) == leads:
            request = comm.Isend([frame, MPI.BYTE], dest=peer, tag=1)
            _until(request.Test, comm, peer, deadline, timeout, "link test")
        else:
            request = comm.Irecv([frame, MPI.BYTE], source=peer, tag=1)
            _until(request.Test, comm, peer, deadline, timeout, "link test")
        times.append(time.perf_counter() - start)
    pairs = sorted(a + b for a, b in zip(times[::2], times[1::2], strict=True))
    return pairs[len(pairs) // 2]


def _until(
    test: Callable[[], bool], comm: MPI.Comm, peer: int, deadline: float, timeout: float,
    what: str,
) -> None:
    start, spins = time.monotonic(), 0
    while True:
        try:
            if test():
                return
        except MPI.Exception as error:
            if error.Get_error_class() not in _DEATH:
                raise
            raise RankLost(peer, "died while the job started") from None
        if (now := time.monotonic()) > deadline:
            raise TransportTimeout(rank=comm.Get_rank(), peer=peer, tag=what, run_id=None,
                                   seconds=timeout)
        spins += 1
        if spins > 50:
            time.sleep(min(max((now - start) * _SHARE, _MIN_SLEEP), _IDLE_CAP))
