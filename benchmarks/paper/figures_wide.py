"""Every policy on the best grid of wide stages, beside the same on the pipeline."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from matplotlib.patches import Patch

from benchmarks.paper.plots import (
    COLOUR,
    NAME,
    POLICIES,
    SMALL,
    Drawn,
    Size,
    Stat,
    base,
    compare,
    compared,
    from_to,
    panels,
    rows_of,
    save,
    stat,
    texts,
    title_of,
)
from benchmarks.paper.results import Job, Store, profiles
from pipeinfer.core.policy import Policy
from pipeinfer.emulation import wide
from pipeinfer.emulation.wide import WideExperiment
from pipeinfer.errors import PlanError
from pipeinfer.forecast import grids

GROUNDS = (("c", 4, "f32"), ("c", 8, "f32"), ("c", 32, "f32"), ("a", 8, "f16"))


def _grounds(size: Size) -> list[tuple[str, int, str]]:
    return size.thin(GROUNDS)


@cache
def _grid(cluster: str, nodes: int, kind: str, pair: str, tokens: int) -> WideExperiment | None:
    """PipeInfer's best grid, fixed for all policies; None where the model cannot be sliced."""
    asked = WideExperiment(cluster, pair, nodes=nodes, tokens=tokens, sum_type=kind)
    try:
        found = grids.candidates(profiles(), asked, 1)
    except PlanError:
        return None
    if not found:
        return None
    one, chosen = found[0]
    return dataclasses.replace(one, widths=chosen.widths)


def _alone(one: WideExperiment) -> list[WideExperiment]:
    """Tensor parallelism alone, without a guess: one stage of all nodes, or of as many as it can
    be cut for."""
    ground = wide.ground_of(profiles(), one)
    widths = wide.cluster_of(ground, dataclasses.replace(
        one, policy=Policy.ITERATIVE.value)).cut.widths(one.nodes)
    return [dataclasses.replace(one, policy=Policy.ITERATIVE.value, widths=(width,))
            for width in widths if width > 1]


def wide_needs(size: Size) -> list[Job]:
    jobs = []
    for cluster, nodes, kind in _grounds(size):
        for pair in size.thin(SMALL):
            jobs += compared(base(cluster, pair, size, nodes=nodes), size.few)
            grid = _grid(cluster, nodes, kind, pair, size.tokens)
            if grid is not None:
                jobs += compared(grid, size.few)
                jobs += [Job(run) for one in _alone(grid) for run in texts(one, 1)]
    return jobs


def on_grids(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    pairs, grounds = size.thin(SMALL), _grounds(size)
    figure, axes = panels(len(grounds) * len(pairs), width=4.2, height=2.9)
    gains: dict[str, list[float]] = {}
    for axis, (pair, (cluster, nodes, kind)) in zip(
            axes, ((p, g) for g in grounds for p in pairs), strict=True):
        plain = compare(store, base(cluster, pair, size, nodes=nodes), size.few)
        grid = _grid(cluster, nodes, kind, pair, size.tokens)
        on_grid: dict[str, Stat] = {} if grid is None else compare(store, grid, size.few)
        if grid is not None:
            alone = [found for one in _alone(grid) if (found := stat(store, one, 1)) is not None]
            on_grid["iterative"] = max([on_grid["iterative"], *alone], key=Stat.mean)
        case = f"{cluster} {nodes} nodes {pair}"
        shape = "none" if grid is None else \
            f"{wide.plan(profiles(), grid).name}, head {grid.head}"
        for offset, stats, hatch in ((0, plain, ""), (0.42, on_grid, "///")):
            for k, policy in enumerate(POLICIES):
                if policy in stats:
                    axis.bar(k + offset, stats[policy].mean(), 0.4, color=COLOUR[policy],
                             hatch=hatch, edgecolor="white", yerr=stats[policy].spread(),
                             capsize=2)
        axis.set_xticks([])
        axis.grid(axis="x", visible=False)
        axis.set_title(f"{title_of(pair)}\n{cluster.upper()}, {nodes} nodes; grid {shape}",
                       fontsize=9)
        axis.set_ylabel("tokens/s")
        drawn.rows += rows_of("wide", f"{case} pipeline", plain)
        drawn.rows += rows_of("wide", f"{case} grid {shape}", on_grid)
        for policy, one in on_grid.items():
            gains.setdefault(policy, []).append(one.mean() / plain["iterative"].mean())
        if on_grid:
            drawn.measured.append(
                f"{case}, grid {shape}, times the plain pipeline: "
                + ", ".join(f"{NAME[p]} {one.mean() / plain['iterative'].mean():.2f}"
                            for p, one in on_grid.items())
                + "; on the pipeline " + ", ".join(
                    f"{NAME[p]} {one.mean() / plain['iterative'].mean():.2f}"
                    for p, one in plain.items() if p != "iterative") + ".")
    drawn.measured += [f"{NAME[policy]} on grids: {from_to(found)} times the plain pipeline."
                       for policy, found in gains.items()]
    figure.legend(handles=[*(Patch(color=COLOUR[p], label=NAME[p]) for p in POLICIES),
                           Patch(facecolor="#888", hatch="///", edgecolor="white",
                                 label="on the grid (else: pipeline)")],
                  loc="outside upper center", ncols=3, fontsize=9)
    save(figure, out, "wide", "Every policy on the pipeline and on PipeInfer's best grid of wide "
         "stages, which is the same for all of them; iterative on the grid: the better of that and "
         "one stage of as many nodes as the model can be cut for.", drawn)
    return drawn
