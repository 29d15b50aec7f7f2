"""Runs scheduler, backends and a draft in one thread, without ports: for tests of laws."""

from __future__ import annotations

from collections import deque

import numpy as np

from pipeinfer.backends.base import apply
from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.sampling import choose
from pipeinfer.core.types import Choice, Request, SamplingParams
from pipeinfer.scheduler.events import (
    CancelRuns,
    Drafted,
    Emit,
    Finish,
    IssueRun,
    RunDone,
    SendOps,
    Submit,
)
from pipeinfer.scheduler.scheduler import Scheduler

VALIDATED = 1000  #: requests; a law takes many more, and they are all alike


class Driver:
    """`lag` runs are kept in flight before the oldest is evaluated."""

    def __init__(self, limits, backend, draft=None, lag=2):
        self.scheduler = Scheduler(limits, validate=True)
        self.backend, self.draft, self.lag = backend, draft, lag
        self.count = 0

    def generate(self, prompt, params: SamplingParams, count):
        self.count += 1
        self.scheduler._validate = self.count <= VALIDATED
        events: deque = deque([Submit(Request(self.count, tuple(prompt), count, params))])
        flight: deque = deque()
        cancelled: set[int] = set()
        out, jobs, done = [], deque(), False
        while not (done and not flight and not events):
            if events:
                for instruction in self.scheduler.handle(events.popleft()):
                    match instruction:
                        case IssueRun() | SendOps():
                            flight.append(instruction)
                        case CancelRuns(ids):
                            cancelled.update(ids)
                        case StartDraft():
                            jobs.append(instruction)
                        case Emit(_, choice, speculated):
                            out.append((choice.token, speculated))
                        case Finish():
                            done = True
                continue
            runs = sum(isinstance(i, IssueRun) for i in flight)
            if jobs and runs < self.lag:
                job = jobs.popleft()
                events.append(Drafted(job.job_id, self.draft.propose(job, lambda: False)))
            elif flight:
                event = self._evaluate(flight.popleft(), cancelled, params)
                if event is not None:
                    events.append(event)
        return out

    def _evaluate(self, item, cancelled, params):
        for op in item.ops:
            apply(self.backend, op)
        if not isinstance(item, IssueRun):
            return None
        if item.run_id in cancelled:
            return RunDone(item.run_id, None)
        logits = self.backend.decode(item.rows)
        positions = item.rows.positions[np.flatnonzero(item.rows.outputs)].tolist()
        return RunDone(item.run_id, tuple(
            choose(row, params, np.zeros(1, np.int32), pos)
            for row, pos in zip(logits, positions, strict=True)) if logits is not None else
            tuple[Choice, ...]())
