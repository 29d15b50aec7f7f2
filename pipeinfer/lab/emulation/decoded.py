"""Real models in virtual time: every token is the target's own, every duration a scenario's.

One backend holds the whole target and stands for the caches of all stages; the draft's guesses are
those of a real draft. So answers, steps, runs and cells are those of a cluster, and seconds do not
depend on what else this machine does. Greedy only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeinfer.backends.base import Backend, apply
from pipeinfer.core.types import Choice, Request
from pipeinfer.errors import PipeinferError
from pipeinfer.lab.emulation.virtual import Scenario, Simulation
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import (
    Emit,
    Finish,
    Instruction,
    IssueRun,
    LaneStats,
    SendOps,
    Submit,
)
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.strategies.decomposers.base import Decomposer
from pipeinfer.strategies.proposers.base import InlineProposer, Proposer
from pipeinfer.strategies.proposers.cascade import Cascade


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer. seconds: from asking to the last token; cells: most that its threads had at a
    time; busy, wasted: seconds of all stages for runs, and for runs that brought nothing."""

    emitted: tuple[Emit, ...]
    reason: str
    stats: LaneStats
    seconds: float
    cells: int
    busy: float
    wasted: float


class DecodedSimulation(Simulation):
    """Requests one after the other over `target`, which holds the whole model.

    draft: what names guesses in the scenario's draft time; hints: what gives rows of its own.
    """

    def __init__(self, scenario: Scenario, target: Backend, draft: Proposer | None,
                 hints: InlineProposer | None, controller: Controller | None) -> None:
        super().__init__(scenario, controller)
        self.scheduler = Scheduler(scenario.limits, hints, drafts=draft is not None)
        if draft is not None:
            self.draft = Cascade([draft])
        self._whole = target
        self._emitted: list[Emit] = []
        self._reason = ""
        self._past: deque[IssueRun | SendOps] = deque()  # the last stage, not evaluated yet

    def ask(self, request: Request, decompose: Callable[[], Decomposer] | None = None) -> Outcome:
        """Answer a request; then everything on its way comes to rest. Raises PipeinferError."""
        self._emitted, self.finished, self.scheduler.most_cells = [], None, 0
        before, wasted = sum(stage.busy for stage in self.stages), sum(self._wasted())
        started = self.now
        self.at(started, lambda: self.feed(Submit(request, decompose=decompose)))
        self.advance()
        seconds, stats = self.now - started, self.finished
        while self.queue:
            self._turn()
        self._catch_up(None)
        assert stats is not None
        return Outcome(tuple(self._emitted), self._reason, stats, seconds,
                       self.scheduler.most_cells,
                       sum(stage.busy for stage in self.stages) - before,
                       sum(self._wasted()) - wasted)

    def _execute(self, item: Instruction) -> None:
        if isinstance(item, Emit):
            self._emitted.append(item)
        elif isinstance(item, Finish):
            self._reason = item.reason
        super()._execute(item)

    def _end(self, index: int, token: int) -> None:
        stage = self.stages[index]
        if index + 1 == len(self.stages) and stage.running is not None and token == stage.token \
                and isinstance(item := stage.running.item, IssueRun | SendOps):
            self._past.append(item)
        super()._end(index, token)

    def _catch_up(self, run: IssueRun | None) -> None:
        """Apply what stages were told between the runs before this one (None: all of it)."""
        while self._past and (item := self._past.popleft()) is not run:
            assert isinstance(item, SendOps)  # runs come back in the order in which they left
            for op in item.ops:
                apply(self._whole, op)

    def _evaluate(self, item: IssueRun, skipped: bool) -> tuple[Choice, ...] | None:
        self._catch_up(item)
        for op in item.ops:
            apply(self._whole, op)
        if skipped:
            return None
        logits = self._whole.decode(item.rows)
        if logits is None:
            raise PipeinferError("a run was stopped that nobody stops")
        return tuple(Choice(int(token)) for token in np.asarray(logits).argmax(axis=1))
