"""Nodes, stages and members of a grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core.control import PortName
from pipeinfer.core.grid import Grid, deal, owner_of, parse_widths
from pipeinfer.errors import ProtocolError, UsageError

widths = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


@given(widths)
def test_every_node_has_one_name(counts):
    grid = Grid(counts)
    names = [grid.name(node) for node in range(1, grid.n_nodes + 1)]
    assert len(set(names)) == grid.n_nodes == sum(counts)
    assert grid.is_wide == (max(counts) > 1)
    assert [grid.node(name) for name in names] == list(range(1, grid.n_nodes + 1))
    assert [grid.leader(stage) for stage in range(grid.n_stages + 1)] == [0, *grid.leaders]
    assert [name.stage for name in names if name.member == 0] == list(range(1, len(counts) + 1))


@given(widths)
def test_every_member_gets_its_rows_from_one_node(counts):
    grid = Grid(counts)
    fed = [other for node in range(grid.n_nodes + 1) for other in grid.successors(node)]
    assert sorted(fed) == list(range(1, grid.n_nodes + 1))
    for node in range(grid.n_nodes + 1):
        assert all(grid.predecessor(other) == node for other in grid.successors(node))


def test_nodes_that_there_are_not():
    with pytest.raises(ProtocolError, match="no node 3 among 2"):
        Grid((2,)).name(3)
    assert Grid((2,)).node(PortName(1, 2)) is None
    assert Grid((2,)).node(PortName(2)) is None


@pytest.mark.parametrize(("text", "expected"), [
    ("2x4", (4, 4)), ("1X2", (2,)), ("4,3", (4, 3)), ("2,1", (2, 1)), ("3", (3,))])
def test_grids_as_people_write_them(text, expected):
    assert parse_widths(text) == expected


@pytest.mark.parametrize("text", ["", "x", "2x", "2x3x4", "0x2", "2x0", "1,0", "-1", "a", "2,,1"])
def test_what_is_no_grid_says_what_one_looks_like(text):
    with pytest.raises(UsageError, match="--grid"):
        parse_widths(text)


def test_slices_are_dealt_out_in_order():
    assert deal(5, 2) == ((0, 1, 2), (3, 4))
    assert deal(2, 2) == ((0,), (1,))
    assert owner_of(deal(5, 2), 3) == 1
    with pytest.raises(UsageError, match="--slices"):
        deal(1, 2)
    with pytest.raises(ProtocolError, match="holds slice 7"):
        owner_of(((0,), (1,)), 7)
