"""Grids of an emulated cluster beside each other: what `pipeinfer plan --grids` prints.

Every speed comes from the real scheduler in virtual time. Each table has the plain pipeline and
tensor parallelism alone (one stage of all nodes, no guesses) in it, and for each grid all policies,
synchronous speculation with the best of a few trees. Knows no command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeinfer.core.policy import PRACTICAL, Policy
from pipeinfer.emulation import scenarios, wide
from pipeinfer.emulation.profiles import Profiles
from pipeinfer.emulation.scenarios import Built, Experiment
from pipeinfer.emulation.virtual import Result
from pipeinfer.emulation.wide import APART, BESIDE, TURNS, WideExperiment
from pipeinfer.errors import PlanError
from pipeinfer.forecast.placing import ERROR, PARTS, around, places, safe
from pipeinfer.planning.grids import GridPlan
from pipeinfer.planning.grids import shape as name_of
from pipeinfer.text_table import aligned

MOST = 6  #: grids in a table, by what the planner thinks of them
PLAIN, ALONE = "plain pipeline", "tensor parallel alone"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. Speeds in tokens/s, None where there is none; over: the fastest of them
    over plain decoding on the plain pipeline; memory: bytes of the fullest member; prompt: seconds
    until the prompt's own token, with the fastest policy; sums: seconds of a token in sums; tree:
    of the best synchronous speculation."""

    grid: str
    head: str
    iterative: float | None
    synchronous: float | None
    asynchronous: float | None
    over: float
    memory: float
    prompt: float
    sums: float = 0.0
    tree: int = 0
    what: str = ""

    @property
    def best(self) -> float:
        """The fastest policy's speed."""
        return max(self.iterative or 0.0, self.synchronous or 0.0, self.asynchronous or 0.0)


@dataclass(frozen=True, slots=True)
class Table:
    """For one pair on so many nodes of a cluster. why: the planner's words on the first grid. safe:
    the grid, with the head's place, that is no slower than plain decoding if the acceptance is
    `ERROR` lower (`placing.safe`)."""

    cluster: str
    pair: str
    nodes: int
    sum_type: str
    exchange: float
    rows: tuple[Row, ...]
    why: str
    safe: str = ""

    @property
    def best(self) -> Row:
        """The fastest grid."""
        return max((row for row in self.rows if not row.what), key=lambda row: row.best)


def compare(profiles: Profiles, base: WideExperiment, most: int = MOST, seeds: int = 1) -> Table:
    """The table for an experiment's cluster, pair, number of nodes and kind of sums; its policy,
    widths and head are of no account. seeds: texts whose speeds are averaged. Raises UsageError and
    PlanError."""
    count = base.nodes or len(profiles.cluster(base.cluster).nodes)
    base = dataclasses.replace(base, nodes=count)
    plain = _plain(profiles, base, seeds)
    assert plain.iterative is not None
    rows = [plain, _alone(profiles, base, plain.iterative, seeds)]
    plans = candidates(profiles, base, most)
    rows += [_grid(profiles, experiment, grid, plain.iterative, seeds)
             for experiment, grid in plans]
    rows[2:] = sorted(rows[2:], key=lambda row: -row.best)
    why = next((f"{_options(experiment, grid)}: {grid.why()}" for experiment, grid in plans
                if (grid.name, _head(experiment)) == (rows[2].grid, rows[2].head)), "")
    right = profiles.pair(base.pair).acceptance if base.acceptance is None else base.acceptance
    careful = safe(places(profiles, dataclasses.replace(base, widths=()), around(right)), right)
    return Table(base.cluster, base.pair, count, base.sum_type, base.exchange, tuple(rows), why,
                 careful.name)


def candidates(profiles: Profiles, base: WideExperiment, most: int
               ) -> list[tuple[WideExperiment, GridPlan]]:
    """The fastest grids of those that the planner thinks most of, with the head apart, beside a
    member (of those the best part only), and by turns with the only stage."""
    judged: list[tuple[WideExperiment, GridPlan]] = []
    for head, part in ((APART, wide.PART), *((BESIDE, part) for part in PARTS)):
        if head == APART and base.nodes < 2:
            continue
        experiment = dataclasses.replace(base, policy=Policy.PIPEINFER.value, head=head, part=part,
                                         widths=())
        best = wide.plan(profiles, experiment)
        for widths in dict.fromkeys([best.widths, *_regular(base.nodes - (head == APART))]):
            one = dataclasses.replace(experiment, widths=widths)
            try:
                grid = wide.plan(profiles, one) if widths != best.widths else best
            except PlanError:
                continue
            judged.append((one, grid))
    judged.sort(key=lambda entry: -entry[1].tokens)
    judged[3 * most:] = []
    turns = dataclasses.replace(base, policy=Policy.PIPEINFER.value, head=TURNS, widths=())
    for width in range(base.nodes // 2 + 1, base.nodes + 1):  # leaving out fewer than they take
        one = dataclasses.replace(turns, widths=(width,))
        with contextlib.suppress(PlanError):
            judged.append((one, wide.plan(profiles, one)))
    found: dict[tuple[str, tuple[int, ...]], tuple[float, WideExperiment, GridPlan]] = {}
    for one, grid in judged:
        speed = wide.run(profiles, one)[1].tokens_per_second
        key = (one.head, grid.widths)
        if key not in found or speed > found[key][0]:
            found[key] = (speed, one, grid)
    ranked = sorted(found.values(), key=lambda entry: -entry[0])
    return [(one, grid) for _, one, grid in ranked[:most]]


def _regular(count: int) -> list[tuple[int, ...]]:
    """All S x W that leave fewer than W of so many nodes over; W at least 2."""
    return [(width,) * (count // width) for width in range(2, count + 1)]


@dataclass(frozen=True, slots=True)
class _Mean:
    """Over several texts: tokens per second, seconds until the prompt's own token; memory of the
    fullest member."""

    speed: float
    prompt: float
    memory: float


def _mean(run: Callable[[Profiles, Any], tuple[Built, Result]], profiles: Profiles,
          experiment: Any, seeds: int) -> _Mean:
    """Tokens of all texts over the seconds of all; no text twice."""
    found = [run(profiles, dataclasses.replace(experiment, prompt_seed=seed))
             for seed in range(seeds)]
    tokens = sum(len(result.times) - 1 for _, result in found)
    return _Mean(tokens / sum(result.seconds for _, result in found),
                 statistics.fmean(result.prompt_seconds for _, result in found),
                 max(found[0][0].memory))


def _plain(profiles: Profiles, base: WideExperiment, seeds: int) -> Row:
    """Counted as in the paper: the baselines spread layers over all nodes."""
    names = {field.name for field in dataclasses.fields(Experiment)}
    asked = Experiment(**{name: getattr(base, name) for name in names})
    speeds: dict[Policy, float] = {}
    tree, memory, prompt = 0, 0.0, 0.0
    for policy in PRACTICAL:
        for one, size in _trees(asked, policy):
            result = _mean(scenarios.run, profiles, one, seeds)
            if result.speed > speeds.get(policy, 0.0):
                speeds[policy] = result.speed
                memory, prompt = result.memory, result.prompt
                tree = size if policy is Policy.SPECULATIVE else tree
    return Row(f"{base.nodes - 1}x1", APART, speeds[Policy.ITERATIVE],
               speeds[Policy.SPECULATIVE], speeds[Policy.PIPEINFER],
               max(speeds.values()) / speeds[Policy.ITERATIVE], memory, prompt, tree=tree,
               what=PLAIN)


def _alone(profiles: Profiles, base: WideExperiment, plain: float, seeds: int) -> Row:
    """One stage of as many nodes as the model can be cut for, no guesses."""
    experiment = dataclasses.replace(base, policy=Policy.ITERATIVE.value)
    cluster = wide.cluster_of(wide.ground_of(profiles, experiment), experiment)
    result, best = None, experiment
    for width in cluster.cut.widths(base.nodes):
        one = dataclasses.replace(experiment, widths=(width,))
        try:
            found = _mean(wide.run, profiles, one, seeds)
        except PlanError:
            continue
        if result is None or found.speed > result.speed:
            result, best = found, one
    if result is None:
        raise PlanError("no single stage of these nodes holds the model")
    grid = wide.plan(profiles, best)
    return Row(grid.name, "", result.speed, None, None, result.speed / plain, result.memory,
               result.prompt, _sums(grid), what=ALONE)


def _grid(profiles: Profiles, experiment: WideExperiment, grid: GridPlan, plain: float, seeds: int
          ) -> Row:
    found: dict[Policy, tuple[float, _Mean, int]] = {}
    memory = 0.0
    for policy in PRACTICAL:
        for one, size in _trees(experiment, policy):
            result = _mean(wide.run, profiles, one, seeds)
            if policy not in found or result.speed > found[policy][0]:
                found[policy] = (result.speed, result, size)
            memory = max(memory, result.memory)
    speeds = {policy: entry[0] for policy, entry in found.items()}
    best = max(found.values(), key=lambda entry: entry[0])
    return Row(grid.name, _head(experiment), speeds[Policy.ITERATIVE],
               speeds[Policy.SPECULATIVE], speeds[Policy.PIPEINFER], best[0] / plain, memory,
               best[1].prompt, _sums(grid), found[Policy.SPECULATIVE][2])


def _trees(experiment: Any, policy: Policy) -> list[tuple[Any, int]]:
    """The experiment under a policy; of synchronous speculation one for each tree and cutoff."""
    if policy is not Policy.SPECULATIVE:
        return [(dataclasses.replace(experiment, policy=policy.value), 0)]
    return [(one, int(dict(one.limits)["tree_max"]))
            for one in scenarios.synchronous_grid(experiment)]


def _options(experiment: WideExperiment, grid: GridPlan) -> str:
    return f"{grid.options} --head-stage" if experiment.head == TURNS else grid.options


def _head(experiment: WideExperiment) -> str:
    return f"{BESIDE}, {experiment.part:.0%}" if experiment.head == BESIDE else experiment.head


def _sums(grid: GridPlan) -> float:
    return sum(stage.sums for stage in grid.arrangement.stages)


# --- print ------------------------------------------------------------------------------------

COLUMNS = ("grid", "head and draft", "iterative", "synchronous", "asynchronous", "over plain",
           "MB per member", "sums, ms", "prompt, s")


def cells(row: Row) -> list[str]:
    """A row as text, by `COLUMNS`."""
    def speed(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    name = f"{row.grid} ({row.what})" if row.what else row.grid
    return [name, row.head, speed(row.iterative), speed(row.synchronous), speed(row.asynchronous),
            f"{row.over:.2f}", f"{row.memory / 1e6:.0f}", f"{1e3 * row.sums:.1f}",
            f"{row.prompt:.1f}"]


def as_text(table: Table) -> str:
    """For people, without a final newline."""
    return "\n".join([
        f"{table.pair} on {table.nodes} nodes of cluster {table.cluster}, head and draft included; "
        f"sums in {table.sum_type}, {1e6 * table.exchange:.0f} us per exchange besides the link",
        "tokens/s in virtual time; over plain: the fastest policy over plain decoding on the "
        "plain pipeline", "", *aligned([COLUMNS, *map(cells, table.rows)]), "",
        *([table.why] if table.why else []),
        *([f"if the acceptance is known to {100 * ERROR:.0f} points only: {table.safe}, which is "
           "no slower than plain decoding, as judged"] if table.safe else [])])


def as_data(table: Table) -> dict[str, Any]:
    """For --json; sizes in bytes, times in seconds."""
    return dataclasses.asdict(table)


__all__ = ["ALONE", "COLUMNS", "PLAIN", "Row", "Table", "as_data", "as_text", "candidates", "cells",
           "compare", "name_of"]
