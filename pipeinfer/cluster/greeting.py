"""Before a new arrangement gets requests, one message goes through all of its stages: a link that
is cut is found now, and not under somebody's stream."""

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
    """Until every node has got the message. Raises LinkCut, what `take_result` raises, and
    TransportTimeout after `timeout` seconds."""
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
            raise LinkCut(*link, seconds)
        if seconds > timeout:
            raise TransportTimeout(rank=0, peer=watch.first_missing, tag="Standing", run_id=None,
                                   seconds=timeout)
        port.wait(0.2)
