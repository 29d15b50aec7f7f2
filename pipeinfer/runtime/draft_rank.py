"""A draft rank: it runs a proposer, and holds the draft model or the head that this evaluates.

    rank 0 -> draft rank: DraftSetup; LaneOpen, LaneClose, FeedDraft, StartDraft, DraftStop
    draft rank -> rank 0: DraftReady, DraftDone

`drafts` has the head's end. These messages belong to no epoch, so stages may be rearranged
meanwhile. This module loads no model and contains no proposer.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from msgspec import structs

from pipeinfer import host
from pipeinfer.backends.base import Backend
from pipeinfer.core.control import DraftDone, DraftReady, DraftSetup, DraftStop
from pipeinfer.core.drafting import FeedDraft, Prefix, Proposal, StartDraft
from pipeinfer.core.messages import LaneClose, LaneOpen, Message
from pipeinfer.core.types import (
    SamplingParams,
)
from pipeinfer.errors import (
    ClusterError,
    PipeinferError,
    ProtocolError,
)
from pipeinfer.host import host_name
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.strategies.proposers.base import Proposer, ReadsRows
from pipeinfer.transport.base import Dismissed, Port

_LIVE_SECONDS = 2.0  #: after a message, in which the next one is expected soon


class Loader(Protocol):
    """Loads a draft and makes the proposer that evaluates it. Methods raise PipeinferError."""

    def backend(self, setup: DraftSetup) -> tuple[Backend, int]:
        """Load the draft; return it and its number of threads. Called only if there is one."""

    def proposer(self, setup: DraftSetup, backend: Backend | None) -> Proposer:
        """Return the proposer. backend: the draft; None: it needs none."""


class DraftRank:
    """The message loop of a draft rank; each `step` handles one message.

    rank: its number in the job.
    loader: loads the draft and makes the proposer, at each new DraftSetup.
    pulse: what the watchdog reads.
    """

    def __init__(self, port: Port, rank: int, loader: Loader,
                 pulse: Pulse | None = None) -> None:
        self._port, self._rank, self._loader = port, rank, loader
        self._pulse = pulse or Pulse()
        self._setup: DraftSetup | None = None
        self._backend: Backend | None = None  # None without a draft
        self._proposer: Proposer | None = None
        self._todo: deque[DraftSetup | LaneOpen | LaneClose | FeedDraft | StartDraft] = deque()
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

    def step(self) -> bool:
        """Handle the oldest message; return whether there was one.

        An error in a task closes the draft and is sent to rank 0. Raises Dismissed.
        """
        self._read_messages()
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
        except Dismissed:
            raise
        except Exception as error:  # rank 0 goes on without proposals, and logs the reason
            self._fail(error)
        return True

    def close(self) -> None:
        """Release the model."""
        if self._proposer is not None:
            self._proposer.close()
        elif self._backend is not None:
            self._backend.close()
        self._proposer = self._backend = self._setup = None
        self._threads = 0

    # --- receiving ----------------------------------------------------------------------------

    def _read_messages(self) -> None:
        # also during a job: a DraftStop may be among them
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
            case _:
                raise ProtocolError(f"rank {self._rank}, which drafts, cannot handle "
                                    f"{type(message).__name__} from rank {source}")

    # --- work ---------------------------------------------------------------------------------

    def _load(self, setup: DraftSetup) -> None:
        if setup != self._setup:
            self.close()
            self._pulse.beat("loads the draft")
            if setup.model:
                self._backend, self._threads = self._loader.backend(setup)
            self._proposer, self._setup = self._loader.proposer(setup, self._backend), setup
        self._pulse.settle()
        self._port.post(0, DraftReady(
            self._rank, host_name(), self._backend.info.weight_bytes if self._backend else 0,
            self._threads, host.memory_parts()["rss"]))

    def _draft(self, job: StartDraft) -> None:
        if self._proposer is None:  # loading failed; who asks still waits, as for a former choice
            self._port.post(0, done(job.job_id, (), 0, 0.0))
            return
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
        self._read_messages()
        return job_id in self._stopped

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
    return DraftReady(rank, host_name(), 0, 0, 0, words, code)


def done(job_id: int, found: Sequence[Proposal] | None, rows: int, seconds: float) -> DraftDone:
    """Return the report of a job; arguments as its fields."""
    return DraftDone(job_id, None if found is None else tuple(
        (one.parent, one.token, one.confidence, one.alternative, one.paid, one.depth)
        for one in found), rows, seconds)
