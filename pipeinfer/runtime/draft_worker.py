"""A thread that runs a proposer concurrently with the head's message loop.

The head uses MPI and never computes; the proposer computes and never uses MPI. Two queues connect
them. This module contains no scheduler rules and loads no model.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.base import Proposer, ReadsRows


class Drafts(Protocol):
    """The head's interface to a source of proposals. The head calls it in its own thread.

    busy_seconds: seconds of computation so far.
    free: whether it evaluates no model.
    local: whether it computes on rank 0.
    told: called once, with the reason, when there will be no more proposals.
    """

    told: Callable[[str], None]

    @property
    def busy_seconds(self) -> float: ...
    @property
    def free(self) -> bool: ...
    @property
    def local(self) -> bool: ...

    def start(self, job: StartDraft) -> None:
        """Queue a job. Its result is returned by `take`; results may come in any order."""

    def stop(self, job_id: int) -> None:
        """Withdraw a job: its result is no longer needed."""

    def feed(self, rows: FeedDraft) -> None:
        """Queue rows of the target for the jobs after it."""

    def take(self) -> Drafted | None:
        """Return the result of a finished job, or None. After a loss each job has one without
        proposals."""

    def lose(self, why: str) -> None:
        """Give the draft up: answer all jobs, and those to come, without proposals."""

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""

    def close(self, timeout: float) -> None:
        """Release the draft, waiting at most `timeout` seconds for the current job."""


class DraftWorker:
    """Runs draft jobs one after the other in a thread.

    proposer: computes the proposals; closed by `close`.
    notify: called in that thread after each job, and when the thread fails.
    """

    local = True

    def __init__(self, proposer: Proposer, notify: Callable[[], None]) -> None:
        self.busy_seconds = 0.0
        self.free = proposer.free
        self._proposer, self._notify = proposer, notify
        self._jobs: deque[StartDraft | FeedDraft] = deque()
        self._results: deque[Drafted] = deque()
        self._stopped: set[int] = set()
        self._wanted = threading.Event()
        self._last_done = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._waiting: set[int] = set()  # jobs without a result; the head's thread keeps it
        self.lost = ""  #: why there are no more proposals; empty while the draft works
        self.told: Callable[[str], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._thread.start()

    def start(self, job: StartDraft) -> None:
        """Queue a job; its thread begins it after those queued before."""
        self._waiting.add(job.job_id)
        if self.lost:
            self._results.append(Drafted(job.job_id, ()))
            return
        self._jobs.append(job)
        self._wanted.set()

    def stop(self, job_id: int) -> None:
        """Withdraw a job: its result is no longer needed."""
        self._waiting.discard(job_id)
        if job_id > self._last_done:
            self._stopped.add(job_id)

    def feed(self, rows: FeedDraft) -> None:
        """Queue rows of the target for the jobs after it."""
        if isinstance(self._proposer, ReadsRows):
            self._jobs.append(rows)
            self._wanted.set()

    def take(self) -> Drafted | None:
        """Return the result of a finished job, or None. No token depends on a draft, so an error
        in its thread is a loss of its proposals only."""
        if self._failure is not None and not self.lost:
            self.lose(f"the draft on rank 0 failed: {type(self._failure).__name__}: "
                      f"{self._failure}")
        while self._results:
            found = self._results.popleft()
            if found.job_id in self._waiting:  # neither withdrawn nor answered by `lose`
                self._waiting.discard(found.job_id)
                return found
        return None

    def lose(self, why: str) -> None:
        """Give the draft up. A thread that hangs is left alone."""
        if self.lost:
            return
        self.lost = why
        done = {one.job_id for one in self._results}
        self._results += [Drafted(job_id, ()) for job_id in sorted(self._waiting - done)]
        self.told(why)

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._results) or (self._failure is not None and not self.lost)

    def close(self, timeout: float) -> None:
        """End the thread, waiting at most `timeout` seconds for the current job.

        The proposer is closed only if the thread has ended by then.
        """
        self._closing = True
        self._wanted.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._proposer.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wanted.wait()
                self._wanted.clear()
                while self._jobs and not self._closing:
                    job = self._jobs.popleft()
                    if isinstance(job, StartDraft):
                        self._work(job)
                    elif isinstance(self._proposer, ReadsRows):
                        self._proposer.feed(job)
        except BaseException as error:  # `take` reports it in the head's thread
            self._failure = error
            self._notify()

    def _work(self, job: StartDraft) -> None:
        start, rows = time.perf_counter(), self._proposer.rows_evaluated
        if job.job_id not in self._stopped:
            proposals = self._proposer.propose(
                job, lambda: self._closing or job.job_id in self._stopped
            )
            if proposals is not None:
                self._results.append(Drafted(
                    job.job_id, proposals, self._proposer.rows_evaluated - rows,
                    time.perf_counter() - start))
        self._last_done = job.job_id
        self._stopped.discard(job.job_id)
        self.busy_seconds += time.perf_counter() - start
        self._notify()
