"""A draft rank: it runs a proposer; if that evaluates a draft model or a head of the target, the
rank holds it, or some of its layers.

    rank 0 -> last draft rank: DraftSetup; LaneOpen, LaneClose, FeedDraft, StartDraft, DraftStop
    last draft rank -> rank 0: DraftReady, DraftDone
    last draft rank -> Decode -> first ... -> last   rows, then their activations

`remote_draft` is the head's end. A draft that several ranks hold is a pipeline of its own. Its
last rank has the output head: it receives the jobs and sends rows to the first rank
(`PartedBackend`); only activations of one width return. These messages belong to no epoch, so
stages may be rearranged meanwhile. This module loads no model and contains no proposer.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import structs

from pipeinfer import host
from pipeinfer.backends.base import Backend, apply
from pipeinfer.core.control import DraftDone, DraftReady, DraftSetup, DraftStop
from pipeinfer.core.drafting import FeedDraft, Prefix, Proposal, StartDraft
from pipeinfer.core.messages import NO_RUN, Decode, LaneClose, LaneOpen, Message, Tag
from pipeinfer.core.types import (
    FloatArray,
    Rows,
    SamplingParams,
    SeqCopy,
    SeqKeep,
    SeqOp,
    SeqRemove,
)
from pipeinfer.errors import (
    BackendError,
    ClusterError,
    PipeinferError,
    ProtocolError,
    RankLost,
    TransportTimeout,
)
from pipeinfer.host import host_name
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.strategies.proposers.base import Proposer, ReadsRows
from pipeinfer.transport.base import Dismissed, Port, Regrouped

_LIVE_SECONDS = 2.0  #: after a message, in which the next one is expected soon


class Loader(Protocol):
    """Loads a rank's part of the draft and makes the proposer."""

    def layers(self, setup: DraftSetup) -> tuple[Backend, int]:
        """Load this rank's layers of the draft; called only if there is one.

        Returns them as a backend, and the number of threads that compute them.
        Raises PipeinferError.
        """

    def proposer(self, setup: DraftSetup, backend: Backend | None) -> Proposer:
        """Return the proposer, which uses all of the draft, `backend`; None: it needs none.

        Raises PipeinferError.
        """


class DraftRank:
    """The message loop of a draft rank; each `turn` handles one message.

    rank: its number in the job.
    loader: loads layers and makes the proposer, at each new DraftSetup.
    timeout: seconds to wait for the activations of the draft's other ranks.
    pulse: what the watchdog reads.
    """

    def __init__(self, port: Port, rank: int, loader: Loader, timeout: float,
                 pulse: Pulse | None = None) -> None:
        self._port, self._rank, self._loader, self._timeout = port, rank, loader, timeout
        self._pulse = pulse or Pulse()
        self._setup: DraftSetup | None = None
        self._layers: Backend | None = None  # None without a draft
        self._proposer: Proposer | None = None
        self._todo: deque[DraftSetup | LaneOpen | LaneClose | FeedDraft | StartDraft | Decode
                          ] = deque()
        self._hidden: deque[Decode] = deque()
        self._params: dict[int, SamplingParams] = {}
        self._tokens: dict[int, list[int]] = {}
        self._stopped: set[int] = set()
        self._at = 0  # id of the current job
        self._heard = -_LIVE_SECONDS
        self._threads = 0

    @property
    def live(self) -> bool:
        """Whether a message has arrived in the last 2 seconds, so that more are likely soon."""
        return time.monotonic() - self._heard < _LIVE_SECONDS

    def turn(self) -> bool:
        """Handle the oldest message; return whether there was one.

        An error in a task closes the draft and is sent to rank 0. Raises Dismissed.
        """
        self._hear()
        if not self._todo:
            return False
        task = self._todo.popleft()
        try:
            match task:
                case DraftSetup():
                    self._load(task)
                case LaneOpen(lane, params):
                    self._params[lane], self._tokens[lane] = params, []
                case LaneClose(lane):
                    self._params.pop(lane, None)
                    self._tokens.pop(lane, None)
                case FeedDraft():
                    if isinstance(self._proposer, ReadsRows):
                        self._proposer.feed(task)
                case StartDraft():
                    self._draft(task)
                case Decode():
                    self._pass_on(task)
        except Dismissed:
            raise
        except Exception as error:  # rank 0 goes on without proposals, and logs the reason
            self._fail(error)
        return True

    def close(self) -> None:
        """Release the model."""
        if self._proposer is not None:
            self._proposer.close()
        elif self._layers is not None:
            self._layers.close()
        self._proposer = self._layers = self._setup = None
        self._threads = 0

    # --- receiving ----------------------------------------------------------------------------

    def _hear(self) -> None:
        while (post := self._port.take_post()) is not None:
            self._heard = time.monotonic()
            self._sort(*post)

    def _sort(self, source: int, message: Message) -> None:
        match message:
            case DraftSetup() | LaneOpen() | LaneClose() | FeedDraft() | StartDraft():
                self._todo.append(message)
            case DraftStop(job_id):  # of a finished job: its number may be used again
                if job_id == self._at or any(isinstance(task, StartDraft)
                                             and task.job_id == job_id for task in self._todo):
                    self._stopped.add(job_id)
            case Decode() if self._proposer is not None:
                self._hidden.append(message)
            case Decode():
                self._todo.append(message)
            case _:
                raise ProtocolError(f"rank {self._rank}, which drafts, cannot handle "
                                    f"{type(message).__name__} from rank {source}")

    # --- work ---------------------------------------------------------------------------------

    def _load(self, setup: DraftSetup) -> None:
        if setup != self._setup:
            self.close()
            self._pulse.beat("loads the draft")
            if setup.model:
                self._layers, self._threads = self._loader.layers(setup)
            self._setup, whole = setup, self._layers
            if self._layers is not None and setup.start > 0:
                whole = PartedBackend(
                    self._layers, setup.ranks[:-1], self._port, self._next_hidden)
            if setup.stop == setup.n_layers:
                self._proposer = self._loader.proposer(setup, whole)
        self._pulse.settle()
        self._port.post(0, DraftReady(
            self._rank, host_name(), (setup.start, setup.stop),
            self._layers.info.weight_bytes if self._layers else 0, self._threads,
            host.memory_parts()["rss"]))

    def _draft(self, job: StartDraft) -> None:
        if self._proposer is None:
            return  # loading failed, and rank 0 has received the reason
        tokens, params = self._tokens.get(job.lane), self._params.get(job.lane)
        if tokens is None or params is None or job.sent > len(tokens):
            raise ProtocolError(f"rank {self._rank} received a drafting job of lane {job.lane}, "
                                f"but lacks some of the lane's first {job.sent} tokens")
        tokens[job.sent:] = job.accepted
        self._at = job.job_id
        start, rows = time.perf_counter(), self._proposer.rows_evaluated
        found: tuple[Proposal, ...] | None = None
        if job.job_id not in self._stopped:
            found = self._proposer.propose(
                structs.replace(job, sent=0, accepted=Prefix(tokens), params=params),
                lambda: self._is_stopped(job.job_id))
        self._at = 0
        self._stopped.discard(job.job_id)
        self._port.post(0, done(job.job_id, found, self._proposer.rows_evaluated - rows,
                                time.perf_counter() - start))

    def _is_stopped(self, job_id: int) -> bool:
        self._pulse.beat("drafts")
        self._hear()
        return job_id in self._stopped

    def _pass_on(self, run: Decode) -> None:
        """Compute the rows with this rank's layers and send the result to the next draft rank."""
        setup, layers = self._setup, self._layers
        if setup is None or layers is None:
            return
        self._pulse.beat("drafts")
        for op in run.ops:
            apply(layers, op)
        hidden: FloatArray | None = None
        if not run.skipped:
            with contextlib.suppress(BackendError):  # no free cells: the last rank removes some
                hidden = layers.decode(run.rows, run.hidden)
        after = setup.ranks[setup.ranks.index(self._rank) + 1]
        self._port.post(after, structs.replace(run, hidden=hidden, skipped=hidden is None))

    def _next_hidden(self, run_id: int) -> FloatArray | None:
        """Wait for the activations of a run from the ranks before; None if they had no free
        cells.

        Raises RankLost and TransportTimeout.
        """
        assert self._setup is not None
        others, deadline = self._setup.ranks[:-1], time.monotonic() + self._timeout
        while True:
            self._hear()
            while self._hidden:
                run = self._hidden.popleft()
                if run.run_id == run_id:
                    return run.hidden
            if lost := self._port.gone.intersection(others):
                raise RankLost(min(lost), "held layers of the draft and is dead")
            if time.monotonic() > deadline:
                raise TransportTimeout(rank=self._rank, peer=others[-1], tag="draft rows",
                                       run_id=run_id, seconds=self._timeout)
            self._pulse.beat("waits for the draft's other ranks")
            with contextlib.suppress(Regrouped):  # of the stages, which may wait
                self._port.take(Tag.ERROR)
            self._port.wait(0.2, live=True)

    def _fail(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self.close()
        self._todo.clear()
        self._port.post(0, failure(self._rank, error))


def failure(rank: int, error: Exception) -> DraftReady:
    """Return what a rank reports that drafts no more."""
    words = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, PipeinferError):
        words = f"{type(error).__name__}: {words}"
    code = error.exit_code if isinstance(error, PipeinferError) else ClusterError.exit_code
    return DraftReady(rank, host_name(), (0, 0), 0, 0, 0, words, code)


def done(job_id: int, found: Sequence[Proposal] | None, rows: int, seconds: float) -> DraftDone:
    """Return the report of a job; arguments as its fields."""
    return DraftDone(job_id, None if found is None else tuple(
        (one.parent, one.token, one.confidence, one.alternative, one.paid, one.depth)
        for one in found), rows, seconds)


class PartedBackend:
    """A backend for the whole draft, used on the rank that has its last layers.

    own: this rank's layers.
    others: the ranks with the layers before, in order.
    port: by which rows are sent to the first of them.
    next_hidden: waits for their activations of a run; None if they had no free cells.

    Sequence operations are sent together with the next rows.
    """

    def __init__(self, own: Backend, others: tuple[int, ...], port: Port,
                 next_hidden: Callable[[int], FloatArray | None]) -> None:
        self._own, self._others, self._port, self._next_hidden = own, others, port, next_hidden
        self._ops: list[SeqOp] = []
        self._run = 0
        self.info = structs.replace(own.info, layers=(0, own.info.layers[1]), first=True)
        self.capabilities = structs.replace(own.capabilities, embedding_rows=False)

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`. Raises RankLost and TransportTimeout if the other ranks do not
        answer."""
        del hidden
        self._run += 1
        self._port.post(self._others[0], Decode(
            self._run, NO_RUN, rows, (0,) * len(rows), tuple(self._ops)))
        self._ops.clear()
        try:
            passed = self._next_hidden(self._run)
            if passed is None:
                raise BackendError("the draft's first layers have no free cells")
            return self._own.decode(rows, passed, should_stop)
        except BackendError:
            end = int(rows.positions.max(initial=-1)) + 1
            self._ops += [SeqRemove(seq_id, first, end)
                          for seq_id, first in rows.first_positions().items()]
            raise

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`."""
        self._apply(SeqRemove(seq_id, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`."""
        self._apply(SeqCopy(src, dst, p0, p1))

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        self._apply(SeqKeep(seq_id))

    def close(self) -> None:
        """Release the model and its cache; the other ranks release theirs themselves."""
        self._own.close()

    def _apply(self, op: SeqOp) -> None:
        self._ops.append(op)
        apply(self._own, op)
