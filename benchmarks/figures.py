"""The experiments behind each figure, and how it is drawn.

A figure names its experiments, then draws itself from their results; it says what the paper
reports and what came out. Speeds are means over texts, spreads one standard deviation. Nothing
here decides how a run goes.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.results import Job, Store, profiles, traced
from pipeinfer import bench
from pipeinfer.controller import cutoff
from pipeinfer.emulation.scenarios import Experiment

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

POLICIES = ("iterative", "published", "speculative", "pipeinfer")
COLOUR = {"iterative": "#7a8594", "published": "#e3a857", "speculative": "#c2601c",
          "pipeinfer": "#2563c9"}
NAME = {"iterative": "iterative", "published": "synchronous, as published",
        "speculative": "synchronous, best of grid", "pipeinfer": "PipeInfer"}
MARK = {"iterative": "s", "published": "v", "speculative": "^", "pipeinfer": "o"}
BAND = "#2563c91c"
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
    "itl": "follows the generation speed",
    "memory": "PipeInfer as much memory as synchronous, iterative less; most speed per memory",
    "constrained": "greatest gains here; B over A: Dolphin marginally slower, Falcon much, "
                   "Goliath faster",
    "constrained-ttft": "PipeInfer in some cases below iterative",
    "ablations": "slower without cancellation, severely without continuous (Falcon moderately)",
    "ablations-itl": "longer without cancellation",
    "gpu": "faster than synchronous in all cases but one (Dolphin 2.9)",
    "prompts": "PipeInfer consistent from prompt to prompt, synchronous erratic",
    "cancellation": "cancellations travel backwards from stage to stage",
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
        return max(1, self.seeds // 3)

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
        return bench.synchronous_grid(plain(experiment, "iterative"))
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


def short(pair: str) -> str:
    return profiles().pair(pair).title.replace(" (GPU)", "").replace(" + ", "\n+ ")


def save(figure: Any, out: Path, name: str, caption: str, drawn: Drawn) -> None:
    path = out / f"{name}.png"
    if name in PAPER:
        figure.supxlabel(f"the paper: {PAPER[name]}", fontsize=8.5, color="#4a5a70")
    figure.savefig(path)
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


# --- Figs. 4 to 7a: cluster C -----------------------------------------------------------------


def _nodes(size: Size) -> list[int]:
    return [8, 32] if size.quick else [4, 8, 15, 32]


def _pairs(size: Size) -> list[str]:
    return size.thin(TABLE_I)


def nodes_needs(size: Size) -> list[Job]:
    return [job for pair in _pairs(size) for n in _nodes(size)
            for job in compared(base("c", pair, size, nodes=n), _seeds(n, size))]


def _seeds(nodes: int, size: Size) -> int:
    return size.seeds if nodes == 8 else size.few


def nodes_grid(store: Store, size: Size) -> dict[tuple[str, int], dict[str, Stat]]:
    return {(pair, n): compare(store, base("c", pair, size, nodes=n), _seeds(n, size))
            for pair in _pairs(size) for n in _nodes(size)}


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


def speed(store: Store, size: Size, out: Path) -> Drawn:
    drawn, grid = Drawn(), nodes_grid(store, size)
    figure, axes = panels(len(_pairs(size)))
    for axis, pair in zip(axes, _pairs(size), strict=True):
        _lines(axis, pair, grid, size, lambda one: (one.mean(), one.spread()))
        axis.set_ylim(bottom=0)
        axis.set_ylabel("tokens/s")
    legend(figure)
    save(figure, out, "speed", "Generation speed on cluster C, 512 tokens; bars: one standard "
         "deviation over texts.", drawn)
    figure, axes = panels(2, width=5.4, height=3.4)
    for axis, policy in zip(axes, ("published", "speculative"), strict=True):
        for pair, mark in zip(_pairs(size), "osv^Dx", strict=False):
            ratios = [grid[pair, n]["pipeinfer"].mean() / grid[pair, n][policy].mean()
                      for n in _nodes(size)]
            axis.plot(range(len(ratios)), ratios, marker=mark, ms=5,
                      label=profiles().pair(pair).title)
        band(axis, 1.5, 2.15, "paper: 1.5 to 2.15")
        axis.set_xticks(range(len(_nodes(size))), [str(n) for n in _nodes(size)])
        axis.set(xlabel="nodes", ylabel="times as fast", ylim=(0.8, None),
                 title=f"PipeInfer over {NAME[policy]}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  fontsize=9)
    save(figure, out, "gain", "The gain over synchronous speculation. Left: trees of 4, cutoff "
         "0.1, as published; right: the best of trees of 1, 2, 4, 8 and cutoffs 0, 0.4 for each "
         "point.", drawn)
    for (pair, n), stats in grid.items():
        drawn.rows += rows_of("speed", f"c {n} nodes {pair}", stats)
    for policy in ("published", "speculative", "iterative"):
        gains = {key: stats["pipeinfer"].mean() / stats[policy].mean()
                 for key, stats in grid.items()}
        drawn.measured.append(
            f"PipeInfer over {NAME[policy]}: {from_to(gains.values())} times as fast (8 nodes: "
            f"{from_to(v for (_, n), v in gains.items() if n == 8)}).")
    for policy in ("iterative", "speculative"):
        changes = [grid[pair, _nodes(size)[-1]][policy].mean()
                   / grid[pair, _nodes(size)[0]][policy].mean() for pair in _pairs(size)]
        drawn.measured.append(f"{NAME[policy].capitalize()} at {_nodes(size)[-1]} nodes runs at "
                              f"{from_to(changes)} of its speed at {_nodes(size)[0]}.")
    best = {pair: max(_nodes(size), key=lambda n, p=pair: grid[p, n]["pipeinfer"].mean())
            for pair in _pairs(size)}
    drawn.measured.append("PipeInfer is fastest at " + ", ".join(
        f"{n} nodes ({pair})" for pair, n in best.items()) + ".")
    settings = sorted({bench.setting_text(stats["speculative"].experiment)
                       for stats in grid.values()})
    drawn.measured.append(f"Best synchronous settings: {'; '.join(settings)}.")
    _aims(drawn, grid)
    return drawn


def _aims(drawn: Drawn, grid: dict[tuple[str, int], dict[str, Stat]]) -> None:
    def gain(pair: str, n: int, policy: str) -> float:
        stats = grid[pair, n]
        return stats["pipeinfer"].mean() / stats[policy].mean()

    for pair, policy, least in (("dolphin-tinyllama", "speculative", 2.0),
                                ("dolphin-tinyllama", "iterative", 3.0),
                                ("goliath-xwin7b", "speculative", 2.0)):
        if (pair, 8) in grid:
            value = gain(pair, 8, policy)
            drawn.aims.append((f"8 nodes of C, {pair}: at least {least:g} times {NAME[policy]}",
                               f"{value:.2f}", value >= least))
    for pair in sorted({key[0] for key in grid}):
        if {(pair, 8), (pair, 32)} <= set(grid):
            few, many = gain(pair, 8, "speculative"), gain(pair, 32, "speculative")
            drawn.aims.append((f"{pair}: gain over {NAME['speculative']} larger at 32 nodes than "
                               "at 8", f"{few:.2f}, {many:.2f}", many > few))


def _lines(axis: Any, pair: str, grid: Any, size: Size,
           value: Callable[[Stat], tuple[float, Any]]) -> None:
    nodes = _nodes(size)
    for policy in POLICIES:
        points = [value(grid[pair, n][policy]) for n in nodes]
        errors = np.array([p[1] for p in points]).T
        aside = 0.05 * (POLICIES.index(policy) - 1.5)  # so that bars do not hide one another
        axis.errorbar([x + aside for x in range(len(nodes))], [p[0] for p in points], errors,
                      color=COLOUR[policy], marker=MARK[policy], ms=5, capsize=2, lw=1.6)
    axis.set_xticks(range(len(nodes)), [str(n) for n in nodes])
    axis.set_xlabel("nodes")
    axis.set_title(title_of(pair))


def ttft(store: Store, size: Size, out: Path) -> Drawn:
    drawn, grid = Drawn(), nodes_grid(store, size)
    figure, axes = panels(len(_pairs(size)))
    for axis, pair in zip(axes, _pairs(size), strict=True):
        _lines(axis, pair, grid, size, lambda one: (one.mean("ttft"), one.spread("ttft")))
        axis.set_ylim(bottom=0)
        axis.set_ylabel("seconds")
    legend(figure)
    save(figure, out, "ttft", "Time to the first token after the prompt's own, cluster C.", drawn)
    ratios = {}
    for (pair, n), stats in grid.items():
        drawn.rows += rows_of("ttft", f"c {n} nodes {pair}", stats, ("ttft",))
        ratios[pair, n] = {p: one.mean("ttft") / stats["iterative"].mean("ttft")
                           for p, one in stats.items()}
    for policy in ("pipeinfer", "speculative", "published"):
        drawn.measured.append(
            f"{NAME[policy]}: {from_to(r[policy] for r in ratios.values())} of iterative's time "
            "to the first token.")
    drawn.measured.append(
        "PipeInfer's is shorter where the draft, which works while the prompt is still in the "
        "pipeline, has guessed the first token: the spread is that of right and wrong guesses.")
    worst = max(ratios.items(), key=lambda item: item[1]["pipeinfer"])
    drawn.aims.append(("time to first token at most 5 % over iterative's, cluster C, every pair",
                       f"worst {worst[1]['pipeinfer']:.3f} ({worst[0][0]}, {worst[0][1]} nodes)",
                       worst[1]["pipeinfer"] <= 1.05))
    longest = max((record["ttft"] / stats["iterative"].mean("ttft"), key)
                  for key, stats in grid.items() for record in stats["pipeinfer"].records)
    drawn.measured.append(f"The longest of any text is {longest[0]:.3f} times iterative's "
                          f"({longest[1][0]}, {longest[1][1]} nodes).")
    return drawn


def itl(store: Store, size: Size, out: Path) -> Drawn:
    drawn, grid = Drawn(), nodes_grid(store, size)
    figure, axes = panels(len(_pairs(size)))

    def value(one: Stat) -> tuple[float, tuple[float, float]]:
        mean = one.mean("itl_mean")
        return mean, (0.0, max(0.0, one.mean("itl_p95") - mean))

    for axis, pair in zip(axes, _pairs(size), strict=True):
        _lines(axis, pair, grid, size, value)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("seconds")
    legend(figure)
    save(figure, out, "itl", "Mean time between accepted tokens, cluster C; bars reach to the "
         "95th percentile: accepted guesses come in bursts.", drawn)
    for (pair, n), stats in grid.items():
        drawn.rows += rows_of("itl", f"c {n} nodes {pair}", stats,
                              ("itl_mean", "itl_sd", "itl_p95"))
    for policy in POLICIES:
        at = {pair: grid[pair, 8][policy] for pair in _pairs(size)}
        drawn.measured.append(
            f"{NAME[policy]}, 8 nodes: mean {from_to(s.mean('itl_mean') for s in at.values())} s, "
            f"standard deviation within a text {from_to(s.mean('itl_sd') for s in at.values())} "
            "s.")
    return drawn


def memory(store: Store, size: Size, out: Path) -> Drawn:
    drawn, grid = Drawn(), nodes_grid(store, size)
    targets = list(dict.fromkeys(profiles().pair(pair).target for pair in _pairs(size)))
    figure, axes = panels(len(targets))
    for axis, target in zip(axes, targets, strict=True):
        for pair in _pairs(size):
            if profiles().pair(pair).target != target:
                continue
            second = TABLE_I.index(pair) % 2
            for policy in POLICIES:
                stats = [grid[pair, n][policy] for n in _nodes(size)]
                axis.plot([s.memory for s in stats], [s.mean() for s in stats],
                          marker=MARK[policy], color=COLOUR[policy], ms=5, lw=1,
                          ls="--" if second else "-")
        axis.set(xscale="log", yscale="log", xlabel="GiB per node (mean)", ylabel="tokens/s",
                 title=profiles().model(target).title)
        for which in (axis.xaxis, axis.yaxis):
            which.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
            which.set_minor_formatter(mpl.ticker.NullFormatter())
            which.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    legend(figure)
    save(figure, out, "memory", "Memory per node against speed, cluster C with "
         f"{', '.join(map(str, _nodes(size)))} nodes (right to left); dashed: the larger draft.",
         drawn)
    for (pair, n), stats in grid.items():
        drawn.rows += [Row("memory", f"c {n} nodes {pair}", policy, "GiB per node", one.memory)
                       for policy, one in stats.items()]
    per = {p: [stats[p].mean() / stats[p].memory for stats in grid.values()] for p in POLICIES}
    gains = [a / b for a, b in zip(per["pipeinfer"], per["speculative"], strict=True)]
    more = [stats["pipeinfer"].memory / stats["iterative"].memory for stats in grid.values()]
    drawn.measured.append(
        f"PipeInfer brings {from_to(gains)} times the tokens/s per GiB of the best synchronous "
        f"speculation; both need {from_to(more)} times iterative's memory per node (the draft).")
    return drawn


# --- Figs. 7b, 7c: gigabit --------------------------------------------------------------------


def constrained_needs(size: Size) -> list[Job]:
    return [job for pair in size.thin(SMALL) for cluster, n in CLUSTERS
            for job in compared(base(cluster, pair, size, nodes=n), size.seeds)]


def bars(axis: Any, labels: Sequence[str], groups: Sequence[dict[str, Stat]], metric: str,
         policies: Sequence[str] = POLICIES) -> None:
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        at = [x + (index - (len(policies) - 1) / 2) * width for x, g in enumerate(groups)
              if policy in g]
        there = [g[policy] for g in groups if policy in g]
        axis.bar(at, [s.mean(metric) for s in there], width * 0.94, color=COLOUR[policy],
                 yerr=[s.spread(metric) for s in there], error_kw={"lw": 1, "capsize": 2})
    axis.set_xticks(range(len(labels)), labels)
    axis.grid(axis="x", visible=False)


def bar_legend(figure: Any, policies: Sequence[str] = POLICIES) -> None:
    figure.legend(handles=[Patch(color=COLOUR[p], label=NAME[p]) for p in policies],
                  loc="outside upper center", ncols=len(policies))


def constrained(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    pairs = size.thin(SMALL)
    grid = {(pair, c, n): compare(store, base(c, pair, size, nodes=n), size.seeds)
            for pair in pairs for c, n in CLUSTERS}
    for metric, name, unit in (("tokens_per_second", "constrained", "tokens/s"),
                               ("ttft", "constrained-ttft", "seconds")):
        figure, axes = panels(len(pairs))
        for axis, pair in zip(axes, pairs, strict=True):
            groups = [grid[pair, c, n] for c, n in CLUSTERS]
            bars(axis, [f"{c.upper()}, {n} nodes" for c, n in CLUSTERS], groups, metric)
            axis.set(title=title_of(pair), ylabel=unit)
        bar_legend(figure)
        save(figure, out, name, f"{'Speed' if metric != 'ttft' else 'Time to first token'} over "
             "gigabit Ethernet (B: cluster A and five old desktops, layers as planned).", drawn)
    gains: dict[str, list[float]] = {"published": [], "speculative": []}
    first: list[float] = []
    for (pair, c, n), stats in grid.items():
        drawn.rows += rows_of("constrained", f"{c} {n} nodes {pair}", stats,
                              ("tokens_per_second", "ttft"))
        for policy, found in gains.items():
            found.append(stats["pipeinfer"].mean() / stats[policy].mean())
        first.append(stats["pipeinfer"].mean("ttft") / stats["iterative"].mean("ttft"))
    for policy, found in gains.items():
        drawn.measured.append(f"PipeInfer over {NAME[policy]}: {from_to(found)} times as fast.")
    for pair in pairs:
        a, b = (grid[pair, c, n]["pipeinfer"].mean() for c, n in (("a", 8), ("b", 13)))
        drawn.measured.append(f"{pair}: B's five desktops on top of A's eight nodes change "
                              f"PipeInfer's speed by {b / a - 1:+.0%}.")
    drawn.measured.append(f"Time to first token: {from_to(first)} of iterative's.")
    for pair in pairs:
        value = grid[pair, "a", 8]
        gain = value["pipeinfer"].mean() / value["speculative"].mean()
        drawn.rows.append(Row("aims", f"a 8 nodes {pair}", "pipeinfer", "gain", gain))
        reference = compare(store, base("c", pair, size, nodes=8), size.seeds)
        other = reference["pipeinfer"].mean() / reference["speculative"].mean()
        drawn.aims.append((f"{pair}: gain over {NAME['speculative']} on A (gigabit) at least that "
                           "on C, 8 nodes", f"{gain:.2f}, {other:.2f}", gain >= other))
    return drawn


def constrained_all(size: Size) -> list[Job]:
    return [*constrained_needs(size),
            *(job for pair in size.thin(SMALL)
              for job in compared(base("c", pair, size, nodes=8), size.seeds))]


# --- Fig. 8: ablations ------------------------------------------------------------------------

ABLATIONS = ("cancel", "continuous", "multibuffer", "async")


def ablation_options(pair: str, size: Size, off: str) -> list[Experiment]:
    """What is tried, the best of which counts, so that no variant loses by a setting."""
    start = base("c", pair, size, nodes=8, adapt=False, ablate=(off,) if off else ())
    if off == "continuous":
        settings = [{"tree_max": tree} for tree in bench.TREES]
    elif off == "async":
        settings = [{"tree_max": tree, "p_min": p}
                    for tree in bench.TREES for p in bench.CUTOFFS]
    else:
        settings = [{"draft_max": batch} for batch in (1, 2)]
    return [dataclasses.replace(start, limits=tuple(one.items())) for one in settings]


def ablation_needs(size: Size) -> list[Job]:
    return [Job(run) for pair in size.thin(SMALL)
            for option in [base("c", pair, size, nodes=8),
                           *(o for off in ("", *ABLATIONS)
                             for o in ablation_options(pair, size, off))]
            for run in texts(option, size.seeds)]


def ablations(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    pairs = size.thin(SMALL)
    labels = ["tuned", "fixed", "no\ncancel", "no con-\ntinuous", "no multi-\nbuffer",
              "no\nasync"]
    colours = ["#2563c9", "#5b8fe0", "#9aa7b8", "#9aa7b8", "#c98b3c", "#c98b3c"]
    figure, axes = panels(len(pairs), width=4.0, height=3.1)
    latency, latency_axes = panels(len(pairs), width=4.0, height=3.1)
    for axis, other, pair in zip(axes, latency_axes, pairs, strict=True):
        stats = [stat(store, base("c", pair, size, nodes=8), size.seeds)]
        for off in ("", *ABLATIONS):
            found = [stat(store, o, size.seeds) for o in ablation_options(pair, size, off)]
            stats.append(max((s for s in found if s is not None), key=Stat.mean))
        for which, metric, unit in ((axis, "tokens_per_second", "tokens/s"),
                                    (other, "itl_mean", "seconds between tokens")):
            which.bar(range(len(stats)), [s.mean(metric) for s in stats], 0.7, color=colours,
                      yerr=[s.spread(metric) for s in stats], error_kw={"lw": 1, "capsize": 3})
            which.set_xticks(range(len(stats)), labels, fontsize=8)
            which.grid(axis="x", visible=False)
            which.set(title=title_of(pair), ylabel=unit)
        full = stats[1]
        parts = []
        for off, one in zip(ABLATIONS, stats[2:], strict=True):
            paired = [a["tokens_per_second"] / b["tokens_per_second"] - 1
                      for a, b in zip(full.records, one.records, strict=True)]
            spread = statistics.stdev(paired) if len(paired) > 1 else 0.0
            mean = statistics.fmean(paired)
            parts.append(f"{off} {mean:+.0%} (+-{spread:.0%})")
            drawn.rows.append(Row("ablations", f"c 8 nodes {pair}", f"without {off}",
                                  "contribution", mean, spread, len(paired)))
        for label, one in zip(["all, tuned", "all", *(f"without {a}" for a in ABLATIONS)], stats,
                              strict=True):
            drawn.rows += [Row("ablations", f"c 8 nodes {pair}", label, metric, one.mean(metric),
                               one.spread(metric), len(one.records))
                           for metric in ("tokens_per_second", "itl_mean", "ttft")]
        drawn.measured.append(f"{pair}: each component makes the whole faster by "
                              f"{', '.join(parts)}.")
    for grey, name in ((figure, "ablations"), (latency, "ablations-itl")):
        grey.legend(handles=[Patch(color="#2563c9", label="everything on"),
                             Patch(color="#9aa7b8", label="in the paper too"),
                             Patch(color="#c98b3c", label="not measurable in the paper")],
                    loc="outside upper center", ncols=3)
        save(grey, out, name, "Each component switched off, 8 nodes of cluster C; every bar is "
             "the best of a few fixed settings (micro-batches of 1, 2, 4; trees of 1, 2, 4, 8), "
             "nothing is tuned while running but in the first.", drawn)
    return drawn


# --- Figs. 9, 10: GPUs ------------------------------------------------------------------------


def gpu_needs(size: Size) -> list[Job]:
    return [job for pair in size.thin(TABLE_III)
            for job in compared(base("gpu", pair, size), size.seeds)]


def gpu(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    pairs = size.thin(TABLE_III)
    groups = [compare(store, base("gpu", pair, size), size.seeds) for pair in pairs]
    figure, (axis,) = panels(1, width=11.5, height=3.8)
    bars(axis, [f"{short(p)}\n{profiles().pair(p).acceptance:.0%}" for p in pairs], groups,
         "tokens_per_second")
    axis.tick_params(axis="x", labelsize=7.5)
    axis.set_ylabel("tokens/s")
    for x, group in enumerate(groups):
        if "pipeinfer" not in group:
            axis.text(x + 0.3, 1, "does not fit", rotation=90, ha="center", va="bottom",
                      color=COLOUR["pipeinfer"], fontsize=8.5)
    bar_legend(figure)
    save(figure, out, "gpu", "Four GPUs over InfiniBand QDR (MI60, P40, Titan V, RTX 3090). The "
         "paper reports no acceptances here: they are assumed (the percentages).", drawn)
    gains: dict[str, dict[str, float]] = {"published": {}, "speculative": {}, "iterative": {}}
    for pair, stats in zip(pairs, groups, strict=True):
        drawn.rows += rows_of("gpu", f"gpu {pair}", stats)
        for policy, found in gains.items():
            if "pipeinfer" in stats:
                found[pair] = stats["pipeinfer"].mean() / stats[policy].mean()
        if "pipeinfer" not in stats:
            why = store.get(base("gpu", pair, size))["error"]
            drawn.measured.append(f"{pair} does not fit with the head on a GPU of its own: {why}.")
    for policy, found in gains.items():
        least = min(found, key=lambda p, f=found: f[p])
        drawn.measured.append(f"PipeInfer over {NAME[policy]}: {from_to(found.values())} times as "
                              f"fast (least with {least}).")
    return drawn


def prompt_acceptances(size: Size) -> list[float]:
    """Beta distributed, mean 65 %, standard deviation 8 %."""
    mean, spread = 0.65, 0.08
    total = mean * (1 - mean) / spread**2 - 1
    draws = np.random.default_rng(10).beta(mean * total, (1 - mean) * total, 12)
    return [round(float(x), 3) for x in (draws[:3] if size.quick else draws)]


def _prompt_runs(size: Size, policy: str) -> list[list[Experiment]]:
    """For each setting of the policy, the run of every prompt."""
    start = base("gpu", "senku-tinyllama", size)
    return [[dataclasses.replace(option, acceptance=share, prompt_seed=seed)
             for seed, share in enumerate(prompt_acceptances(size))]
            for option in options(start, policy)]


def prompts_needs(size: Size) -> list[Job]:
    return [Job(run) for policy in POLICIES for runs in _prompt_runs(size, policy) for run in runs]


def prompts(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    figure, (axis,) = panels(1, width=9.5, height=3.4)
    shares = prompt_acceptances(size)
    parts = []
    for policy in POLICIES:
        found = [[store.get(run)["tokens_per_second"] for run in runs]
                 for runs in _prompt_runs(size, policy)]
        values = max(found, key=statistics.fmean)
        axis.plot(range(len(values)), values, marker=MARK[policy], color=COLOUR[policy], lw=1.6)
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        drawn.rows.append(Row("prompts", "gpu senku-tinyllama", policy, "tokens_per_second", mean,
                              spread, len(values)))
        parts.append(f"{NAME[policy]} {mean:.1f} +-{spread:.1f} tokens/s ({spread / mean:.0%})")
    axis.set_xticks(range(len(shares)), [f"{i + 1}\n{s:.0%}" for i, s in enumerate(shares)])
    axis.set(xlabel="prompt, and its acceptance", ylabel="tokens/s", ylim=(0, None))
    legend(figure)
    save(figure, out, "prompts", "Senku 70B with TinyLlama on four GPUs. Every prompt is another "
         "text with another acceptance, drawn from a Beta distribution of mean 65 % and standard "
         "deviation 8 %; synchronous settings are fixed for all prompts.", drawn)
    drawn.measured.append("Mean and standard deviation over prompts: " + "; ".join(parts) + ".")
    return drawn


# --- sweeps -----------------------------------------------------------------------------------

SIZES = (1, 2, 4, 8)
DELAYS = (0.0, 0.005, 0.010, 0.025, 0.050, 0.075)
FACTORS = (1.0, 2.0, 4.0, 8.0)


def sweep_points(size: Size) -> dict[str, list[tuple[float, Experiment]]]:
    shares = [round(0.1 * k, 1) for k in range(11)]
    c = base("c", "dolphin-tinyllama", size, nodes=8)
    g = base("gpu", "dolphin-tinyllama-gpu", size)
    goliath = base("c", "goliath-xwin7b", size, nodes=8)
    change = dataclasses.replace
    return {
        "acceptance-c": [(s, change(c, acceptance=s)) for s in size.thin(shares)],
        "acceptance-goliath": [(s, change(goliath, acceptance=s)) for s in size.thin(shares)],
        "acceptance-gpu": [(s, change(g, acceptance=s)) for s in size.thin(shares)],
        "delay": [(1e3 * d, change(c, delay=d)) for d in size.thin(DELAYS)],
        "delay-gpu": [(1e3 * d, change(g, delay=d)) for d in size.thin(DELAYS)],
        "slow-planned": [(f, change(c, slow=(4, f) if f > 1 else None))
                         for f in size.thin(FACTORS)],
        "slow-equal": [(f, change(c, slow=(4, f) if f > 1 else None, split="equal"))
                       for f in size.thin(FACTORS)],
    }


SWEEP_TITLES = {
    "acceptance-c": "cluster C, 8 nodes, Dolphin + TinyLlama",
    "acceptance-goliath": "cluster C, 8 nodes, Goliath + XWin 7B",
    "acceptance-gpu": "four GPUs, Dolphin + TinyLlama", "delay": "cluster C, 8 nodes",
    "delay-gpu": "four GPUs", "slow-planned": "layers as planned",
    "slow-equal": "as many layers on each node",
}


def sweep_needs(*names: str) -> Callable[[Size], list[Job]]:
    return lambda size: [job for name in names for _, point in sweep_points(size)[name]
                         for job in compared(point, size.few)]


def _sweep(store: Store, size: Size, names: Sequence[str], xlabel: str, *, share: bool = False,
           logarithmic: bool = False
           ) -> tuple[Any, list[Any], dict[str, list[tuple[float, dict[str, Stat]]]]]:
    figure, axes = panels(len(names), width=4.3 if len(names) < 3 else 3.7, sharey=share)
    found = {}
    for axis, name in zip(axes, names, strict=True):
        points = [(x, compare(store, point, size.few)) for x, point in sweep_points(size)[name]]
        for policy in POLICIES:
            axis.errorbar([x for x, _ in points], [s[policy].mean() for _, s in points],
                          [s[policy].spread() for _, s in points], color=COLOUR[policy],
                          marker=MARK[policy], ms=4.5, capsize=2, lw=1.6)
        axis.set(xlabel=xlabel, ylabel="tokens/s", title=SWEEP_TITLES[name])
        if not logarithmic:
            axis.set_ylim(bottom=0)
        found[name] = points
    legend(figure)
    return figure, axes, found


def acceptance(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    names = ("acceptance-c", "acceptance-goliath", "acceptance-gpu")
    figure, axes, found = _sweep(store, size, names, "acceptance", logarithmic=True)
    for axis in axes:
        axis.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        axis.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    save(figure, out, "acceptance", "Speed against the share of first guesses that are right "
         "(logarithmic).", drawn)
    for name, points in found.items():
        for x, stats in points:
            drawn.rows += rows_of("acceptance", f"{name} {x:.0%}", stats)
        gains = [(x, s["pipeinfer"].mean() / s["speculative"].mean(),
                  s["pipeinfer"].mean() / s["iterative"].mean()) for x, s in points]
        peak = max(gains, key=lambda g: g[1])
        drawn.measured.append(
            f"{SWEEP_TITLES[name]}: from {gains[0][2]:.2f} to {gains[-1][2]:.2f} times iterative; "
            f"over the best synchronous speculation at most {peak[1]:.2f} times, at {peak[0]:.0%}.")
    return drawn


def delay(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    figure, _, found = _sweep(store, size, ("delay", "delay-gpu"), "ms added to every link")
    save(figure, out, "delay", "Speed against a delay added to every link, 79 % acceptance.",
         drawn)
    for name, points in found.items():
        for x, stats in points:
            drawn.rows += rows_of("delay", f"{name} {x:g} ms", stats)
        gains = [s["pipeinfer"].mean() / s["speculative"].mean() for _, s in points]
        lost = {p: points[-1][1][p].mean() / points[0][1][p].mean() for p in POLICIES}
        drawn.measured.append(
            f"{SWEEP_TITLES[name]}: with {points[-1][0]:g} ms on every link PipeInfer keeps "
            f"{lost['pipeinfer']:.0%} of its speed, the best synchronous speculation "
            f"{lost['speculative']:.0%}, iterative {lost['iterative']:.0%}; the gain over the best "
            f"synchronous goes from {gains[0]:.2f} to {gains[-1]:.2f}.")
    return drawn


def slow(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    names = ("slow-equal", "slow-planned")
    figure, axes, found = _sweep(store, size, names, "node 4 slower by this factor", share=True)
    for axis in axes:
        axis.set_xticks(list(FACTORS), [f"{f:g}" for f in FACTORS])
    save(figure, out, "slow", "One of eight nodes of cluster C made slower, Dolphin with "
         "TinyLlama.", drawn)
    for name, points in found.items():
        for x, stats in points:
            drawn.rows += rows_of("slow", f"{name} x{x:g}", stats)
        gains = [s["pipeinfer"].mean() / s["speculative"].mean() for _, s in points]
        drawn.measured.append(
            f"{SWEEP_TITLES[name].capitalize()}: PipeInfer at factor {points[-1][0]:g} keeps "
            f"{points[-1][1]['pipeinfer'].mean() / points[0][1]['pipeinfer'].mean():.0%}; over the "
            f"best synchronous speculation {from_to(gains)}.")
    last = {n: found[n][-1][1]["pipeinfer"].mean() for n in names}
    drawn.measured.append(f"At factor {found['slow-planned'][-1][0]:g} the planned split makes "
                          f"PipeInfer {last['slow-planned'] / last['slow-equal']:.2f} times as "
                          "fast as the equal one.")
    return drawn


# --- the controller ---------------------------------------------------------------------------


def pinned(point: Experiment) -> list[Experiment]:
    """The grid that the controller must not lose against: everything fixed, and, harder, the size
    fixed while the rest is tuned."""
    stages = 3 if point.cluster == "gpu" else 7
    grid = []
    for batch, join, adapt in itertools.product(SIZES, (False, True), (False, True)):
        if join and adapt:
            continue
        limits: dict[str, Any] = {"draft_max": batch, "join_tip": join}
        if adapt:
            limits["path_min"] = cutoff(stages + 1)
        grid.append(dataclasses.replace(point, limits=tuple(limits.items()), adapt=adapt))
    return grid


USELESS = (("c", 4, "dolphin-tinyllama"), ("c", 8, "dolphin-tinyllama"),
           ("c", 32, "dolphin-tinyllama"), ("c", 8, "goliath-xwin7b"), ("c", 8, "falcon-40b"),
           ("a", 8, "dolphin-tinyllama"), ("b", 13, "dolphin-tinyllama"),
           ("gpu", 4, "dolphin-tinyllama-gpu"))


def useless_runs(size: Size) -> list[tuple[str, Experiment, Experiment]]:
    """(case, PipeInfer, iterative) with drafts that are always wrong."""
    runs = []
    for cluster, n, pair in size.thin(USELESS):
        for claimed in (0.7, None):
            fast = base(cluster, pair, size, nodes=n, acceptance=0.0, claimed=claimed)
            says = "claims 70 %" if claimed else "knows it"
            runs.append((f"{cluster} {n} nodes {pair}, {says}", fast, plain(fast, "iterative")))
    return runs


def controller_points(size: Size) -> dict[str, list[tuple[float, Experiment]]]:
    """The sweeps' points, every other one of the long sweeps."""
    return {name: points[::2] if len(points) > 8 else points
            for name, points in sweep_points(size).items()}


def controller_needs(size: Size) -> list[Job]:
    seeds = max(1, min(2, size.few))
    jobs = [Job(run) for points in controller_points(size).values() for _, point in points
            for option in [point, plain(point, "iterative"), *pinned(point)]
            for run in texts(option, seeds)]
    return jobs + [Job(run) for _, *pair in useless_runs(size) for one in pair
                   for run in texts(one, seeds)]


def controller(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    seeds = max(1, min(2, size.few))
    figure, axes = panels(2, width=5.6, height=3.8)
    axis = axes[0]
    labels, ratios, over = [], [], []
    names = {"acceptance-c": "C, acceptance", "acceptance-goliath": "C Goliath, acceptance",
             "acceptance-gpu": "GPU, acceptance", "delay": "C, delay", "delay-gpu": "GPU, delay",
             "slow-planned": "C, slow node", "slow-equal": "C, slow, equal split"}
    for index, (name, points) in enumerate(controller_points(size).items()):
        for x, point in points:
            own = stat(store, point, seeds)
            others = [stat(store, option, seeds)
                      for option in [plain(point, "iterative"), *pinned(point)]]
            top = max((s for s in others if s is not None), key=Stat.mean)
            assert own is not None
            ratio = own.mean() / top.mean()
            ratios.append(ratio)
            what = f"{x:.0%}" if name.startswith("acc") else f"{x:g}"
            setting = ", ".join(f"{k} {v:g}" for k, v in top.experiment.limits) or "iterative"
            drawn.rows.append(Row("controller", f"{name} {what}", "pipeinfer",
                                  f"over best pinned ({setting})", ratio))
            if ratio < 0.95:
                over.append(f"{SWEEP_TITLES[name]}, {name} {what}: {ratio:.3f} of {setting}")
            axis.scatter(ratio, index, s=22, color="#2563c9" if ratio >= 0.95 else "#c0392b",
                         alpha=0.75)
        labels.append(names[name])
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.axvline(1.0, color="#555", lw=1)
    axis.axvspan(0.95, max(1.0, *ratios) + 0.01, color="#2563c9", alpha=0.08, lw=0)
    axis.set(xlabel="speed over the best pinned setting (shaded: the aim)")
    axis = axes[1]
    cases, bad = [], []
    for case, fast, slow_one in useless_runs(size):
        one, other = stat(store, fast, seeds), stat(store, slow_one, seeds)
        if one is None or other is None:
            continue
        ratio = one.mean() / other.mean()
        cases.append((case, ratio))
        drawn.rows.append(Row("useless draft", case, "pipeinfer", "over iterative", ratio))
        if ratio < 0.98:
            bad.append(f"{case}: {ratio:.3f}")
    axis.scatter([r for _, r in cases], range(len(cases)),
                 color=["#2563c9" if r >= 0.98 else "#c0392b" for _, r in cases], s=24)
    axis.set_yticks(range(len(cases)), [case for case, _ in cases], fontsize=7.5)
    axis.invert_yaxis()
    axis.axvline(1.0, color="#555", lw=1)
    axis.axvspan(0.98, max(1.005, *(r for _, r in cases)) + 0.005, color="#2563c9", alpha=0.08,
                 lw=0)
    axis.set(xlabel="speed over iterative, every guess wrong")
    save(figure, out, "controller", "Left: PipeInfer as tuned while running over the best of 13 "
         "pinned settings (micro-batches of 1, 2, 4, 8, joined or not, the rest fixed, or tuned, "
         "and iterative) at every point of the sweeps. Right: a draft that is never right.", drawn)
    drawn.measured.append(f"Over the best pinned setting: {from_to(ratios)}; {len(over)} of "
                          f"{len(ratios)} points are more than 5 % slower"
                          + (": " + "; ".join(over) if over else "") + ".")
    drawn.measured.append(f"With a useless draft, over iterative: "
                          f"{from_to(r for _, r in cases)}; {len(bad)} of {len(cases)} cases lose "
                          "more than 2 %" + (": " + "; ".join(bad) if bad else "") + ".")
    drawn.aims.append(("tuned at most 5 % slower than the best pinned setting, every sweep",
                       f"worst {min(ratios):.3f}, {len(over)} of {len(ratios)} below", not over))
    drawn.aims.append(("useless draft at most 2 % slower than iterative",
                       f"worst {min(r for _, r in cases):.3f}", not bad))
    return drawn


# --- scale, cancellation, drafts, where the time goes --------------------------------------------

STAGES = (8, 16, 32, 64, 128, 256)


def scale_runs(size: Size) -> list[tuple[int, dict[str, Experiment]]]:
    stages = [8, 16, 32] if size.quick else STAGES
    return [(n, {p: base("c", "deep-tinyllama", size, policy=p, split="equal",
                         nodes=n + (p == "pipeinfer"), tokens=min(256, size.tokens))
                 for p in ("iterative", "pipeinfer")}) for n in stages]


def scale_needs(size: Size) -> list[Job]:
    return [Job(one, timed=True) for _, runs in scale_runs(size) for one in runs.values()]


def scale(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    found = [(n, {p: store.get(one, timed=True) for p, one in runs.items()})
             for n, runs in scale_runs(size)]
    stages = [n for n, _ in found]
    figure, axes = panels(4, width=4.4, height=2.8, most=2)

    def metric(record: dict[str, Any], name: str, n: int) -> float:
        if name == "head":
            return 1e6 * record["scheduler_seconds"] / record["runs"]
        if name == "bytes":
            return record["bytes_per_token"] / (n + 1) / 1e3
        if name == "runs":
            return record["runs"] / record["tokens"]
        return record["tokens_per_second"]

    plots = (("speed", "tokens/s"), ("head", "scheduler, us per run"),
             ("bytes", "KB per link and accepted token"), ("runs", "runs per accepted token"))
    for axis, (name, label) in zip(axes, plots, strict=True):
        for policy in ("iterative", "pipeinfer"):
            values = [metric(records[policy], name, n) for n, records in found]
            axis.plot(stages, values, marker=MARK[policy], color=COLOUR[policy])
            drawn.rows += [Row("scale", f"{n} stages", policy, label, v)
                           for n, v in zip(stages, values, strict=True)]
        axis.set_xscale("log", base=2)
        axis.set_xticks(stages, [str(n) for n in stages])
        axis.minorticks_off()
        axis.set(xlabel="stages", ylabel=label, ylim=(0, None))
    legend(figure, ("iterative", "pipeinfer"))
    save(figure, out, "scale", "256 layers of a 70B's shape over up to 256 stages of cluster C's "
         "machines, 79 % acceptance, 256 tokens.", drawn)
    for name, what in (("head", "scheduler per run, us"), ("bytes", "KB per link and token"),
                       ("runs", "runs per token"), ("speed", "tokens/s")):
        values = [metric(records["pipeinfer"], name, n) for n, records in found]
        drawn.measured.append(f"PipeInfer, {what}: " + ", ".join(
            f"{v:.0f} ({n})" if v >= 100 else f"{v:.2g} ({n})"
            for n, v in zip(stages, values, strict=True)) + ".")
    return drawn


PATHS = (("c", 8, "dolphin-tinyllama", 0.0), ("c", 32, "dolphin-tinyllama", 0.0),
         ("c", 8, "goliath-xwin7b", 0.0), ("c", 32, "goliath-xwin7b", 0.0),
         ("a", 8, "dolphin-tinyllama", 0.0), ("b", 13, "goliath-xwin7b", 0.0),
         ("c", 8, "dolphin-tinyllama", 0.025))


def path_points(size: Size) -> list[tuple[str, Experiment]]:
    points = []
    for cluster, n, pair, late in size.thin(PATHS):
        label = f"{cluster.upper()}, {n} nodes\n{pair.partition('-')[0].capitalize()}"
        label += f"\n+{1e3 * late:g} ms" if late else ""
        points.append((label, base(cluster, pair, size, nodes=n, delay=late)))
    return points


def path_variants(point: Experiment) -> dict[str, Experiment]:
    """Fixed settings: the controller does not tune a run with a component off."""
    fixed = dataclasses.replace(point, adapt=False, limits=(("draft_max", 1),))
    return {"none": dataclasses.replace(fixed, ablate=("cancel",)),
            "backward": dataclasses.replace(fixed, direct_cancel=False), "direct": fixed}


def path_needs(size: Size) -> list[Job]:
    return [Job(run) for _, point in path_points(size)
            for variant in path_variants(point).values()
            for run in texts(variant, size.few)]


def paths(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    seeds = size.few
    figure, axes = panels(2, width=5.8, height=3.3)
    points = path_points(size)
    colours = {"none": "#9aa7b8", "backward": "#5b8fe0", "direct": "#2563c9"}
    gains = []
    for index, name in enumerate(colours):
        for x, (label, point) in enumerate(points):
            one = stat(store, path_variants(point)[name], seeds)
            reference = stat(store, path_variants(point)["none"], seeds)
            assert one is not None
            assert reference is not None
            ratio = one.mean() / reference.mean()
            share = statistics.fmean(sum(r["wasted"]) / sum(r["busy"]) for r in one.records)
            axes[0].bar(x + (index - 1) * 0.27, ratio, 0.25, color=colours[name])
            axes[1].bar(x + (index - 1) * 0.27, share, 0.25, color=colours[name])
            case = label.replace("\n", " ")
            drawn.rows += [Row("cancellation", case, name, "speed over none", ratio, 0.0, seeds),
                           Row("cancellation", case, name, "dead share of stage time", share, 0.0,
                               seeds)]
            if name == "direct":
                back = stat(store, path_variants(point)["backward"], seeds)
                gains.append((one.mean() / back.mean(), ratio))
    for axis, label in zip(axes, ("speed over no cancellation", "stage time on dead runs"),
                           strict=True):
        axis.set_xticks(range(len(points)), [label for label, _ in points], fontsize=7.5)
        axis.grid(axis="x", visible=False)
        axis.set_ylabel(label)
    axes[0].axhline(1.0, color="#555", lw=1)
    axes[1].yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
    figure.legend(handles=[Patch(color=c, label=n) for n, c in (
        ("no cancellation", colours["none"]), ("backward, stage to stage", colours["backward"]),
        ("direct, to all stages", colours["direct"]))], loc="outside upper center", ncols=3)
    save(figure, out, "cancellation", "How a cancellation travels; micro-batches of one, nothing "
         "tuned while running.", drawn)
    drawn.measured.append(
        f"Cancellation makes runs {from_to(g[1] for g in gains)} times as fast; sent to all stages "
        f"at once instead of from stage to stage {from_to(g[0] for g in gains)} times.")
    return drawn


DRAFTS = ("draft-1b", "draft-7b", "draft-13b")
DRAFT_CLUSTERS = (("c", 8), ("a", 8), ("b", 13), ("gpu", 4))


def draft_points(size: Size) -> list[tuple[tuple[str, int], str, float, Experiment]]:
    shares = size.thin((0.5, 0.7, 0.9))
    return [((cluster, n), pair, share, base(cluster, pair, size, nodes=n, acceptance=share))
            for cluster, n in size.thin(DRAFT_CLUSTERS) for pair in DRAFTS for share in shares]


def draft_needs(size: Size) -> list[Job]:
    return [Job(run) for *_, point in draft_points(size) for run in texts(point, size.few)]


def drafts(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    places = size.thin(DRAFT_CLUSTERS)
    figure, axes = panels(len(places), width=4.4, most=2)
    lines: dict[Any, list[tuple[float, float]]] = {}
    facts = {}
    for place, pair, share, point in draft_points(size):
        one = stat(store, point, size.few)
        if one is None:
            continue
        lines.setdefault((place, pair), []).append((share, one.mean()))
        facts[place, pair] = one.records[0]
        drawn.rows.append(Row("drafts", f"{place[0]} {place[1]} nodes {pair} {share:.0%}",
                              "pipeinfer", "tokens_per_second", one.mean(), one.spread(),
                              len(one.records)))
    for axis, place in zip(axes, places, strict=True):
        for pair, colour, mark in zip(DRAFTS, ("#2563c9", "#2a9d72", "#b04a9c"), "osv",
                                      strict=True):
            points = lines.get((place, pair), [])
            if points:
                record = facts[place, pair]
                ratio = record["draft_seconds"] / max(record["stage_seconds"])
                axis.plot(*zip(*points, strict=True), marker=mark, color=colour,
                          label=f"{pair[6:].upper()}: {ratio:.2f} of a stage per token")
        axis.legend(fontsize=8)
        axis.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axis.set(title=f"cluster {place[0].upper()}, {place[1]} nodes", xlabel="acceptance",
                 ylabel="tokens/s", ylim=(0, None))
        small, needed = dict(lines.get((place, "draft-1b"), [])), []
        for pair in DRAFTS[1:]:
            big = lines.get((place, pair), [])
            if 0.7 in small and big and big[-1][1] >= small[0.7]:
                shares, speeds = zip(*big, strict=True)
                share = float(np.interp(small[0.7], speeds, shares))
                needed.append(f"{pair[6:].upper()} needs {share:.0%}")
            elif 0.7 in small:
                needed.append(f"{pair[6:].upper()} does not get there by 90 %")
        if needed:
            drawn.measured.append(f"Cluster {place[0].upper()}, {place[1]} nodes: to match the "
                                  f"1.1B draft at 70 %, {', '.join(needed)}.")
    save(figure, out, "drafts", "Dolphin 70B under PipeInfer with drafts of three sizes at equal "
         "acceptance: what a larger draft costs, and what it must bring.", drawn)
    return drawn


def time_points(size: Size) -> list[tuple[str, Experiment]]:
    return [(pair, base("c", pair, size, nodes=8)) for pair in size.thin(SMALL)]


def time_needs(size: Size) -> list[Job]:
    return [job for _, point in time_points(size) for job in compared(point, size.seeds)]


FATES = {"token": "#1d4f9e", "guess": "#3f9b63", "dead": "#d08a2e", "skipped": "#c0392b",
         "prompt": "#8b93a1"}
FATE_NAMES = {"token": "run of an accepted token", "guess": "guess of use",
              "dead": "computed, of no use", "skipped": "cut short or skipped", "prompt": "prompt"}


def where(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    points = time_points(size)
    figure, axes = panels(len(points), sharey=True, height=3.2)
    pictures = {}
    for axis, (pair, point) in zip(axes, points, strict=True):
        labels, stacks = [], []
        for policy in ("iterative", "speculative", "pipeinfer"):
            chosen = compare(store, point, size.seeds, (policy,))[policy].experiment
            _, result = traced(chosen)
            if policy == "pipeinfer":
                pictures[pair] = result
            split = _time_split(result)
            labels.append({"iterative": "iterative", "speculative": "synchr.\n(best)"}.get(
                policy, ""))
            if policy != "pipeinfer":
                stacks.append({k: statistics.fmean(s[k] for s in split) for k in split[0]})
            else:
                labels[-1:] = [f"{k + 1}" for k in range(len(split))]
                stacks += split
            mean = {k: statistics.fmean(s[k] for s in split) for k in split[0]}
            drawn.rows += [Row("time", f"c 8 nodes {pair}", policy, f"share {k}", v)
                           for k, v in mean.items()]
            if policy == "pipeinfer":
                useful = mean["token"] + mean["guess"]
                dead, idle = mean["dead"] + mean["skipped"], 1 - sum(mean.values())
                drawn.measured.append(
                    f"{pair}: stages spend {useful:.0%} of the time on runs that were of use, "
                    f"{dead:.0%} on dead ones, {idle:.0%} waiting.")
        at = [0, 1.5, *(3.0 + 0.8 * k for k in range(len(stacks) - 2))]
        bottom = np.zeros(len(stacks))
        for fate in ("token", "guess", "dead", "skipped"):
            values = np.array([s[fate] for s in stacks])
            axis.bar(at, values, 0.7, bottom=bottom, color=FATES[fate])
            bottom += values
        axis.bar(at, 1 - bottom, 0.7, bottom=bottom, color="#eef0f3")
        axis.set_xticks(at, labels, fontsize=8)
        axis.set_xlabel("means of all stages | PipeInfer's stages", fontsize=9)
        axis.grid(axis="x", visible=False)
        axis.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axis.set_title(title_of(pair))
    axes[0].set_ylabel("share of generation time")
    handles = [Patch(color=FATES[f], label=FATE_NAMES[f])
               for f in ("token", "guess", "dead", "skipped")]
    figure.legend(handles=[*handles, Patch(color="#eef0f3", label="waiting")],
                  loc="outside upper center", ncols=5, fontsize=9, columnspacing=1.2)
    save(figure, out, "time", "Where the stages' time goes, 8 nodes of cluster C, one text. In "
         "synchronous speculation rejected rows travel in the token's own run and count as of "
         "use.", drawn)
    _timeline(pictures[points[0][0]], points[0][0], out, drawn)
    return drawn


def _time_split(result: Any) -> list[dict[str, float]]:
    start, end = result.times[0], result.times[-1]
    split = [dict.fromkeys(("token", "guess", "dead", "skipped"), 0.0) for _ in result.busy]
    for stage, _, begin, stop, fate in result.spans:
        inside = min(stop, end) - max(begin, start)
        if inside > 0 and fate in split[stage]:
            split[stage][fate] += inside / (end - start)
    return split


def _timeline(result: Any, pair: str, out: Path, drawn: Drawn) -> None:
    stages = len(result.busy)
    begin = result.times[0] + 0.4 * (result.times[-1] - result.times[0])
    span = 1.2
    figure, (axis,) = panels(1, width=11, height=0.6 + 0.36 * stages)
    for stage, _, start, end, fate in result.spans:
        if end > begin and start < begin + span:
            axis.barh(stage, end - start, left=start - begin, height=0.78, color=FATES[fate],
                      edgecolor="white", lw=0.4)
    for when in result.times:
        if begin < when < begin + span:
            axis.plot(when - begin, -0.75, marker="v", ms=5, color="#2563c9")
    axis.set_yticks(range(stages), [f"stage {k + 1}" for k in range(stages)])
    axis.set(xlim=(0, span), ylim=(stages - 0.4, -1.2), xlabel="seconds")
    axis.grid(visible=False)
    marks = plt.Line2D([], [], color="#2563c9", marker="v", ls="", label="token accepted")
    figure.legend(handles=[*(Patch(color=FATES[f], label=FATE_NAMES[f])
                             for f in ("token", "guess", "dead", "skipped")), marks],
                  loc="outside upper center", ncols=5)
    save(figure, out, "timeline", f"{span} seconds of {pair} on 8 nodes of cluster C under "
         "PipeInfer, stages as lanes.", drawn)


FIGURES = (
    Figure("speed", "Generation speed and nodes (Fig. 4)",
           "PipeInfer is faster in every case: 1.5 to 2.15 times synchronous speculation (up to "
           "1.7 well aligned, 2.15 poorly). Iterative and speculative speed hardly change with "
           "the number of nodes; Goliath is fastest at 8 nodes.", nodes_needs, speed),
    Figure("ttft", "Time to first token (Fig. 5)",
           "PipeInfer is near parity with iterative inference, synchronous speculation far "
           "slower.", nodes_needs, ttft),
    Figure("itl", "Time between tokens (Fig. 6)", "It follows the generation speed.",
           nodes_needs, itl),
    Figure("memory", "Memory per node (Fig. 7a)",
           "PipeInfer needs as much memory as synchronous speculation, iterative less; PipeInfer "
           "has the most speed per memory.", nodes_needs, memory),
    Figure("constrained", "Gigabit Ethernet and old machines (Figs. 7b, 7c)",
           "PipeInfer's greatest gains over synchronous speculation. Five slow nodes more: Dolphin "
           "loses marginally, Falcon substantially, Goliath gains. Time to first token sometimes "
           "below iterative's.", constrained_all, constrained),
    Figure("ablations", "Components switched off (Fig. 8)",
           "Without cancellation slower; without continuous speculation severely slower (Falcon "
           "moderately). Multibuffering and asynchronous speculation could not be measured: the "
           "output became incoherent.", ablation_needs, ablations),
    Figure("gpu", "Four GPUs (Fig. 9)",
           "PipeInfer is faster than synchronous speculation in all cases but one (Dolphin 2.9).",
           gpu_needs, gpu),
    Figure("prompts", "From prompt to prompt (Fig. 10)",
           "PipeInfer's speed stays consistent, that of synchronous speculation is erratic.",
           prompts_needs, prompts),
    Figure("acceptance", "Acceptance from 0 to 100 %",
           "Not in the paper, but: 'maintaining high performance even with low speculation "
           "accuracy'.",
           sweep_needs("acceptance-c", "acceptance-goliath", "acceptance-gpu"), acceptance),
    Figure("delay", "Delay of the links, 0 to 75 ms",
           "Not in the paper, but: 'resilience to latency'.", sweep_needs("delay", "delay-gpu"),
           delay),
    Figure("slow", "One slow node",
           "Not in the paper; it splits layers equally.", sweep_needs("slow-planned", "slow-equal"),
           slow),
    Figure("controller", "What tuning while running costs", "Not in the paper.",
           controller_needs, controller),
    Figure("time", "Where the time goes", "Not in the paper.", time_needs, where),
    Figure("cancellation", "How cancellations travel",
           "They hop backwards from stage to stage.", path_needs, paths),
    Figure("drafts", "Which size of draft", "Not in the paper.", draft_needs, drafts),
    Figure("scale", "Up to 256 stages", "The paper stops at 32 nodes.", scale_needs, scale),
)
