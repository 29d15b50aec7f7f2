"""Observers of the head: they are called with every run that is issued or returned.

An observer never changes what happens, except the tuner, which sets the scheduler's limits as its
controller advises. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import RunCancelled, RunFinished
from pipeinfer.planning.load_seen import LoadWatch
from pipeinfer.planning.pace import StagePace
from pipeinfer.runtime.run_log import RunWatch, fate
from pipeinfer.scheduler.controller import Controller, gaps
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.scheduler import Scheduler


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
    """Feeds a `RunWatch` while a client observes the runs."""

    def __init__(self) -> None:
        self.watch = RunWatch()

    @override
    def issued(self, run: Run, when: float) -> None:
        self.watch.issued(run, when)

    @override
    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        del run
        self.watch.back(message.run_id, when, message.spans,
                        skipped=isinstance(message, RunCancelled))

    @override
    def restarted(self) -> None:
        self.watch = RunWatch()


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
        if run.chunk:
            self.load.prompt(run.n_rows)

    @override
    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        self.load.running(len({id(lane) for run in runs.values() for lane in run.owners}), when)

    @override
    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        del when
        if run is not None and isinstance(message, RunFinished):
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
    def by_turns(self) -> bool:
        """Whether draft and target are time-shared: then the one or two accepted tokens that the
        draft has to evaluate first count as draft time."""
        return self._controller.limits.take_turns

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
        lanes = scheduler.concurrency[0]
        self._controller.run_returned(
            rows, message.slowest, message.computed, when - since,
            gaps(since, when, message.spans) if lanes > 1 else () if lanes else None)
        for limits in (
            self._controller.advise(calibration.acceptance, calibration.second),
            self._controller.progress(scheduler.totals.accepted, when, *scheduler.concurrency),
        ):
            if limits is not None:
                scheduler.tune(limits)

    @override
    def restarted(self) -> None:
        self._issued.clear()
