"""Who looks on while the head sends runs and gets them back: one fan-out, told times.

An observer never changes what happens, but for the tuner, which follows its controller's advice.
Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import RunCancelled, RunFinished
from pipeinfer.planning.load_seen import LoadWatch
from pipeinfer.planning.member_pace import MemberPace
from pipeinfer.planning.stragglers import StagePace
from pipeinfer.runtime.run_log import RunWatch, fate
from pipeinfer.scheduler.controller import Controller, gaps
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.protocol import SchedulerLike


class RunObserver:
    """What an observer may hear; by default it does not listen."""

    def issued(self, run: Run, when: float) -> None:
        """A run goes out."""

    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        """A run is back, and what follows it has gone out. run: None for one that the scheduler
        did not know any more."""

    def cancelled(self, run_ids: Collection[int], when: float) -> None:
        """These runs are called off."""

    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        """The scheduler has handled an event; `runs` are in flight now."""

    def restarted(self) -> None:
        """Whatever was in flight is lost."""


@dataclass(slots=True)
class RunTrace(RunObserver):
    """For `--trace`: issues (run, time, speculative, rows), cancels, results, the runs themselves,
    and when each invalid run became so, whether it was signalled or not."""

    issues: list[tuple[int, float, bool, int]] = field(default_factory=list)
    cancels: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    results: list[tuple[int, float]] = field(default_factory=list)
    traced: list[Run] = field(default_factory=list)
    died: dict[int, float] = field(default_factory=dict)

    def fates(self) -> dict[int, str]:
        """What became of each traced run's tokens, by run id."""
        return {run.run_id: fate(run) for run in self.traced}

    def issued(self, run: Run, when: float) -> None:
        """See `RunObserver`."""
        self.issues.append((run.run_id, when, run.speculative, run.n_rows))
        self.traced.append(run)

    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        """See `RunObserver`."""
        del run
        self.results.append((message.run_id, when))

    def cancelled(self, run_ids: Collection[int], when: float) -> None:
        """See `RunObserver`."""
        self.cancels.append((when, tuple(run_ids)))

    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        """See `RunObserver`."""
        for run in runs.values():
            if run.cancelled:
                self.died.setdefault(run.run_id, when)


class LiveRuns(RunObserver):
    """For somebody who looks on now and then, see `RunWatch`."""

    def __init__(self) -> None:
        self.watch = RunWatch()

    def issued(self, run: Run, when: float) -> None:
        """See `RunObserver`."""
        self.watch.issued(run, when)

    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        """See `RunObserver`."""
        del run
        self.watch.back(message.run_id, when, message.spans,
                        skipped=isinstance(message, RunCancelled))

    def restarted(self) -> None:
        """See `RunObserver`."""
        self.watch = RunWatch()


class StageTimes(RunObserver):
    """What stages take for a run, see `StagePace`; and what they are used for."""

    def __init__(self, grid: Grid) -> None:
        self.pace = StagePace(grid.n_stages, ())
        self.members = MemberPace(grid)
        self.load = LoadWatch()

    def members_now(self) -> dict[str, list[float]]:
        """For the snapshot: of each node, seconds that it computes in a run of one row and waits
        for the other members of its stage; nothing where no stage is wide or nothing is known."""
        found = self.members.figures(self.pace.seconds)
        return {} if not found else {
            "member_seconds": [computing for computing, _ in found],
            "member_waiting_seconds": [waiting for _, waiting in found]}

    def issued(self, run: Run, when: float) -> None:
        """See `RunObserver`."""
        del when
        if run.chunk:
            self.load.prompt(run.n_rows)

    def handled(self, runs: Mapping[int, Run], when: float) -> None:
        """See `RunObserver`."""
        self.load.running(len({id(lane) for run in runs.values() for lane in run.owners}), when)

    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        """See `RunObserver`."""
        del when
        if run is not None and isinstance(message, RunFinished):
            self.pace.saw(run.n_rows, message.spans)


class Tuner(RunObserver):
    """Tells a controller what runs took, and the scheduler what the controller advises."""

    def __init__(self, scheduler: SchedulerLike, controller: Controller) -> None:
        self._scheduler, self._controller = scheduler, controller
        self._issued: dict[int, tuple[float, int]] = {}  # runs all of whose rows are asked: rows

    def issued(self, run: Run, when: float) -> None:
        """See `RunObserver`."""
        if len(run.nodes) == run.n_rows:
            self._issued[run.run_id] = (when, run.n_rows)

    @property
    def by_turns(self) -> bool:
        """Whether a draft always has to catch up, by a token or two, which counts then."""
        return self._controller.limits.take_turns

    def drafted(self, guesses: int, seconds: float) -> None:
        """A draft has named so many guesses in so many seconds, its cache being up to date."""
        self._controller.drafted(guesses, seconds)

    def returned(self, message: RunFinished | RunCancelled, run: Run | None, when: float) -> None:
        """See `RunObserver`."""
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

    def restarted(self) -> None:
        """See `RunObserver`."""
        self._issued.clear()
