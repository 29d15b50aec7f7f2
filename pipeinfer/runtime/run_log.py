"""What runs do, told to somebody who looks on: issued, back, decided.

Kept only while somebody looks; it never changes what happens. This module knows no transport and
no clock: it is told times, in seconds since the epoch.
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
        """A run went out."""
        self._open[run.run_id] = run
        guesses = run.guesses
        kind = "prompt" if run.chunk else "guess" if run.hint else "token" if not guesses else \
            "guess" if guesses == len(run.nodes) else "mixed"
        self._items.append({
            "id": run.run_id, "requests": [lane.request.request_id for lane in run.lanes],
            "rows": run.n_rows, "kind": kind, "issued": when})

    def back(self, run_id: int, when: float, spans: Spans, *, skipped: bool) -> None:
        """A run came back. spans: as in `messages.Decode`."""
        if run_id in self._open:
            self._items.append({"id": run_id, "done": when, "skipped": skipped, "spans": [
                [start, seconds, "computed" if seconds > 0 else "skipped", waited]
                for start, seconds, waited in spans]})

    def take(self) -> list[dict[str, Any]]:
        """The reports since the last time, in order; fates as soon as they are known."""
        for run_id, run in list(self._open.items()):
            if not run.in_flight and (
                    run.chunk or all(n.accepted or not n.alive for n in run.nodes)):
                del self._open[run_id]
                self._items.append({"id": run_id, "fate": fate(run)})
        items, self._items = self._items[-_MOST_ITEMS:], []
        return items


def fate(run: Run) -> str:
    """What became of a run's tokens."""
    if run.chunk:
        return "prompt"
    guesses = [node for node in run.nodes if node.speculative]
    if not guesses:
        return "non-speculative"
    right = sum(node.accepted for node in guesses)
    return "accepted" if right == len(guesses) else "partly accepted" if right else "rejected"
