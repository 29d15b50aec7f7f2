"""Several clients on a simulated pipeline: each sends its next request when the last one ended.

The scheduler is the one that serves real clients. Time is virtual, or that of the real runtime at
the emulated pace (`emulate_load`, under mpirun). This module knows no HTTP and no arrival process
but this closed loop.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeinfer.core.policy import CancelPath
from pipeinfer.core.types import Request
from pipeinfer.errors import PipeinferError
from pipeinfer.lab.emulation.virtual import Scenario, Simulation, prompt_of
from pipeinfer.lab.emulation.wall import make_head, on_ranks
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import Emit, Finish, LaneStats, Submit
from pipeinfer.transport.base import Port

_TIMEOUT = 600.0


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


def emulate_load(scenario: Scenario, clients: int, rounds: int = 1, scale: float = 1.0,
                 controller: Controller | None = None) -> LoadResult | None:
    """The same with the real runtime, one rank per stage and one for the head; at rank 0.

    Times are those of the emulated cluster (divided by the scale).
    """
    def drive(port: Port, path: CancelPath) -> LoadResult:
        head, worker = make_head(scenario, port, scale, path, controller)
        start = time.monotonic()
        loop = _ClosedLoop(scenario, clients, rounds, head.submit,
                           lambda: (time.monotonic() - start) / scale)
        loop.begin()
        while loop.open:
            match head.next_news(_TIMEOUT):
                case Emit(request_id, choice, _):
                    loop.emitted(request_id, choice.token)
                case Finish(request_id, _, stats):
                    loop.ended(request_id, stats)
                case news:
                    raise PipeinferError(f"an emulated request ended with {news}")
        result = loop.finish()
        worker.close(timeout=5.0)
        head.drain(_TIMEOUT)
        head.shutdown(timeout=30.0)
        return result

    return on_ranks(scenario, scale, drive)


class _ClosedLoop:
    """The clients: whoever has an answer asks again. `now` gives seconds."""

    def __init__(self, scenario: Scenario, clients: int, rounds: int,
                 submit: Callable[[Request], None], now: Callable[[], float]) -> None:
        self.open = 0
        self._scenario, self._submit, self._now = scenario, submit, now
        self._left = dict.fromkeys(range(clients), rounds)
        self._ids = itertools.count()
        self._client_of: dict[int, int] = {}
        self._times: dict[int, list[float]] = {}
        self._result = LoadResult(0.0)

    def begin(self) -> None:
        """Every client sends its first request."""
        for client in self._left:
            self._next_request(client)

    def emitted(self, request_id: int, token: int) -> None:
        """A token came out."""
        self._times[request_id].append(self._now())
        self._result.outputs[request_id].append(token)

    def ended(self, request_id: int, stats: LaneStats) -> None:
        """A request ended."""
        self.open -= 1
        self._result.stats[request_id] = stats
        self._next_request(self._client_of[request_id])

    def finish(self) -> LoadResult:
        """The figures; everything has ended."""
        result = self._result
        result.seconds = self._now()
        for times in self._times.values():
            if len(times) > 1:
                result.first.append(times[1] - times[0])
            result.gaps += [b - a for a, b in itertools.pairwise(times[1:])]
        return result

    def _next_request(self, client: int) -> None:
        if not self._left[client]:
            return
        self._left[client] -= 1
        self.open += 1
        request_id = next(self._ids)
        self._client_of[request_id] = client
        self._times[request_id] = [self._now()]
        self._result.outputs[request_id] = []
        self._submit(Request(request_id, prompt_of(self._scenario, request_id),
                             self._scenario.tokens))


class _LoadSimulation(Simulation):
    def __init__(self, scenario: Scenario, clients: int, rounds: int,
                 controller: Controller | None) -> None:
        super().__init__(scenario, controller)
        self.loop = _ClosedLoop(
            scenario, clients, rounds,
            lambda request: self.at(self.now, lambda: self.feed(Submit(request))),
            lambda: self.now)

    def run_all(self) -> LoadResult:
        """Until every client has had all its answers."""
        self.loop.begin()
        self.advance()
        return self.loop.finish()

    def over(self) -> bool:
        """See `Simulation.over`."""
        return self.loop.open == 0

    def emitted(self, request_id: int, token: int) -> None:
        """See `Simulation.emitted`."""
        self.loop.emitted(request_id, token)

    def ended(self, request_id: int, stats: LaneStats) -> None:
        """See `Simulation.ended`."""
        self.loop.ended(request_id, stats)
