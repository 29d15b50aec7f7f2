"""Trees of guesses, and merged trees of two drafts, under the two policies of the papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.plots import (
    COLOUR,
    MARK,
    NAME,
    SMALL,
    Drawn,
    Row,
    Size,
    Stat,
    base,
    from_to,
    legend,
    panels,
    plt,
    save,
    stat,
    texts,
    title_of,
)
from benchmarks.paper.results import Job, Store
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer_lab.commands import bench
from pipeinfer_lab.two_drafts import TwoDrafts

PATHS = (1, 2, 4)
SECOND = {"dolphin-tinyllama": "dolphin-orca2", "goliath-xwin7b": "goliath-xwin13b",
          "falcon-7b": "falcon-40b"}
#: tokens of a micro-batch of PipeInfer, and of a synchronous tree: the papers', and twice as many
SIZES = {"the paper's size": (3, 4), "twice the size": (6, 8)}
PAIRED = ("published", bench.BASELINE)


def cases(pair: str, size: Size) -> dict[tuple[str, str, int, bool], Experiment]:
    """The runs of a pair, by policy, size, paths, and whether a second draft's tree is merged.

    A further path needs the cutoff of the paper, 0.1, as any token does.
    """
    found = {}
    for policy in PAIRED:
        for name, (batch, tree) in SIZES.items():
            for paths in PATHS:
                one = bench.as_policy(base("c", pair, size, nodes=8), policy)
                limits = dict(one.limits) | {"branches": paths}
                limits |= {"draft_max": batch} if policy == "published" else {
                    "tree_max": tree, "p_split": 0.1}
                one = dataclasses.replace(one, limits=tuple(limits.items()))
                found[policy, name, paths, False] = one
                if paths > 1 and name == next(iter(SIZES)):
                    found[policy, name, paths, True] = TwoDrafts(
                        **dataclasses.asdict(one), second=SECOND[pair])
    return found


def tree_needs(size: Size) -> list[Job]:
    return [Job(run) for pair in size.thin(SMALL) for one in cases(pair, size).values()
            for run in texts(one, size.few)]


def trees(store: Store, size: Size, out: Path) -> Drawn:
    drawn, pairs = Drawn(), size.thin(SMALL)
    figure, axes = panels(len(pairs))
    grid: dict[str, dict[tuple[str, str, int, bool], Stat]] = {}
    for axis, pair in zip(axes, pairs, strict=True):
        grid[pair] = {key: found for key, one in cases(pair, size).items()
                      if (found := stat(store, one, size.few)) is not None}
        for policy in PAIRED:
            for name, line in zip(SIZES, ("-", "--"), strict=True):
                there = [grid[pair][policy, name, paths, False] for paths in PATHS]
                axis.errorbar(range(len(PATHS)), [one.mean() for one in there],
                              [one.spread() for one in there], color=COLOUR[policy],
                              marker=MARK[policy], ls=line, ms=5, capsize=2, lw=1.6)
            both = {paths: one.mean() for (which, _, paths, second), one in grid[pair].items()
                    if second and which == policy}
            axis.plot([PATHS.index(paths) for paths in both], list(both.values()), ls=":", lw=1.6,
                      color=COLOUR[policy], marker="x")
        axis.set_xticks(range(len(PATHS)), ["chain", *(f"{n} paths" for n in PATHS[1:])])
        axis.set(title=title_of(pair), ylabel="tokens/s")
        axis.set_ylim(bottom=0)
        for (policy, name, paths, second), one in grid[pair].items():
            what = f"c 8 nodes {pair}, {name}, {paths} paths" + ", two drafts" * second
            drawn.rows += [Row("trees", what, policy, metric, one.mean(metric), one.spread(metric),
                               len(one.records))
                           for metric in ("tokens_per_second", "issued_speculative",
                                          "accepted_speculative", "rows", "itl_mean")]
    legend(figure, PAIRED, [plt.Line2D([], [], color="#555", ls=line, marker=mark, label=label)
                            for line, mark, label in (("--", "", "twice the size"),
                                                      (":", "x", "trees of two drafts merged"))])
    save(figure, out, "trees", "Micro-batches of 3 and synchronous trees of 4 (the paper's sizes) "
         "as chains and as trees, cutoff 0.1 for every token; dashed: of 6 and 8; dotted: with the "
         "tree of a second, larger draft merged in, both drafts on the head. 8 nodes of cluster C.",
         drawn)
    _sentences(drawn, grid)
    return drawn


def _sentences(drawn: Drawn, grid: dict[str, dict[tuple[str, str, int, bool], Stat]]) -> None:
    def ratios(policy: str, name: str, paths: int, second: bool, metric: str = "tokens_per_second"
               ) -> Sequence[float]:
        """Over the chain of one draft, for each pair."""
        return [stats[policy, name, paths, second].mean(metric)
                / stats[policy, name, 1, False].mean(metric) for stats in grid.values()]

    paper = next(iter(SIZES))
    for policy in PAIRED:
        for name in SIZES:
            drawn.measured.append(f"{NAME[policy]}, {name}: " + ", ".join(
                f"{paths} paths {from_to(ratios(policy, name, paths, False))}"
                for paths in PATHS[1:]) + " times the speed of its chains (rows "
                + ", ".join(from_to(ratios(policy, name, paths, False, "rows"))
                            for paths in PATHS[1:]) + " times).")
        drawn.measured.append(f"{NAME[policy]}, trees of two drafts merged: " + ", ".join(
            f"{paths} paths {from_to(ratios(policy, paper, paths, True))}" for paths in PATHS[1:])
            + " times the speed of the chains of its own draft.")
    for paths in PATHS:
        over = [stats["published", paper, paths, False].mean()
                / stats[bench.BASELINE, paper, paths, False].mean() for stats in grid.values()]
        drawn.measured.append(f"{NAME['published']}, over {NAME[bench.BASELINE]}, both with "
                              f"{'chains' if paths == 1 else f'{paths} paths'}: {from_to(over)} "
                              "times as fast.")
    best = [max(one.mean() for (policy, *_), one in stats.items() if policy == "published")
            / max(one.mean() for (policy, *_), one in stats.items() if policy == bench.BASELINE)
            for stats in grid.values()]
    drawn.measured.append(f"Each at its best of all these: {from_to(best)} times.")
