"""The client of a request: what its API key has used, and what its trace records.

There is one object per request, in the context of the task that answers it, so that its choices
find it when they are sent to the engine. It uses neither HTTP nor OpenTelemetry.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pipeinfer.server.choice import Generation
    from pipeinfer.server.keys import Meter
    from pipeinfer.server.requests import EngineRequest


class Trace(Protocol):
    """The trace of a request, written by `tracing`. It ends when the HTTP exchange and all
    choices have."""

    @property
    def traceparent(self) -> str:
        """The request's span in the format of the header `traceparent`."""

    def about(self, answer_id: str) -> None:
        """Record the answer's id."""

    def began(self, generation: Generation, asked: EngineRequest) -> None:
        """Record that a choice is sent to the engine."""

    def first(self, generation: Generation) -> None:
        """Record the first token of a choice."""

    def event(self, name: str, **attributes: str | int | bool) -> None:
        """Record an event."""

    def ended(self, generation: Generation) -> None:
        """Record the end of a choice."""


class Asker:
    """The client of a request. meter: of its key, None if keys are not counted. trace: None for
    none."""

    def __init__(self, meter: Meter | None = None, trace: Trace | None = None) -> None:
        self.meter, self.trace = meter, trace

    @property
    def traceparent(self) -> str:
        """The request's span, "" if there is no trace."""
        return "" if self.trace is None else self.trace.traceparent

    @property
    def pool(self) -> int:
        """The number, from 1, of the group of answers from which prompt lookup may copy: those
        to the same key; without keys, all."""
        return 1 if self.meter is None else self.meter.number

    def about(self, answer_id: str) -> None:
        """Record the answer's id."""
        if self.trace is not None:
            self.trace.about(answer_id)

    def began(self, generation: Generation, asked: EngineRequest) -> None:
        """Record that a choice is sent to the engine. A prompt counts once for all its choices."""
        if self.meter is not None and generation.index % asked.n == 0:
            self.meter.used(generation.counts.prompt, time.monotonic())
        if self.trace is not None:
            self.trace.began(generation, asked)

    def token(self, generation: Generation) -> None:
        """Record a token of the answer."""
        if self.meter is not None:
            self.meter.used(1, time.monotonic())
        if self.trace is not None and generation.counts.output == 1:
            self.trace.first(generation)

    def event(self, name: str, **attributes: str | int | bool) -> None:
        """Record an event in the trace."""
        if self.trace is not None:
            self.trace.event(name, **attributes)

    def ended(self, generation: Generation) -> None:
        """Record the end of a choice."""
        if self.trace is not None:
            self.trace.ended(generation)


_NO_CLIENT = Asker()
_ASKER: ContextVar[Asker] = ContextVar("asker", default=_NO_CLIENT)


def current() -> Asker:
    """Return the client of the request in this task."""
    return _ASKER.get()


@contextlib.contextmanager
def asking(meter: Meter | None = None, trace: Trace | None = None) -> Iterator[Asker]:
    """Set the client of this task while the block lasts: the present one, with this meter or
    trace added."""
    asker = current()
    asker = Asker(meter or asker.meter, trace or asker.trace)
    token = _ASKER.set(asker)
    try:
        yield asker
    finally:
        _ASKER.reset(token)
