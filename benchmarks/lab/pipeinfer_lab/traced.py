"""The emulator with a note of what each stage did, and how much of it was of no use."""

from __future__ import annotations

from pipeinfer.core.messages import Decode
from pipeinfer.emulation.virtual import Result, Scenario, Simulation
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import Event

Span = tuple[int, int, float, float, str]


class Traced(Simulation):
    """spans: (stage, run, start, end, fate), where fate is prompt, token (an accepted one's run),
    guess, dead (computed, and of no use) or skipped."""

    def __init__(self, scenario: Scenario, controller: Controller | None) -> None:
        super().__init__(scenario, controller)
        self._spans: list[Span] = []
        self._died: set[int] = set()

    def computed(self, stage: int, run: Decode, started: float, *, skipped: bool) -> None:
        fate = "skipped" if skipped else "guess" if run.speculative else (
            "token" if run.rows.outputs.all() else "prompt")
        self._spans.append((stage, run.run_id, started, self.now, fate))

    def _handle(self, event: Event) -> None:
        super()._handle(event)
        self._died |= {run.run_id for run in self.scheduler.runs.values() if run.cancelled}

    @property
    def spans(self) -> list[Span]:
        """What stages computed, by the end of each run."""
        return [(stage, run, start, end,
                 "dead" if fate == "guess" and run in self._died else fate)
                for stage, run, start, end, fate in self._spans]

    @property
    def wasted(self) -> list[float]:
        """Seconds that each stage computed for runs that were dead by then or died later."""
        return [sum(end - start for place, run, start, end, _ in self._spans
                    if place == stage and run in self._died)
                for stage in range(len(self.stages))]


def simulate(scenario: Scenario, controller: Controller | None = None) -> tuple[Result, Traced]:
    """Run a scenario; see `virtual.simulate`."""
    simulation = Traced(scenario, controller)
    return simulation.run(), simulation
