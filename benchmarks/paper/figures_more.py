"""Figures that the paper does not have: sweeps, tuning, time, cancellation, scale."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.patches import Patch

from benchmarks.paper.plots import (
    POLICIES,
    SMALL,
    Drawn,
    Row,
    Size,
    Stat,
    base,
    compare,
    compared,
    from_to,
    panels,
    plain,
    rows_of,
    save,
    stat,
    texts,
    title_of,
)
from benchmarks.paper.results import Job, Store, traced
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer.scheduler.controller import cutoff

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


def _sweep(store: Store, size: Size, names: Sequence[str]
           ) -> dict[str, list[tuple[float, dict[str, Stat]]]]:
    return {name: [(x, compare(store, point, size.few)) for x, point in sweep_points(size)[name]]
            for name in names}


def delay(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    for name, points in _sweep(store, size, ("delay", "delay-gpu")).items():
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


def slow(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    names = ("slow-equal", "slow-planned")
    found = _sweep(store, size, names)
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
    axis.margins(x=0.03)
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


# --- scale, cancellation, where the time goes ----------------------------------------------------

STAGES = (8, 16, 32, 64, 128, 256)


def scale_runs(size: Size) -> list[tuple[int, dict[str, Experiment]]]:
    stages = [8, 16, 32] if size.quick else STAGES
    return [(n, {p: base("c", "deep-tinyllama", size, policy=p, split="equal",
                         nodes=n + (p == "pipeinfer"), tokens=min(256, size.tokens))
                 for p in ("iterative", "pipeinfer")}) for n in stages]


def scale_needs(size: Size) -> list[Job]:
    return [Job(one, timed=True) for _, runs in scale_runs(size) for one in runs.values()]


def scale(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    found = [(n, {p: store.get(one, timed=True) for p, one in runs.items()})
             for n, runs in scale_runs(size)]
    stages = [n for n, _ in found]

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
    for name, label in plots:
        drawn.rows += [Row("scale", f"{n} stages", policy, label, metric(records[policy], name, n))
                       for policy in ("iterative", "pipeinfer") for n, records in found]
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


def paths(store: Store, size: Size, _: Path) -> Drawn:
    drawn = Drawn()
    seeds = size.few
    gains = []
    for name in ("none", "backward", "direct"):
        for label, point in path_points(size):
            one = stat(store, path_variants(point)[name], seeds)
            reference = stat(store, path_variants(point)["none"], seeds)
            assert one is not None
            assert reference is not None
            ratio = one.mean() / reference.mean()
            share = statistics.fmean(sum(r["wasted"]) / sum(r["busy"]) for r in one.records)
            case = label.replace("\n", " ")
            drawn.rows += [Row("cancellation", case, name, "speed over none", ratio, 0.0, seeds),
                           Row("cancellation", case, name, "dead share of stage time", share, 0.0,
                               seeds)]
            if name == "direct":
                back = stat(store, path_variants(point)["backward"], seeds)
                gains.append((one.mean() / back.mean(), ratio))
    drawn.measured.append(
        f"Cancellation makes runs {from_to(g[1] for g in gains)} times as fast; sent to all stages "
        f"at once instead of from stage to stage {from_to(g[0] for g in gains)} times.")
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
    for axis, (pair, point) in zip(axes, points, strict=True):
        labels, stacks = [], []
        for policy in ("iterative", "speculative", "pipeinfer"):
            chosen = compare(store, point, size.seeds, (policy,))[policy].experiment
            split = _time_split(*traced(chosen))
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
    return drawn


def _time_split(result: Any, traced: Any) -> list[dict[str, float]]:
    start, end = result.times[0], result.times[-1]
    split = [dict.fromkeys(("token", "guess", "dead", "skipped"), 0.0) for _ in result.busy]
    for stage, _, begin, stop, fate in traced.spans:
        inside = min(stop, end) - max(begin, start)
        if inside > 0 and fate in split[stage]:
            split[stage][fate] += inside / (end - start)
    return split
