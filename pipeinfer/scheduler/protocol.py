"""What a head asks of whoever schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pipeinfer.scheduler.calibration import Calibration
from pipeinfer.scheduler.events import Event, Instruction, LaneStats, ToNode
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.settings import Limits


class SchedulerLike(Protocol):
    """Events in, instructions out.

    runs: those in flight, by id; next_run: the id of the next one. totals: of all requests;
    calibration: how likely guesses are right.
    """

    totals: LaneStats
    calibration: Calibration
    next_run: int

    @property
    def runs(self) -> Mapping[int, Run]:
        """Runs in flight by id."""

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or in flight."""

    @property
    def concurrency(self) -> tuple[int, object]:
        """How many requests are past their prompts, 0 while prompts are on their way; and a value
        that changes when one comes or goes."""

    def handle(self, event: Event) -> Sequence[Instruction | ToNode]:
        """Advance by one event; returns what to execute, in order."""

    def reconfigure(self, limits: Limits) -> None:
        """Use other knobs from now on; only while idle."""

    def tune(self, limits: Limits) -> None:
        """Use other sizes, credits and cutoffs from now on, at any time."""

    def snapshot(self) -> dict[str, Any]:
        """What is going on, for people."""
