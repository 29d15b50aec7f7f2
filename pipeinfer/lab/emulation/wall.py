"""The real runtime at another cluster's pace: real ranks, messages and threads, emulated machines.

Every rank runs the code that it runs on a cluster; stages compute nothing and take as long as the
scenario says, messages are held by their receiver until the emulated link would have brought them,
the draft answers when its machine would. `scale` stretches all emulated times, so that what the
emulator itself costs shrinks against them. This module knows no profiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Decode, Tag
from pipeinfer.core.policy import CancelPath
from pipeinfer.core.types import Request
from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer.lab.emulation.synthetic import SyntheticBackend
from pipeinfer.lab.emulation.virtual import (
    HEADER_BYTES,
    ROW_BYTES,
    Scenario,
    Wire,
    prompt_of,
)
from pipeinfer.lab.faults.delaying import DelayingPort
from pipeinfer.lab.faults.paced import PacedBackend
from pipeinfer.runtime.drafts import DraftWorker
from pipeinfer.runtime.head import Head
from pipeinfer.runtime.stage import Stage
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import Emit, Finish, LaneStats
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.transport.base import Envelope, Layout, Port

_TIMEOUT = 600.0
if TYPE_CHECKING:
    from pipeinfer.transport.mpi import MpiPort


@dataclass(slots=True)
class WallResult:
    """Times in seconds of the emulated cluster (divided by the scale).

    reports: what each stage said. processor_seconds: of each rank, emulator included, in real
    seconds. head_busy: real seconds the head spent on events and instructions.
    """

    tokens: list[int]
    times: list[float]
    stats: LaneStats
    reports: dict[int, dict[str, Any]]
    head_busy: float
    wall_seconds: float
    processor_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Generation speed; prompt processing does not count."""
        seconds = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return (len(self.times) - 1) / seconds if seconds else 0.0

    @property
    def ttft(self) -> float:
        """Time to the first token after the prompt's own."""
        return self.times[1] - self.times[0] if len(self.times) > 1 else 0.0


class EmulatedLink:
    """When messages come out of an emulated link, for a `DelayingPort`.

    scale: how many times as long as in the emulated cluster everything takes here.
    """

    def __init__(self, wire: Wire, row_bytes: int, scale: float) -> None:
        self._row_bytes = row_bytes
        self._latency, self._per_byte = scale * wire.latency, scale / wire.bandwidth
        self._free = 0.0

    def due(self, tag: Tag, envelope: Envelope, now: float) -> float:
        """The time at which a message that is sent now has arrived."""
        if tag is Tag.TRANSACTION:  # the one kind that is long enough to fill a link
            self._free = max(now, self._free) + self._per_byte * self._size(envelope)
            now = self._free
        return now + self._latency

    def _size(self, envelope: Envelope) -> int:
        """Bytes that the message would have with the emulated model's activations."""
        message = envelope.message
        if not isinstance(message, Decode) or message.skipped:
            return HEADER_BYTES
        per_row = ROW_BYTES + (self._row_bytes if message.hidden is not None else 0)
        return HEADER_BYTES + per_row * len(message.rows)


def emulated_port(inner: MpiPort, wire: Wire, row_bytes: int, scale: float) -> DelayingPort:
    """A port whose messages arrive as late as over the emulated link."""

    def arrived(tag: Tag) -> Iterator[Envelope]:
        inner.pump()
        while (envelope := inner.mailbox.take(tag)) is not None:
            yield envelope

    return DelayingPort(inner, EmulatedLink(wire, row_bytes, scale).due, arrived)


class PacedDraft:
    """A draft model that takes `seconds(rows)` per evaluation; a `Proposer`."""

    free = False

    def __init__(self, model: DraftModel, seconds: Callable[[int], float]) -> None:
        self._model, self._seconds = model, seconds

    @property
    def rows_evaluated(self) -> int:
        """Of the model, so far."""
        return self._model.rows_evaluated

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """Return proposals below the job's path, parents before children, the best chain first."""
        steps = self._model.steps(job)
        end = time.perf_counter()
        while True:
            if stopped():
                steps.close()
                return None
            try:
                rows = next(steps)
            except StopIteration as stop:
                result: tuple[Proposal, ...] = stop.value
                return result
            end += self._seconds(rows)
            time.sleep(max(0.0, end - time.perf_counter()))

    def close(self) -> None:
        """Release memory, models and threads."""
        self._model.close()


def _introduce(comm: Any) -> None:
    """Exchange doorbells, as jobs do in a message of their start-up."""
    from pipeinfer.core.control import Assignment, pack, unpack
    from pipeinfer.transport import mpi_job

    mine = Assignment((), None, (mpi_job.own_bell(),))
    texts = mpi_job.gather_json(comm, pack(mine).decode())
    if texts is None:
        placed = mpi_job.hear(comm, 0, 60.0)
    else:
        bells = [one.bells[0] for text in texts
                 if isinstance(one := unpack(text.encode()), Assignment)]
        placed = Assignment((), None, tuple(bells))
        for rank in range(1, comm.Get_size()):
            mpi_job.say(comm, rank, placed)
    assert isinstance(placed, Assignment)
    mpi_job.meet(placed.bells)


def emulate(scenario: Scenario, scale: float = 1.0, controller: Controller | None = None
            ) -> WallResult | None:
    """Run a scenario on the ranks of this job, one per stage and one for the head (rank 0).

    Returns the result at rank 0, None elsewhere. Raises UsageError when the number of ranks does
    not fit.
    """
    from pipeinfer.transport import mpi, mpi_job  # only ranks of a job load MPI

    comm = mpi_job.world()
    _introduce(comm)
    n_stages = len(scenario.stages)
    if comm.Get_size() != n_stages + 1:
        raise UsageError(f"{n_stages} stages and a head need {n_stages + 1} ranks, but there are "
                         f"{comm.Get_size()}: start mpirun with -np {n_stages + 1}")
    rank = comm.Get_rank()
    wire = scenario.links[-1 if rank == 0 else rank - 1]
    inner = mpi.MpiPort(comm, Layout(tuple(range(n_stages + 1))))
    port = emulated_port(inner, wire, scenario.row_bytes, scale)
    path = CancelPath.DIRECT if scenario.direct_cancel else CancelPath.BACKWARD
    result = None
    if rank:
        _stage(scenario, port, rank, scale, path)
    else:
        result = _head(scenario, port, scale, path, controller)
    inner.close(timeout=5.0)
    return result


def _processor_seconds() -> float:
    """User and system time of this process so far."""
    return float(sum(psutil.Process().cpu_times()[:2]))


def _stage(scenario: Scenario, port: Port, rank: int, scale: float, path: CancelPath) -> None:
    n_stages = len(scenario.stages)
    spec = scenario.stages[rank - 1]
    backend = PacedBackend(
        SyntheticBackend(scenario.pair, layers=(rank - 1, rank), n_layers=n_stages,
                         n_ctx=scenario.prompt + scenario.tokens + 8,
                         n_seq_max=scenario.limits.n_ids),
        lambda rows: scale * spec.seconds(rows), layers=spec.layers)
    before = _processor_seconds()
    Stage(port, Grid.plain(n_stages), backend, cancel_path=path, trace=True, timeout=_TIMEOUT,
          extra_report=lambda: {"processor": _processor_seconds() - before}).serve()


def _head(scenario: Scenario, port: Port, scale: float, path: CancelPath,
          controller: Controller | None) -> WallResult:
    paths = scenario.draft_paths + scenario.limits.parallel - 1
    draft = DraftModel(
        SyntheticBackend(scenario.pair, layers=(0, 1), n_layers=1, draft=True,
                         n_ctx=scenario.prompt + scenario.tokens + 8,
                         n_seq_max=paths + max(scenario.limits.branches, 1)),
        paths=paths)
    worker = DraftWorker(PacedDraft(draft, lambda rows: scale * scenario.draft(rows)), port.wake)
    head = Head(port, Grid.plain(len(scenario.stages)), Scheduler(scenario.limits), worker,
                cancel_path=path, timeout=_TIMEOUT, controller=controller)
    started, before = time.monotonic(), _processor_seconds()
    head.submit(Request(0, prompt_of(scenario), scenario.tokens))
    tokens: list[int] = []
    times: list[float] = []
    stats: LaneStats | None = None
    while stats is None:
        news = head.next_news(_TIMEOUT)
        match news:
            case Emit(_, choice, _):
                tokens.append(choice.token)
                times.append((time.monotonic() - started) / scale)
            case Finish(_, _, stats):
                pass
            case _:
                raise PipeinferError(f"the emulated request ended with {news}")
    wall = time.monotonic() - started
    worker.close(timeout=5.0)
    head.drain(_TIMEOUT)
    busy = _processor_seconds() - before
    reports = head.shutdown(timeout=30.0)
    processor = [busy, *(reports[node]["processor"] for node in sorted(reports))]
    return WallResult(tokens, times, stats, reports, head.stats.busy, wall, processor)
