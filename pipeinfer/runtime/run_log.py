"""A log of runs for an observer such as `pipeinfer timeline`: issued, returned, decided.

It is recorded only while it is observed and never changes what happens. This module reads no
clock: callers pass times, in seconds since the epoch.
"""

from __future__ import annotations

from typing import Any

from pipeinfer.core.messages import Spans
from pipeinfer.scheduler.lanes import Run

_MOST_ITEMS = 20_000  #: reports that wait to be taken; older ones are lost


class RunWatch:
    """Collects reports until `take`."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._open: dict[int, Run] = {}

    def issued(self, run: Run, when: float) -> None:
        """Report a run that was issued at `when`."""
        self._open[run.run_id] = run
        guesses = run.guesses
        kind = "prompt" if run.chunk else "guess" if run.hint else "token" if not guesses else \
            "guess" if guesses == len(run.nodes) else "mixed"
        self._items.append({
            "id": run.run_id, "requests": [lane.request.request_id for lane in run.lanes],
            "rows": run.n_rows, "kind": kind, "issued": when})

    def back(self, run_id: int, when: float, spans: Spans, *, skipped: bool) -> None:
        """Report a run that returned.

        spans: times of the stages, as in `messages.Decode`.
        skipped: whether the result was a cancellation.
        """
        if run_id in self._open:
            self._items.append({"id": run_id, "done": when, "skipped": skipped, "spans": [
                [start, seconds, "computed" if seconds > 0 else "skipped", waited]
                for start, seconds, waited in spans]})

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
