"""The head asks all nodes how far they are when nothing comes back, and finds a link that is cut.

A cut link silences every stage behind it, and soon those before it, as the head sends nothing more:
no deadline of a single rank can tell them apart. Knows no runs and no ranks.
"""

from __future__ import annotations

import time

from pipeinfer.core.control import RollCall, Standing
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Tag
from pipeinfer.planning.links import cut_link
from pipeinfer.transport.base import Port

UNDER_WAY = 0.25  #: of --timeout: what comes later between stages counts as lost
_ROUNDS = 4  #: in the time for which something must have been under way


class LinkWatch:
    """One look at the links of an epoch. patience: seconds for which something must have been under
    way to count as lost."""

    def __init__(self, port: Port, grid: Grid, patience: float) -> None:
        self.patience = patience
        self._port, self._grid = port, grid
        self._reached: set[int] = set()
        self._standings: dict[int, Standing] = {}
        self._found: tuple[int, int] | None = None
        self._asked: float | None = None
        self._number = 0

    @property
    def first_missing(self) -> int | None:
        """The first node that no transaction has got to."""
        return next((node for node in range(1, self._grid.n_nodes + 1)
                     if node not in self._reached), None)

    @property
    def all_reached(self) -> bool:
        """Whether a transaction has got to every node."""
        return self.first_missing is None

    def greet(self) -> None:
        """Send the question through the pipeline, as a transaction."""
        self._asked = time.monotonic()
        for node in self._grid.successors(0):
            self._port.send(node, Tag.TRANSACTION, RollCall(self._number))

    def hear(self, standing: Standing) -> None:
        """What a node answers."""
        if (node := self._grid.node(standing.port)) is not None:
            if standing.number == self._number:  # not an answer that was long on its way
                self._standings[node] = standing
            if standing.received:
                self._reached.add(node)

    def rest(self) -> None:
        """Something has come back: what was found out is void."""
        if self._asked is not None:
            self._standings, self._found, self._asked = {}, None, None

    def turn(self) -> tuple[int, int] | None:
        """To be called while nothing comes: asks now and then, and gives the two nodes of a cut
        link once two rounds of answers agree."""
        now = time.monotonic()
        if self._asked is not None and now - self._asked < self.patience / _ROUNDS:
            return None
        found = cut_link(self._grid, self._standings, self.patience)
        agreed = found if found == self._found else None
        self._found, self._standings, self._asked = found, {}, now
        self._number += 1
        for node in range(1, self._grid.n_nodes + 1):
            self._port.send(node, Tag.CANCEL, RollCall(self._number))
        return agreed
