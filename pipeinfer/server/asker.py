"""The client of a request: what its API key has used.

There is one object per request, in the context of the task that answers it, so that its choices
find it when they are sent to the engine. It does not use HTTP.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeinfer.server.keys import Meter


class Asker:
    """The client of a request. meter: of its key, None if keys are not counted."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter

    @property
    def pool(self) -> int:
        """The number, from 1, of the group of answers from which prompt lookup may copy: those
        to the same key; without keys, all."""
        return 1 if self.meter is None else self.meter.number

    def used(self, tokens: int) -> None:
        """Count tokens of a prompt or of an answer."""
        if self.meter is not None:
            self.meter.used(tokens, time.monotonic())


_NO_CLIENT = Asker()
_ASKER: ContextVar[Asker] = ContextVar("asker", default=_NO_CLIENT)


def current() -> Asker:
    """Return the client of the request in this task."""
    return _ASKER.get()


@contextlib.contextmanager
def asking(meter: Meter) -> Iterator[Asker]:
    """Set the client of this task while the block lasts."""
    asker = Asker(meter)
    token = _ASKER.set(asker)
    try:
        yield asker
    finally:
        _ASKER.reset(token)
