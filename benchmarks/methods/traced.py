"""Lookahead parallelism in virtual time: real scheduler, real choices, a profile's durations.

Which rows each replica gets in each step does not depend on how long they take, for a step ends
when all have answered. So a text is decoded once, by backends that really choose, and what its
steps would take is summed up afterwards for any machine and link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeinfer.backends.base import Backend, apply
from pipeinfer.core.types import Choice, Request
from pipeinfer.errors import PipeinferError
from pipeinfer.lab.emulation.virtual import HEADER_BYTES, ROW_BYTES, Wire
from pipeinfer.scheduler.events import (
    Emit,
    Finish,
    Instruction,
    IssueRun,
    RunDone,
    SendOps,
    Submit,
    ToNode,
)
from pipeinfer.scheduler.replicas import ReplicaScheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.lookahead import Lookahead


@dataclass(slots=True)
class Trace:
    """How a text was decoded. steps: for each, rows of the runs of every replica, in order; the
    prompt's are not among them, and its token is the first of `tokens`."""

    nodes: int
    tokens: list[int] = field(default_factory=list)
    steps: list[list[list[int]]] = field(default_factory=list)

    @property
    def per_step(self) -> float:
        """Tokens per step."""
        return (len(self.tokens) - 1) / max(len(self.steps), 1)

    def seconds(self, run: Callable[[int], float], wire: Wire, head: float) -> float:
        """From the prompt's token to the last one: each step takes the slowest replica's runs,
        the way there and back, and the head's work.

        run: seconds of a run of so many rows; head: seconds per step and replica.
        """
        total = 0.0
        for step in self.steps:
            total += head * len(step) + max(
                sum(map(run, runs)) + 2 * wire.latency
                + sum(2 * HEADER_BYTES + ROW_BYTES * rows for rows in runs) / wire.bandwidth
                for runs in step if runs)
        return total


def trace(backends: Sequence[Backend], limits: Limits, rows: Lookahead, prompt: Sequence[int],
          count: int) -> Trace:
    """Decode `count` tokens greedily, a replica on each backend.

    Raises PipeinferError when the request does not end as it should.
    """
    scheduler, found = ReplicaScheduler(limits, rows, len(backends)), Trace(len(backends))
    results: deque[RunDone] = deque()

    def execute(instructions: Sequence[Instruction | ToNode]) -> bool:
        step: list[list[int]] = [[] for _ in backends]
        over = False
        for instruction in instructions:
            match instruction:
                case ToNode(node, IssueRun() as run):
                    results.append(RunDone(run.run_id, _evaluate(backends[node - 1], run)))
                    step[node - 1].append(len(run.rows))
                case ToNode(node, SendOps(ops)):
                    for op in ops:
                        apply(backends[node - 1], op)
                case Emit(_, choice):
                    found.tokens.append(choice.token)
                case Finish():
                    over = True
        if found.tokens and any(step):
            found.steps.append(step)
        return over

    over = execute(scheduler.handle(Submit(Request(0, tuple(prompt), count, ignore_eos=True))))
    while results:
        over |= execute(scheduler.handle(results.popleft()))
    if not over or len(found.tokens) != count:
        raise PipeinferError(f"{len(found.tokens)} of {count} tokens came")
    return found


def _evaluate(backend: Backend, run: IssueRun) -> tuple[Choice, ...]:
    for op in run.ops:
        apply(backend, op)
    logits = backend.decode(run.rows)
    if logits is None:
        raise PipeinferError("a run was stopped that nobody stops")
    return tuple(Choice(int(row.argmax())) for row in np.asarray(logits))
