"""Checks the links of a new assignment before it gets requests: one message passes through all
of its stages, so that a cut link is found before a client's stream depends on it."""

from __future__ import annotations

import time

from pipeinfer.core.control import Standing
from pipeinfer.core.grid import Grid
from pipeinfer.errors import LinkCut, TransportTimeout
from pipeinfer.runtime.head import take_result
from pipeinfer.runtime.link_watch import UNDER_WAY, LinkWatch
from pipeinfer.transport.base import Port

_PATIENCE = 10.0  #: most seconds for the message: nothing is computed


def greet(port: Port, grid: Grid, timeout: float) -> None:
    """Send a message through all stages and wait until every node has received it.

    timeout: seconds.
    Raises LinkCut, TransportTimeout, and what `take_result` raises.
    """
    watch, began = LinkWatch(port, grid, min(_PATIENCE, UNDER_WAY * timeout)), time.monotonic()
    watch.greet()
    while not watch.all_reached:
        envelope = take_result(port)
        if envelope is not None:
            if isinstance(envelope.message, Standing):
                watch.hear(envelope.message)
            continue
        seconds = time.monotonic() - began
        if (link := watch.turn()) is not None:
            source, target = map(port.rank_of, link)
            raise LinkCut(source, target, seconds)
        if seconds > timeout:
            missing = port.rank_of(watch.first_missing or 0)
            raise TransportTimeout(rank=0, peer=missing, tag="Standing",
                                   run_id=None, seconds=timeout)
        port.wait(0.2)
