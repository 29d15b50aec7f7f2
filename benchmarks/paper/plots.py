"""What figures share: policies compared over several texts, panels, bars, legends.

A figure names its experiments, then draws itself from their results; it says what the paper
reports and what came out. Speeds are means over texts, spreads one standard deviation. Nothing
here decides how a run goes.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks import pictures
from benchmarks.paper.results import Job, Store, profiles
from pipeinfer.emulation.scenarios import Experiment, synchronous_grid
from pipeinfer_lab.commands import bench

mpl.use("Agg")
from matplotlib import pyplot as plt

POLICIES = tuple(bench.LABELS)
COLOUR = {"iterative": "#7a8594", bench.BASELINE: "#e3a857", "speculative": "#c2601c",
          "published": "#3f9c74", "pipeinfer": "#2563c9"}
NAME = {"iterative": "iterative", bench.BASELINE: "synchronous, as published",
        "speculative": "synchronous, best of grid", "published": "PipeInfer, as published",
        "pipeinfer": "PipeInfer"}
MARK = {"iterative": "s", bench.BASELINE: "v", "speculative": "^", "published": "D",
        "pipeinfer": "o"}
TABLE_I = ("dolphin-tinyllama", "dolphin-orca2", "goliath-xwin7b", "goliath-xwin13b", "falcon-7b",
           "falcon-40b")
SMALL = ("dolphin-tinyllama", "goliath-xwin7b", "falcon-7b")
TABLE_III = ("dolphin-tinyllama-gpu", "dolphin-orca2-gpu", "senku-tinyllama", "senku-longorca",
             "dolphin29-8b", "qwen-7b", "mixtral-mistral", "yi-9b")
CLUSTERS = (("a", 4), ("a", 8), ("b", 13))

#: what the paper reports, in the picture itself
PAPER = {
    "speed": "iterative and synchronous essentially constant with nodes; PipeInfer fastest in "
             "every case, Goliath at 8 nodes",
    "gain": "1.5 to 2.15 times synchronous speculation (shaded), up to 1.7 well aligned, 2.15 "
            "poorly",
    "ttft": "PipeInfer near parity with iterative, synchronous far slower",
    "ablations-published": "slower without cancellation, severely without continuous (Falcon "
                           "moderately)",
}

mpl.rcParams.update({
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e3e6ea", "axes.axisbelow": True, "axes.titlesize": 10.5, "figure.dpi": 110,
    "savefig.dpi": 110, "legend.frameon": False,
})


@dataclass(frozen=True, slots=True)
class Size:
    """How much to run."""

    seeds: int = 10
    tokens: int = 512
    quick: bool = False

    @property
    def few(self) -> int:
        """Seeds of the sweeps."""
        return min(3, self.seeds)

    def thin(self, values: Sequence[Any]) -> list[Any]:
        """All of them, or the first and the last."""
        return [values[0], values[-1]] if self.quick and len(values) > 2 else list(values)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    figure: str
    case: str
    policy: str
    metric: str
    mean: float
    spread: float = 0.0
    n: int = 1


@dataclass(slots=True)
class Drawn:
    """What a figure came to: pictures with captions, sentences, rows, aims (what, met)."""

    pictures: list[tuple[Path, str]] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    aims: list[tuple[str, str, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figure:
    """paper: what the paper says. needs: its experiments. draw: with their results."""

    name: str
    title: str
    paper: str
    needs: Callable[[Size], Iterable[Job]]
    draw: Callable[[Store, Size, Path], Drawn]
    note: str = ""


# --- several policies and texts ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stat:
    """One configuration over its texts."""

    experiment: Experiment
    records: tuple[dict[str, Any], ...]

    def mean(self, metric: str = "tokens_per_second") -> float:
        return statistics.fmean(record[metric] for record in self.records)

    def spread(self, metric: str = "tokens_per_second") -> float:
        values = [record[metric] for record in self.records]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def memory(self) -> float:
        """GiB per node, the mean."""
        return statistics.fmean(self.records[0]["memory"]) / 2**30


def base(cluster: str, pair: str, size: Size, **more: Any) -> Experiment:
    return Experiment(cluster=cluster, pair=pair, tokens=more.pop("tokens", size.tokens), **more)


def texts(experiment: Experiment, seeds: int) -> list[Experiment]:
    if experiment.policy == "iterative":
        return [experiment]  # its times do not depend on the text
    return [dataclasses.replace(experiment, prompt_seed=seed) for seed in range(seeds)]


def plain(experiment: Experiment, policy: str) -> Experiment:
    """The experiment under a baseline: nothing switched off, nothing tuned or pinned."""
    cleared = dataclasses.replace(experiment, ablate=(), limits=(), adapt=True)
    return bench.as_policy(cleared, policy)


def options(experiment: Experiment, policy: str) -> list[Experiment]:
    """What the policy is the best of."""
    if policy == "speculative":
        return synchronous_grid(plain(experiment, "iterative"))
    return [experiment if policy == "pipeinfer" else plain(experiment, policy)]


def compared(experiment: Experiment, seeds: int, policies: Sequence[str] = POLICIES) -> list[Job]:
    """All runs of a comparison."""
    return [Job(run) for policy in policies for option in options(experiment, policy)
            for run in texts(option, seeds)]


def stat(store: Store, experiment: Experiment, seeds: int) -> Stat | None:
    """None when the model does not fit."""
    records = tuple(store.get(one) for one in texts(experiment, seeds))
    return None if any("error" in record for record in records) else Stat(experiment, records)


def compare(store: Store, experiment: Experiment, seeds: int,
            policies: Sequence[str] = POLICIES) -> dict[str, Stat]:
    """The policies that fit."""
    found = {}
    for policy in policies:
        stats = [stat(store, option, seeds) for option in options(experiment, policy)]
        there = [one for one in stats if one is not None]
        if there:
            found[policy] = max(there, key=Stat.mean)
    return found


def rows_of(figure: str, case: str, stats: dict[str, Stat],
            metrics: Sequence[str] = ("tokens_per_second",)) -> list[Row]:
    """Rows of a comparison, with the gains over both baselines and iterative."""
    rows = [Row(figure, case, policy, metric, one.mean(metric), one.spread(metric),
                len(one.records))
            for policy, one in stats.items() for metric in metrics]
    if "pipeinfer" in stats and "tokens_per_second" in metrics:
        own = stats["pipeinfer"].mean()
        rows += [Row(figure, case, "pipeinfer", f"gain over {policy}", own / one.mean())
                 for policy, one in stats.items() if policy != "pipeinfer"]
    return rows


def title_of(pair: str) -> str:
    profile = profiles().pair(pair)
    name = profile.title.replace(" (GPU)", "")
    return f"{name}\n{profile.acceptance:.0%} accepted{' (assumed)' if profile.assumed else ''}"


def panels(count: int, width: float = 3.7, height: float = 2.9, most: int = 3, **more: Any
           ) -> tuple[Any, list[Any]]:
    columns = min(most, count)
    lines = -(-count // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(width * columns, 0.6 + height * lines),
                                layout="constrained", squeeze=False, **more)
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def save(figure: Any, out: Path, name: str, caption: str, drawn: Drawn) -> None:
    path = out / f"{name}.png"
    if name in PAPER:
        figure.supxlabel(f"the paper: {PAPER[name]}", fontsize=8.5, color="#4a5a70")
    pictures.save(figure, path, mpl.rcParams["savefig.dpi"])
    plt.close(figure)
    drawn.pictures.append((path, caption))


def legend(figure: Any, policies: Sequence[str] = POLICIES, extra: Sequence[Any] = ()) -> None:
    handles = [plt.Line2D([], [], color=COLOUR[p], marker=MARK[p], label=NAME[p])
               for p in policies]
    figure.legend(handles=[*handles, *extra], loc="outside upper center",
                  ncols=min(4, len(handles) + len(extra)))


def band(axis: Any, low: float, high: float, text: str = "") -> None:
    axis.axhspan(low, high, color="#2563c9", alpha=0.11, lw=0)
    if text:
        axis.text(0.99, low, text, transform=axis.get_yaxis_transform(), va="bottom", ha="right",
                  fontsize=8, color="#2f4d80")


def from_to(values: Iterable[float]) -> str:
    values = list(values)
    low, high = min(values), max(values)
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
