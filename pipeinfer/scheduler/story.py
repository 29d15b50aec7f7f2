"""The last events of each lane, for the report of an error.

A contradiction in the scheduler's state is found long after its cause, and a user can rarely repeat
it. So errors carry what happened to the lanes before. Independent of policies and trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.messages import Cancel, Decode, LaneClose, LaneOpen
from pipeinfer.scheduler.events import AbortRequest, Drafted, Event, Instruction, RunDone
from pipeinfer.scheduler.state import SchedulerState

_KEPT = 64  #: events of a lane
_SHOWN = 16  #: rows of a run
_LANES = 64  #: of which events are kept, closed ones included


class Story:
    """Records events by lane. state: of the scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._of: dict[int, deque[str]] = {}

    def lines(self) -> tuple[str, ...]:
        """Return the events in order, by lane, one a line."""
        return tuple(f"lane {lane}: {text}" for lane, texts in self._of.items() for text in texts)

    def event(self, event: Event) -> None:
        """Record an event before it is handled."""
        match event:
            case RunDone(run_id, choices):
                tokens = None if choices is None else [one.token for one in choices]
                self._add(self._lanes_of((run_id,)),
                          f"run {run_id} returned {'skipped' if tokens is None else tokens}")
            case Drafted(job_id, proposals):
                lanes = (one.lane for one in self._state.lanes.values()
                         if one.job is not None and one.job.job_id == job_id)
                self._add(lanes, f"job {job_id} proposed {[one.token for one in proposals]}")
            case AbortRequest(request_id, reason):
                lanes = (one.lane for one in self._state.lanes.values()
                         if one.request.request_id == request_id)
                self._add(lanes, f"request {request_id} aborted: {reason}")
            case _:
                pass  # a request has no lane yet, and after a restart there is none

    def instructions(self, instructions: Sequence[Instruction]) -> None:
        """Record the instructions that follow from an event."""
        for one in instructions:
            match one:
                case Decode(run_id, parent_id, rows):
                    # a prompt's chunk has many rows, and this is done for every run
                    pairs = list(zip(rows.positions[:_SHOWN].tolist(),
                                     rows.tokens[:_SHOWN].tolist(), strict=True))
                    few = "" if len(rows) <= _SHOWN else f" and {len(rows) - _SHOWN} more"
                    self._add(dict.fromkeys(one.lanes), (
                        f"run {run_id} after {parent_id} issued {pairs}{few}"
                        f"{', speculative' * one.speculative}"))
                case LaneOpen(lane):
                    self._add((lane,), "opened")
                case LaneClose(lane):
                    self._add((lane,), "closed")
                case Cancel(run_ids):
                    self._add(self._lanes_of(run_ids), f"runs {list(run_ids)} cancelled")
                case StartDraft(job_id, base=base, suffix=suffix):
                    asking = (lane.lane for lane in self._state.lanes.values() if lane.job is one)
                    self._add(asking, f"job {job_id} started at {base} with {list(suffix)}")
                case _:
                    pass  # what a client gets, and operations that travel with a run

    def _lanes_of(self, run_ids: Iterable[int]) -> dict[int, None]:
        runs = [self._state.runs[one] for one in run_ids if one in self._state.runs]
        return dict.fromkeys(lane.lane for run in runs for lane in run.lanes)

    def _add(self, lanes: Iterable[int], text: str) -> None:
        for lane in lanes:
            if lane not in self._of and len(self._of) >= _LANES:
                del self._of[next(iter(self._of))]
            self._of.setdefault(lane, deque(maxlen=_KEPT)).append(text)
