"""Several clients on a simulated pipeline: each sends its next request when the last one ended.

The scheduler is the one that serves real clients, time is virtual. This module knows no HTTP and
no arrival process but this closed loop.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field

from pipeinfer.controller import Controller
from pipeinfer.core import Request
from pipeinfer.emulation.virtual import Scenario, Simulation, prompt_of
from pipeinfer.events import LaneStats, Submit


@dataclass(slots=True)
class LoadResult:
    """Times in virtual seconds. first: from a request's submission to its first token. gaps:
    between tokens of one request, of all requests. outputs: by request."""

    seconds: float
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    stats: dict[int, LaneStats] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all clients together."""
        return sum(map(len, self.outputs.values())) / self.seconds

    @property
    def gap_median(self) -> float:
        """Median time between a request's tokens."""
        return statistics.median(self.gaps) if self.gaps else 0.0

    @property
    def gap_worst(self) -> float:
        """The longest time that a running stream stood still."""
        return max(self.gaps, default=0.0)


def simulate_load(scenario: Scenario, clients: int, rounds: int = 1,
                  controller: Controller | None = None) -> LoadResult:
    """`clients` clients send `rounds` requests each, one after the other.

    Prompt and output are as long as the scenario says. Raises PipeinferError when the pipeline
    comes to rest too early, which would be a bug.
    """
    return _LoadSimulation(scenario, clients, rounds, controller).run_all()


class _LoadSimulation(Simulation):
    def __init__(self, scenario: Scenario, clients: int, rounds: int,
                 controller: Controller | None) -> None:
        super().__init__(scenario, controller)
        self.left = {client: rounds for client in range(clients)}
        self.open = 0
        self.ids = itertools.count()
        self.client_of: dict[int, int] = {}
        self.emissions: dict[int, list[float]] = {}
        self.started: dict[int, float] = {}
        self.result = LoadResult(0.0)

    def run_all(self) -> LoadResult:
        """Until every client has had all its answers."""
        for client in self.left:
            self._next_request(client)
        self.advance()
        result = self.result
        result.seconds = self.now
        for request_id, times in self.emissions.items():
            if times:
                result.first.append(times[0] - self.started[request_id])
            result.gaps += [b - a for a, b in itertools.pairwise(times)]
        return result

    def over(self) -> bool:
        """See `Simulation.over`."""
        return self.open == 0

    def emitted(self, request_id: int, token: int) -> None:
        """See `Simulation.emitted`."""
        self.emissions[request_id].append(self.now)
        self.result.outputs[request_id].append(token)

    def ended(self, request_id: int, stats: LaneStats) -> None:
        """See `Simulation.ended`."""
        self.open -= 1
        self.result.stats[request_id] = stats
        self._next_request(self.client_of[request_id])

    def _next_request(self, client: int) -> None:
        if not self.left[client]:
            return
        self.left[client] -= 1
        self.open += 1
        request_id = next(self.ids)
        self.client_of[request_id] = client
        self.emissions[request_id] = []
        self.result.outputs[request_id] = []
        self.started[request_id] = self.now
        request = Request(request_id, prompt_of(self.spec, request_id), self.spec.tokens)
        self.at(self.now, lambda: self.feed(Submit(request)))
