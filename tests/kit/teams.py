"""Teams of the members of one stage, all in this process: by shared memory or by messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeinfer.backends.llamacpp.eval_callback import compiled
from pipeinfer.backends.team import Region, SharedTeam, TeamShape
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.transport.inproc import local_ports

needs_c = pytest.mark.skipif(compiled() is None, reason="sums.c was not compiled here")
WAYS = [pytest.param("memory", marks=needs_c), "messages"]


def teams_of(way: str, holders: tuple[tuple[int, ...], ...], kind: str = "f32",
             capacity: int = 64, vocabulary: tuple[tuple[int, int], ...] = (),
             watch: Callable[[int], None] = lambda index: None) -> list[Any]:
    """A team for each member; `holders` has the slices of each."""
    shapes = [TeamShape(holders, member, kind, capacity, vocabulary)
              for member in range(len(holders))]
    if way == "memory":
        regions = [Region.create(shapes[0])]
        regions += [Region.open(regions[0].name, shape) for shape in shapes[1:]]
        return [SharedTeam(shape, region, watch)
                for shape, region in zip(shapes, regions, strict=True)]
    ports = local_ports(len(holders) + 1)
    return [PortTeam(shape, port, range(1, len(holders) + 1), watch)
            for shape, port in zip(shapes, ports[1:], strict=True)]
