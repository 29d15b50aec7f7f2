"""The paper's figures 4 to 10."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from benchmarks.paper.plots import (
    CLUSTERS,
    COLOUR,
    MARK,
    NAME,
    POLICIES,
    SMALL,
    TABLE_I,
    TABLE_III,
    Drawn,
    Row,
    Size,
    Stat,
    band,
    base,
    compare,
    compared,
    from_to,
    legend,
    options,
    panels,
    rows_of,
    save,
    stat,
    texts,
    title_of,
)
from benchmarks.paper.results import Job, Store, profiles
from pipeinfer.emulation import scenarios
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer_lab.commands import bench

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
    for axis, (faster, policy) in zip(axes, (("published", bench.BASELINE),
                                             ("pipeinfer", "speculative")), strict=True):
        for pair, mark in zip(_pairs(size), "osv^Dx", strict=False):
            ratios = [grid[pair, n][faster].mean() / grid[pair, n][policy].mean()
                      for n in _nodes(size)]
            axis.plot(range(len(ratios)), ratios, marker=mark, ms=5,
                      label=profiles().pair(pair).title)
        if faster == "published":  # the same two policies as there
            band(axis, 1.5, 2.15, "paper: 1.5 to 2.15")
        axis.set_xticks(range(len(_nodes(size))), [str(n) for n in _nodes(size)])
        axis.set(xlabel="nodes", ylabel="times as fast", ylim=(0.8, None),
                 title=f"{NAME[faster]}, over {NAME[policy]}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  fontsize=9)
    save(figure, out, "gain", "The gain over synchronous speculation. Left: PipeInfer by the "
         "paper's rules over trees of 4, cutoff 0.1, the paper's own comparison; right: this "
         "project's policy over the best of trees of 1, 2, 4, 8 and cutoffs 0, 0.4 for each "
         "point.", drawn)
    published = {key: stats["published"].mean() / stats[bench.BASELINE].mean()
                 for key, stats in grid.items()}
    drawn.measured.append(
        f"{NAME['published']}, over {NAME[bench.BASELINE]}: {from_to(published.values())} times as "
        f"fast (8 nodes: {from_to(v for (_, n), v in published.items() if n == 8)}).")
    plain = {key: stats["published"].mean() / stats["iterative"].mean()
             for key, stats in grid.items()}
    slowest = min(plain, key=lambda key: plain[key])
    drawn.measured.append(
        f"{NAME['published']}, over iterative: {from_to(plain.values())} times as fast (least: "
        f"{slowest[0]}, {slowest[1]} nodes).")
    for (pair, n), stats in grid.items():
        drawn.rows += rows_of("speed", f"c {n} nodes {pair}", stats)
    for policy in (bench.BASELINE, "speculative", "published", "iterative"):
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
        aside = 0.05 * (POLICIES.index(policy) - 2)  # so that bars do not hide one another
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
    for policy in ("pipeinfer", "published", "speculative", bench.BASELINE):
        drawn.measured.append(
            f"{NAME[policy]}: {from_to(r[policy] for r in ratios.values())} of iterative's time "
            "to the first token.")
    drawn.measured.append(
        "PipeInfer's own policy drafts behind the prompt, and its time is shorter where the draft "
        "has guessed the first token: the spread is that of right and wrong guesses. As published "
        "nothing is drafted before the prompt is back.")
    worst = max(ratios.items(), key=lambda item: item[1]["pipeinfer"])
    drawn.aims.append(("time to first token at most 5 % over iterative's, cluster C, every pair",
                       f"worst {worst[1]['pipeinfer']:.3f} ({worst[0][0]}, {worst[0][1]} nodes)",
                       worst[1]["pipeinfer"] <= 1.05))
    longest = max((record["ttft"] / stats["iterative"].mean("ttft"), key)
                  for key, stats in grid.items() for record in stats["pipeinfer"].records)
    drawn.measured.append(f"The longest of any text is {longest[0]:.3f} times iterative's "
                          f"({longest[1][0]}, {longest[1][1]} nodes).")
    return drawn


# --- both readings of the acceptance ----------------------------------------------------------

READINGS = (bench.BASELINE, "published", "pipeinfer")


def _read(pair: str, size: Size, *, drafted: bool) -> Experiment:
    return base("c", pair, size, nodes=8,
                acceptance=profiles().pair(pair).positions if drafted else None)


def readings_needs(size: Size) -> list[Job]:
    return [job for pair in _pairs(size) for drafted in (False, True) for job in compared(
        _read(pair, size, drafted=drafted), size.few, ("iterative", *READINGS))]


def readings(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    for drafted, name in ((False, "of positions"), (True, "of drafted tokens")):
        gains: dict[str, list[float]] = {}
        for pair in _pairs(size):
            stats = compare(store, _read(pair, size, drafted=drafted), size.few,
                            ("iterative", *READINGS))
            plain, case = stats["iterative"].mean(), f"c 8 nodes {pair}, a share {name}"
            counts = [sum(one[key] for one in stats[bench.BASELINE].records)
                      for key in ("accepted_speculative", "drafted")]
            drawn.rows.append(Row("readings", case, bench.BASELINE, "accepted of drafted",
                                  counts[0] / counts[1]))
            for policy in READINGS:
                gain = stats[policy].mean() / plain
                gains.setdefault(policy, []).append(gain)
                drawn.rows.append(Row("readings", case, policy, "over iterative", gain))
            drawn.rows.append(Row("readings", case, "published", f"over {bench.BASELINE}",
                                  stats["published"].mean() / stats[bench.BASELINE].mean()))
        drawn.measured.append(f"The paper's acceptance as a share {name}, times iterative: " + ", "
                              .join(f"{NAME[p]} {from_to(g)}" for p, g in gains.items()) + ".")
    return drawn


# --- Figs. 7b, 7c: gigabit --------------------------------------------------------------------


def constrained_needs(size: Size) -> list[Job]:
    return [job for pair in size.thin(SMALL) for cluster, n in CLUSTERS
            for job in compared(base(cluster, pair, size, nodes=n), size.seeds)]


def constrained(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    pairs = size.thin(SMALL)
    grid = {(pair, c, n): compare(store, base(c, pair, size, nodes=n), size.seeds)
            for pair in pairs for c, n in CLUSTERS}
    gains: dict[str, list[float]] = {bench.BASELINE: [], "speculative": [], "published": []}
    first: list[float] = []
    plain = {f"{pair} on {c} {n}": stats["published"].mean() / stats["iterative"].mean()
             for (pair, c, n), stats in grid.items()}
    drawn.measured.append(f"{NAME['published']}, over iterative: {from_to(plain.values())} times "
                          f"as fast (least: {min(plain, key=lambda case: plain[case])}).")
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

ABLATIONS = {"pipeinfer": ("cancel", "continuous", "alternatives", "async"),
             "published": ("cancel", "continuous", "multibuffer", "async")}


def ablation_options(pair: str, size: Size, off: str, policy: str) -> list[Experiment]:
    """What is tried, the best of which counts, so that no variant loses by a setting."""
    start = base("c", pair, size, nodes=8, adapt=False, ablate=(off,) if off else (),
                 policy=policy)
    if policy == "published":  # its batches are what they are; the paper enlarges the single run
        settings: list[dict[str, Any]] = [{"tree_max": 8}] if off == "continuous" else [{}]
    elif off == "continuous":
        settings = [{"tree_max": tree} for tree in scenarios.TREES]
    elif off == "async":
        settings = [{"tree_max": tree, "p_min": p}
                    for tree in scenarios.TREES for p in scenarios.CUTOFFS]
    else:
        settings = [{"draft_max": batch} for batch in (1, 2)]
    return [dataclasses.replace(start, limits=tuple(one.items())) for one in settings]


def ablation_needs(size: Size) -> list[Job]:
    return [Job(run) for pair in size.thin(SMALL)
            for option in [base("c", pair, size, nodes=8),
                           *(o for policy, parts in ABLATIONS.items() for off in ("", *parts)
                             for o in ablation_options(pair, size, off, policy))]
            for run in texts(option, size.seeds)]


def ablations(store: Store, size: Size, out: Path) -> Drawn:
    drawn = Drawn()
    _ablations(store, size, out, drawn, "pipeinfer")
    _ablations(store, size, out, drawn, "published")
    return drawn


def _ablations(store: Store, size: Size, out: Path, drawn: Drawn, policy: str) -> None:
    own, published, pairs = ABLATIONS[policy], policy == "published", size.thin(SMALL)
    by_pair = {}
    for pair in pairs:
        tuned = [] if published else [stat(store, base("c", pair, size, nodes=8), size.seeds)]
        found = [[stat(store, o, size.seeds) for o in ablation_options(pair, size, off, policy)]
                 for off in ("", *own)]
        by_pair[pair] = tuned + [max((s for s in one if s is not None), key=Stat.mean)
                                 for one in found]
        _contributions(drawn, pair, policy, by_pair[pair])
    if published:
        _draw_ablations(by_pair, out, drawn)


def _draw_ablations(by_pair: dict[str, list[Stat]], out: Path, drawn: Drawn) -> None:
    labels = ["all", "no\ncancel", "no con-\ntinuous", "no multi-\nbuffer", "no\nasync"]
    colours = ["#5b8fe0", "#9aa7b8", "#9aa7b8", "#c98b3c", "#c98b3c"]
    figure, axes = panels(len(by_pair), width=4.0, height=3.1)
    for axis, (pair, stats) in zip(axes, by_pair.items(), strict=True):
        axis.bar(range(len(stats)), [s.mean() for s in stats], 0.7, color=colours,
                 yerr=[s.spread() for s in stats], error_kw={"lw": 1, "capsize": 3})
        axis.set_xticks(range(len(stats)), labels, fontsize=8)
        axis.grid(axis="x", visible=False)
        axis.set(title=title_of(pair), ylabel="tokens/s")
    figure.legend(handles=[Patch(color="#5b8fe0", label="everything on"),
                           Patch(color="#9aa7b8", label="in the paper too"),
                           Patch(color="#c98b3c", label="not measurable in the paper")],
                  loc="outside upper center", ncols=3)
    save(figure, out, "ablations-published", "Components of the policy that the paper describes, "
         "each switched off; 8 nodes of cluster C, nothing is tuned. Without continuous "
         "speculation the single run has up to 8 guesses instead of micro-batches of 3.", drawn)


def _contributions(drawn: Drawn, pair: str, policy: str, stats: Sequence[Stat]) -> None:
    """Rows and a sentence. stats: tuned where the policy can be, all, without each."""
    own, case = ABLATIONS[policy], f"c 8 nodes {pair}"
    name = "ablations" if policy == "pipeinfer" else "ablations-published"
    labels = ["all, tuned", "all"][-(len(stats) - len(own)):]
    full, parts = stats[len(labels) - 1], []
    for off, one in zip(own, stats[len(labels):], strict=True):
        paired = [a["tokens_per_second"] / b["tokens_per_second"] - 1
                  for a, b in zip(full.records, one.records, strict=True)]
        spread = statistics.stdev(paired) if len(paired) > 1 else 0.0
        mean = statistics.fmean(paired)
        parts.append(f"{off} {mean:+.0%} (+-{spread:.0%})")
        drawn.rows.append(Row(name, case, f"without {off}", "contribution", mean, spread,
                              len(paired)))
    for label, one in zip([*labels, *(f"without {a}" for a in own)], stats, strict=True):
        drawn.rows += [Row(name, case, label, metric, one.mean(metric), one.spread(metric),
                           len(one.records))
                       for metric in ("tokens_per_second", "itl_mean", "ttft")]
    drawn.measured.append(f"{pair}, {NAME[policy]}: each component makes the whole faster by "
                          f"{', '.join(parts)}.")


# --- Figs. 9, 10: GPUs ------------------------------------------------------------------------


def gpu_needs(size: Size) -> list[Job]:
    return [job for pair in size.thin(TABLE_III)
            for job in compared(base("gpu", pair, size), size.seeds)]


def gpu(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    pairs = size.thin(TABLE_III)
    groups = [compare(store, base("gpu", pair, size), size.seeds) for pair in pairs]
    gains: dict[str, dict[str, float]] = {
        bench.BASELINE: {}, "speculative": {}, "published": {}, "iterative": {}}
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


def prompts(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    parts = []
    for policy in POLICIES:
        found = [[store.get(run)["tokens_per_second"] for run in runs]
                 for runs in _prompt_runs(size, policy)]
        values = max(found, key=statistics.fmean)
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        drawn.rows.append(Row("prompts", "gpu senku-tinyllama", policy, "tokens_per_second", mean,
                              spread, len(values)))
        parts.append(f"{NAME[policy]} {mean:.1f} +-{spread:.1f} tokens/s ({spread / mean:.0%})")
    drawn.measured.append("Mean and standard deviation over prompts: " + "; ".join(parts) + ".")
    return drawn
