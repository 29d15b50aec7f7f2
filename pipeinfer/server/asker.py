"""Who asks: what the key of a request has used, and what is told of the request while it goes on.

There is one for each request, in the context of the task that answers it, so that its choices find
it when the engine gets them. Knows choices, neither HTTP nor OpenTelemetry.
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
    from pipeinfer.server.requests import Asked


class Trace(Protocol):
    """What `tracing` writes down of a request. It ends when its exchange and its choices have."""

    @property
    def traceparent(self) -> str:
        """Its span, as the header of that name says it."""

    def about(self, answer_id: str) -> None:
        """The answer's id."""

    def began(self, generation: Generation, asked: Asked) -> None:
        """The engine gets a choice."""

    def first(self, generation: Generation) -> None:
        """Its first token is there."""

    def event(self, name: str, **attributes: str | int | bool) -> None:
        """Something has happened meanwhile."""

    def ended(self, generation: Generation) -> None:
        """The choice has ended."""


class Asker:
    """Who asks. meter: of its key, None where keys are not counted. trace: None for none."""

    def __init__(self, meter: Meter | None = None, trace: Trace | None = None) -> None:
        self.meter, self.trace = meter, trace

    @property
    def traceparent(self) -> str:
        """The span of the request, empty for none."""
        return "" if self.trace is None else self.trace.traceparent

    @property
    def pool(self) -> int:
        """Whose answers belong together: those to its key, by a number above 0; without keys,
        all."""
        return 1 if self.meter is None else self.meter.number

    def about(self, answer_id: str) -> None:
        """The answer has this id."""
        if self.trace is not None:
            self.trace.about(answer_id)

    def began(self, generation: Generation, asked: Asked) -> None:
        """The engine gets a choice. A prompt counts once for all its choices."""
        if self.meter is not None and generation.index % asked.n == 0:
            self.meter.used(generation.counts.prompt, time.monotonic())
        if self.trace is not None:
            self.trace.began(generation, asked)

    def token(self, generation: Generation) -> None:
        """A token of the answer is there."""
        if self.meter is not None:
            self.meter.used(1, time.monotonic())
        if self.trace is not None and generation.counts.output == 1:
            self.trace.first(generation)

    def event(self, name: str, **attributes: str | int | bool) -> None:
        """Something has happened meanwhile."""
        if self.trace is not None:
            self.trace.event(name, **attributes)

    def ended(self, generation: Generation) -> None:
        """The choice has ended."""
        if self.trace is not None:
            self.trace.ended(generation)


NOBODY = Asker()
_ASKER: ContextVar[Asker] = ContextVar("asker", default=NOBODY)


def current() -> Asker:
    """Who asks in this task."""
    return _ASKER.get()


@contextlib.contextmanager
def asking(meter: Meter | None = None, trace: Trace | None = None) -> Iterator[Asker]:
    """Somebody asks while the block lasts: who asks already, with this meter or trace added."""
    asker = current()
    asker = Asker(meter or asker.meter, trace or asker.trace)
    token = _ASKER.set(asker)
    try:
        yield asker
    finally:
        _ASKER.reset(token)
