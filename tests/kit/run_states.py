"""A simulated pipeline that records which states of runs follow which."""

from __future__ import annotations

from typing import Any

from pipeinfer.core.messages import NO_RUN
from pipeinfer.scheduler.events import RunDone
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.state import SchedulerState
from tests.kit.simulated import Pipeline

_OUTSIDE = "[*]"


class WatchedPipeline(Pipeline):
    """found: state before, state after, and the event, by name."""

    def __init__(self, limits: Limits, seed: int) -> None:
        super().__init__(limits, seed=seed)
        self.found: set[tuple[str, str, str]] = set()

    def feed(self, event: Any) -> None:
        """Handle an event, and compare all runs with those before it."""
        state = self.scheduler.state
        before, tips = _states(state), [node for _, node in state.tips]
        super().feed(event)
        after, waiting = _states(state), [node for _, node in state.tips]
        moves = [(was, after.get(run) or _end(event, run, was)) for run, was in before.items()]
        moves += [("queued" if any(node in tips for node in run.nodes) else _OUTSIDE, now)
                  for run, now in after.items() if run not in before]
        moves += [(_OUTSIDE, "queued") for node in waiting if node not in tips]
        moves += [("queued", "dropped") for node in tips
                  if node not in waiting and node.run_id == NO_RUN]
        self.found |= {(was, now, type(event).__name__) for was, now in moves if was != now}


def _states(state: SchedulerState) -> dict[Run, str]:
    return {run: "issued" if run.useful else "cancelled" for run in state.runs.values()}


def _end(event: Any, run: Run, was: str) -> str:
    if not (isinstance(event, RunDone) and event.run_id == run.run_id):
        return "lost"
    return "skipped" if event.choices is None else "used" if was == "issued" else "ignored"
