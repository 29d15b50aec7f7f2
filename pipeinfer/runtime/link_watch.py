"""Detection of a cut link between two stages.

A cut link stops every stage behind it, and soon also those before it, because the head issues
nothing more. So no deadline of a single rank can locate it. When no result arrives, the head
requests from every node how many messages it has received (the roll call), and compares the
answers. This module does not depend on runs or ranks.
"""

from __future__ import annotations

import time

from pipeinfer.core.control import RollCall, Standing
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Tag
from pipeinfer.planning.replan import cut_link
from pipeinfer.transport.base import Port

UNDER_WAY = 0.25  #: share of --timeout after which a message between stages counts as lost
_ROUNDS = 4  #: roll calls within `patience`


class LinkWatch:
    """The link detector of one epoch.

    grid: the nodes of the epoch.
    patience: seconds after which a message under way between two nodes counts as lost.
    """

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
        """The first node that no transaction has reached, or None."""
        return next((node for node in range(1, self._grid.n_nodes + 1)
                     if node not in self._reached), None)

    @property
    def all_reached(self) -> bool:
        """Whether a transaction has reached every node."""
        return self.first_missing is None

    def greet(self) -> None:
        """Send a roll call through the pipeline, as a transaction."""
        self._asked = time.monotonic()
        for node in self._grid.successors(0):
            self._port.send(node, Tag.TRANSACTION, RollCall(self._number))

    def hear(self, standing: Standing) -> None:
        """Store a node's answer."""
        if (node := self._grid.node(standing.port)) is not None:
            if standing.number == self._number:  # a delayed answer to an earlier call is outdated
                self._standings[node] = standing
            if standing.received:
                self._reached.add(node)

    def rest(self) -> None:
        """Discard all answers, because a result has arrived."""
        if self._asked is not None:
            self._standings, self._found, self._asked = {}, None, None

    def turn(self) -> tuple[int, int] | None:
        """Send the next roll call if one is due; return the nodes of a cut link, or None.

        Call it repeatedly while no result arrives. A link is returned once two successive rounds
        of answers agree on it.
        """
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
