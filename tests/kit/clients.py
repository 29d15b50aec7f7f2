"""Several clients on a simulated pipeline: each sends its next request when the last one ended.

The scheduler is the one that serves real clients; time is virtual.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from pipeinfer.core.types import Request
from pipeinfer.emulation.virtual import Simulation, prompt_of
from pipeinfer.scheduler.events import Enqueue


@dataclass(slots=True)
class LoadResult:
    """seconds: virtual, of everything. outputs: tokens by request."""

    seconds: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all clients together."""
        return sum(map(len, self.outputs.values())) / self.seconds


class Clients(Simulation):
    """`clients` clients that send `rounds` requests each, as long as the scenario says."""

    def __init__(self, scenario, clients, rounds, controller):
        super().__init__(scenario, controller)
        self._left = dict.fromkeys(range(clients), rounds)
        self._ids, self._client_of, self._open = itertools.count(), {}, set()
        self.result = LoadResult()

    def run_all(self) -> LoadResult:
        """Until every client has had all its answers."""
        for client in self._left:
            self._next_request(client)
        self.advance()
        self.result.seconds = self.now
        return self.result

    def over(self) -> bool:
        return not self._open

    def emitted(self, request_id, token):
        self.result.outputs[request_id].append(token)

    def ended(self, request_id, stats):
        self._open.remove(request_id)
        self._next_request(self._client_of[request_id])

    def _next_request(self, client):
        if not self._left[client]:
            return
        self._left[client] -= 1
        request_id = next(self._ids)
        self._client_of[request_id] = client
        self._open.add(request_id)
        self.result.outputs[request_id] = []
        request = Request(request_id, prompt_of(self.spec, request_id), self.spec.tokens)
        self.at(self.now, lambda: self.feed(Enqueue(request)))
