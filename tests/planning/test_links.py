"""Which link counts as cut, and who is left out."""

from __future__ import annotations

import pytest

from pipeinfer.core.control import PortName, Standing
from pipeinfer.core.grid import Grid
from pipeinfer.planning.replan import cut_link, left_out

PLAIN, WIDE = (1, 1, 1, 1), (2, 2)


@pytest.mark.parametrize(("widths", "told", "link"), [
    (PLAIN, {1: (9, 8), 2: (9, 7), 3: (9, 6), 4: (9, 5)}, None),
    (PLAIN, {1: (9, 8), 2: (7, 7), 3: (7, 6), 4: (7, 5)}, (1, 2)),
    (PLAIN, {1: (9, 8), 2: (9, 7), 3: (9, 6), 4: (3, 9)}, (3, 4)),
    (PLAIN, {1: (9, 8), 2: (7, 9), 3: (5, 9), 4: (5, 9)}, (1, 2)),  # two are cut: one at a time
    (PLAIN, {1: (9, 3), 2: (7, 9), 3: (7, 9), 4: (7, 9)}, None),  # it may still be under way
    (PLAIN, {1: (9, 8), 2: (7, 3), 3: (7, 9), 4: (7, 9)}, None),  # more is coming
    (PLAIN, {1: (9, 8), 2: (7, 0), 3: (7, 9), 4: (7, 9)}, None),  # it computes
    (PLAIN, {1: (9, 8), 3: (7, 9), 4: (7, 9)}, None),  # it does not answer
    (PLAIN, {2: (9, 8), 3: (7, 9), 4: (7, 9)}, (2, 3)),
    (PLAIN, {2: (9, 9), 4: (3, 9)}, None),
    (PLAIN, {}, None),
    (WIDE, {1: (9, 8), 2: (9, 8), 3: (9, 8), 4: (8, 8)}, (2, 4)),
    (WIDE, {1: (9, 8), 2: (8, 8), 3: (9, 8), 4: (8, 8)}, None),  # of members others tell
])
def test_the_first_link_over_which_something_was_lost(widths, told, link):
    grid = Grid(widths)
    standings = {node: Standing(grid.name(node), 0, *said) for node, said in told.items()}
    assert cut_link(grid, standings, 4.0) == link


def test_a_stage_has_received_no_more_than_the_one_before_sent():
    standings = {node: Standing(PortName(node), 0, node, 9.0) for node in (1, 2, 3, 4)}
    assert cut_link(Grid(PLAIN), standings, 4.0) is None


@pytest.mark.parametrize(("source", "waits", "earlier", "rank"), [
    (1, 2, (), 2), (2, 3, (1,), 3),
    (1, 3, (1,), 1),  # it can send to nobody
    (2, 0, (), 2), (0, 2, (), 2), (0, 2, (0,), 2)])  # rank 0 has a stage, and stays
def test_who_is_left_out(source, waits, earlier, rank):
    assert left_out(source, waits, earlier) == rank
