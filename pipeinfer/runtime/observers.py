"""Observers of the head: they are called with every run that is issued or returned.

An observer never changes what happens, except the tuner, which sets the scheduler's limits as its
controller advises. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import RunCancelled, RunFinished
from pipeinfer.planning.pace import LoadWatch, StagePace
from pipeinfer.scheduler.controller import Controller, gaps
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.scheduler import Scheduler

_MOST_ITEMS = 20_000  #: reports that wait to be taken; older ones are lost


class RunObserver:
    """The calls that an observer may override; each does nothing by default."""

    def issued(self, run: Run, when: float) -> None:
        """A run has been issued."""

    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        """A run has returned, and the runs that follow from it have been issued.

        run: None if the scheduler had dropped it already.
        """

    def cancelled(self, run_ids: Collection[int], when: float) -> None:
        """These runs are cancelled."""

    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        """The scheduler has handled an event; `runs` are in flight now."""

    def restarted(self) -> None:
        """All runs in flight are lost."""


@dataclass(slots=True)
class RunTrace(RunObserver):
    """The record for `--trace`.

    issues: (run id, time, speculative, rows) of each run.
    cancels: (time, run ids) of each cancellation.
    results: (run id, time) of each result.
    traced: the runs.
    died: the time at which each invalid run became invalid, cancelled by message or not.
    """

    issues: list[tuple[int, float, bool, int]] = field(default_factory=list)
    cancels: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    results: list[tuple[int, float]] = field(default_factory=list)
    traced: list[Run] = field(default_factory=list)
    died: dict[int, float] = field(default_factory=dict)

    def fates(self) -> dict[int, str]:
        """Return what became of the tokens of each traced run, by run id."""
        return {run.run_id: fate(run) for run in self.traced}

    @override
    def issued(self, run: Run, when: float) -> None:
        self.issues.append((run.run_id, when, run.speculative, run.n_rows))
        self.traced.append(run)

    @override
    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        del run
        self.results.append((message.run_id, when))

    @override
    def cancelled(self, run_ids: Collection[int], when: float) -> None:
        self.cancels.append((when, tuple(run_ids)))

    @override
    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        for run in runs.values():
            if run.cancelled:
                self.died.setdefault(run.run_id, when)


class LiveRuns(RunObserver):
    """The log of runs for a client such as `pipeinfer timeline`: issued, returned, decided. It is
    recorded only while it is observed."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._open: dict[int, Run] = {}

    @override
    def issued(self, run: Run, when: float) -> None:
        self._open[run.run_id] = run
        guesses = run.guesses
        kind = "prompt" if run.chunk else "guess" if run.hint else "token" if not guesses else \
            "guess" if guesses == len(run.nodes) else "mixed"
        self._items.append({
            "id": run.run_id, "requests": [lane.request.request_id for lane in run.lanes],
            "rows": run.n_rows, "kind": kind, "issued": when})

    @override
    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        del run
        if message.run_id in self._open:
            self._items.append({
                "id": message.run_id, "done": when, "skipped": isinstance(message, RunCancelled),
                "spans": [[start, seconds, "computed" if seconds > 0 else "skipped", waited]
                          for start, seconds, waited in message.spans]})

    @override
    def restarted(self) -> None:
        self._items.clear()
        self._open.clear()

    def take(self) -> list[dict[str, Any]]:
        """Return the reports since the last call, in order. A run's fate is reported once it is
        decided."""
        for run_id, run in list(self._open.items()):
            if not run.in_flight and (
                    run.chunk or all(n.accepted or not n.alive for n in run.nodes)):
                del self._open[run_id]
                self._items.append({"id": run_id, "fate": fate(run)})
        items, self._items = self._items[-_MOST_ITEMS:], []
        return items


def fate(run: Run) -> str:
    """Return what became of a run's tokens, as one or two words."""
    if run.chunk:
        return "prompt"
    guesses = [node for node in run.nodes if node.speculative]
    if not guesses:
        return "non-speculative"
    right = sum(node.accepted for node in guesses)
    return "accepted" if right == len(guesses) else "partly accepted" if right else "rejected"


class StageTimes(RunObserver):
    """Measures the times of stages and of their members (`StagePace`), and the load."""

    def __init__(self, grid: Grid) -> None:
        self.pace = StagePace(grid, ())
        self.load = LoadWatch()

    def members_now(self) -> dict[str, list[float]]:
        """Return, for the snapshot, two lists with seconds per node: computing in a run of one
        row, and waiting for the other members of its stage. Empty if no stage is wide or nothing
        is measured."""
        found = self.pace.members
        return {} if not found else {
            "member_seconds": [computing for computing, _ in found],
            "member_waiting_seconds": [waiting for _, waiting in found]}

    @override
    def issued(self, run: Run, when: float) -> None:
        del when
        if run.chunk and not run.loads:
            self.load.prompt(run.n_rows)

    @override
    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        self.load.running(len({id(lane) for run in runs.values() for lane in run.owners}), when)

    @override
    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        del when
        # what was read from disks says nothing about the speed of a stage
        if run is not None and not run.loads and isinstance(message, RunFinished):
            self.pace.saw(run.n_rows, message.spans)


class Tuner(RunObserver):
    """Passes the times of runs to a controller, and the controller's limits to the scheduler."""

    def __init__(self, scheduler: Scheduler, controller: Controller) -> None:
        self._scheduler, self._controller = scheduler, controller
        self._issued: dict[int, tuple[float, int]] = {}  # runs with results for all rows: rows

    @override
    def issued(self, run: Run, when: float) -> None:
        if len(run.nodes) == run.n_rows:
            self._issued[run.run_id] = (when, run.n_rows)

    @property
    def time_sharing(self) -> bool:
        """Whether draft and target are time-shared: then the one or two accepted tokens that the
        draft has to evaluate first count as draft time."""
        return self._controller.limits.time_sharing

    def drafted(self, guesses: int, seconds: float) -> None:
        """Record that a draft returned `guesses` proposals in `seconds` of computation."""
        self._controller.drafted(guesses, seconds)

    @override
    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        del run
        issued = self._issued.pop(message.run_id, None)
        if issued is None or isinstance(message, RunCancelled):
            return
        since, rows = issued
        scheduler, calibration = self._scheduler, self._scheduler.calibration
        lanes = scheduler.decoding
        self._controller.run_returned(
            rows, message.slowest, message.computed, when - since,
            gaps(since, when, message.spans) if lanes > 1 else () if lanes else None)
        limits = self._controller.advise(calibration.acceptance, calibration.second)
        if limits is not None:
            scheduler.tune(limits)

    @override
    def restarted(self) -> None:
        self._issued.clear()
