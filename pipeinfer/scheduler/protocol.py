"""The interface between the head and a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pipeinfer.core.calibration import Calibration
from pipeinfer.scheduler.events import Event, Instruction, LaneStats, ToNode
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.settings import Limits, Tuning


class SchedulerLike(Protocol):
    """A scheduler: events in, instructions out.

    totals: counters over all requests
    calibration: acceptance of proposals
    next_run: the id of the next run
    """

    totals: LaneStats
    calibration: Calibration
    next_run: int

    @property
    def runs(self) -> Mapping[int, Run]:
        """Runs in flight by id."""

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running or in flight."""

    @property
    def concurrency(self) -> tuple[int, object]:
        """The number of requests past their prompts, and a value that changes when one comes or
        goes.

        The number is 0 while prompts are being computed.
        """

    def handle(self, event: Event) -> Sequence[Instruction | ToNode]:
        """Advance by one event; return the instructions to execute, in order."""

    def reconfigure(self, limits: Limits) -> None:
        """Use other settings from now on; only while idle."""

    def tune(self, tuning: Tuning) -> None:
        """Use other sizes, credits and cutoffs from now on, at any time."""

    def snapshot(self) -> dict[str, Any]:
        """Return the present state for display."""
