"""Arrangements of an emulated cluster for several users at a time: what `pipeinfer plan --clients`
prints.

The planner's judge estimates plain decoding; how much speculation adds depends on the text, and
with many users it adds little. Knows no command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import Profiles
from pipeinfer.emulation.wide import WideExperiment
from pipeinfer.errors import PlanError
from pipeinfer.planning.grids import even_grid, shape
from pipeinfer.planning.judge import LoadMix, tokens_per_second
from pipeinfer.text_table import aligned


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An arrangement. options: of `serve`. speeds: tokens/s of all users together, for each of the
    numbers of users."""

    name: str
    options: str
    speeds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """users: the numbers of users at a time that are compared."""

    cluster: str
    pair: str
    nodes: int
    users: tuple[int, ...]
    rows: tuple[Choice, ...]

    def best(self, column: int) -> Choice:
        """The fastest arrangement for a number of users."""
        return max(self.rows, key=lambda row: row.speeds[column])


def compare(profiles: Profiles, base: WideExperiment, clients: int) -> Choices:
    """Compare one host, a copy on each host, a pipeline, and grids, for 1 and for `clients` users.

    base: gives cluster, pair, number of nodes and link. Raises PlanError if nothing fits.
    """
    count = base.nodes or len(profiles.cluster(base.cluster).nodes)
    base = dataclasses.replace(base, nodes=count, policy="iterative", widths=())
    cluster = wide.cluster_of(wide.ground_of(profiles, base), base)
    users, rows = tuple(sorted({1, clients})), list[Choice]()

    def add(widths: tuple[int, ...], name: str, options: str, copies: int = 1) -> None:
        with contextlib.suppress(PlanError):
            made = even_grid(cluster, widths).arrangement
            # the fullest copy has the most users; with fewer users than copies some are idle
            shared = [(-(-n // copies), min(n, copies)) for n in users]
            rows.append(Choice(name, options, tuple(
                busy * tokens_per_second(made, LoadMix(streams=each)) for each, busy in shared)))

    add((1,), "one host", "")
    add((1,), f"a copy on each of {count} hosts", "behind a router", count)
    add((1,) * count, f"pipeline {shape((1,) * count)}", "--head-stage")
    for width in cluster.cut.widths(count):
        if width > 1:
            widths = (width,) * (count // width)
            add(widths, f"grid {shape(widths)}", f"--grid {shape(widths)}")
    if not rows:
        raise PlanError(f"{count} hosts of {base.cluster} do not hold the model")
    return Choices(base.cluster, base.pair, count, users, tuple(rows))


def as_text(found: Choices) -> str:
    """For people, without a final newline."""
    heads = ["arrangement", *(f"{n} user{'s' * (n > 1)}" for n in found.users), "options"]
    cells = [[row.name, *(f"{speed:.1f}" for speed in row.speeds), row.options]
             for row in found.rows]
    lines = [f"{found.pair} on {found.nodes} nodes of cluster {found.cluster}: tokens/s of all "
             "users together, plain decoding, as judged", "", *aligned([heads, *cells]), ""]
    for column, n in enumerate(found.users):
        lines.append(f"for {n} user{'s' * (n > 1)}: {found.best(column).name}")
    if len(found.users) > 1:
        lines.append(f"for both alike, as `serve --parallel {found.users[-1]}` plans: "
                     f"{max(found.rows, key=lambda row: math.prod(row.speeds)).name}")
    return "\n".join(lines)


def as_data(found: Choices) -> dict[str, Any]:
    """For --json."""
    return dataclasses.asdict(found)
