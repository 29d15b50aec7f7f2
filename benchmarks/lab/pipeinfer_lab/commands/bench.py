"""`pipeinfer bench`: one configuration of an emulated cluster, every policy beside the others.

    pipeinfer bench --cluster c --pair goliath-xwin7b --nodes 8

It runs in virtual time, in one process. The table's "synchronous" is the best of a small grid of
trees and cutoffs, so that it cannot lose by a bad setting; "speculative-published" has the setting
of the paper, and "published" is PipeInfer by the paper.
Knows nothing of figures.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from pipeinfer import host
from pipeinfer.cluster.sizing import JOIN_UP_TO
from pipeinfer.core.grid import parse_widths
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.emulation import scenarios, wide
from pipeinfer.emulation.profiles import Profiles, load_profiles, lookup
from pipeinfer.emulation.scenarios import Built, Experiment, synchronous_grid
from pipeinfer.emulation.virtual import Result, prompt_of
from pipeinfer.errors import UsageError
from pipeinfer.planning.partition import size_text
from pipeinfer.scheduler.controller import TUNABLE
from pipeinfer.scheduler.settings import Limits
from pipeinfer.text_table import aligned
from pipeinfer_lab import sliced, two_drafts
from pipeinfer_lab.sampled import GREEDY, MSS, SHARED, Drawing
from pipeinfer_lab.sliced import SLICED
from pipeinfer_lab.traced import Traced, simulate
from pipeinfer_lab.two_drafts import TwoDrafts

BASELINE = "speculative-published"
PUBLISHED = (("tree_max", 4), ("p_min", 0.1))  #: the paper: trees of four tokens, cutoff 0.1
LABELS = {"iterative": "iterative", BASELINE: "synchronous, tree of 4, cutoff 0.1",
          "speculative": "synchronous, best", "published": "pipeinfer, as published",
          "pipeinfer": "pipeinfer"}
_FIXED = ("policy", "ablations", "n_ctx")  #: limits that other options set


def as_policy(experiment: Experiment, policy: str) -> Experiment:
    """The experiment under a policy of the table but "speculative", which needs the grid."""
    if policy == BASELINE:
        chosen = dict(experiment.limits) | dict(PUBLISHED)
        return dataclasses.replace(experiment, policy=Policy.SPECULATIVE.value,
                                   limits=tuple(chosen.items()))
    return dataclasses.replace(experiment, policy=policy)


def build(profiles: Profiles, experiment: Experiment) -> Built:
    """An experiment's scenario, on a grid or not. Raises UsageError and PlanError."""
    if isinstance(experiment, wide.WideExperiment):
        if experiment.head == SLICED:
            return sliced.build(profiles, experiment)
        return wide.build(profiles, experiment)
    return scenarios.build(profiles, experiment)


def measure(profiles: Profiles, experiment: Experiment, drawing: Drawing = GREEDY
            ) -> dict[str, Any]:
    """Run an experiment in virtual time; its figures as plain data, times in seconds."""
    if isinstance(experiment, TwoDrafts) and experiment.second:
        return figures(*two_drafts.run(profiles, experiment))
    built = drawing.applied(build(profiles, experiment), experiment)
    return figures(built, *simulate(built.scenario, scenarios.controller_of(built, experiment)))


def figures(built: Built, result: Result, traced: Traced) -> dict[str, Any]:
    """What a run showed. tokens_equal: whether they are those of plain decoding."""
    itl = result.itl
    stats = structs.asdict(result.stats)
    scenario = built.scenario
    plain = scenario.pair.plain(prompt_of(scenario), scenario.tokens)
    cells = scenario.context + scenario.prompt + 1
    return {
        "tokens_per_second": result.tokens_per_second, "ttft": itl[0] if itl else 0.0,
        "itl_mean": statistics.fmean(itl) if itl else 0.0,
        "itl_sd": statistics.pstdev(itl) if itl else 0.0,
        "itl_p95": sorted(itl)[int(0.95 * len(itl))] if itl else 0.0,
        "itl_max": max(itl, default=0.0),
        "seconds": result.seconds, "prompt_seconds": result.prompt_seconds,
        "tokens": len(result.tokens), "tokens_equal": result.tokens == plain,
        "memory": list(built.memory), "layers": list(built.split.counts),
        "stage_seconds": [stage.seconds(1) + stage.attention(cells, cells)
                          for stage in scenario.stages],
        "row_cost": built.row_cost,
        "draft_seconds": scenario.draft(1) + scenario.draft_attention(cells, cells),
        "busy": result.busy, "wasted": traced.wasted, "head_busy": result.head_busy,
        "draft_busy": result.draft_busy, "sent_bytes": result.sent_bytes,
        "bytes_per_token": result.sent_bytes / max(len(result.times), 1), **stats,
    }


def is_tuned(profiles: Profiles, experiment: Experiment) -> bool:
    """Whether a controller has a say; without `async` or `continuous` it has none."""
    return scenarios.controller_of(build(profiles, experiment), experiment) is not None


def setting_text(experiment: Experiment) -> str:
    """The tree and cutoff of a synchronous experiment."""
    chosen = dict(experiment.limits)
    return f"tree of {chosen['tree_max']}, cutoff {chosen['p_min']:g}"


# --- the command ------------------------------------------------------------------------------


@click.command()
@click.option("--cluster", default="c", help="Cluster profile [default: c].")
@click.option("--pair", default="dolphin-tinyllama",
              help="Profile of a target and its draft [default: dolphin-tinyllama].")
@click.option("--nodes", type=click.IntRange(0), default=0,
              help="Number of nodes, as the paper counts them [default: all of the cluster].")
@click.option("--policy", "policies", multiple=True,
              help=f"{', '.join(LABELS)} or all; may be repeated [default: all].")
@click.option("--link", default="", help="Link profile [default: that of the cluster].")
@click.option("--delay", type=click.FloatRange(0), default=0.0,
              help="Milliseconds added to every link.")
@click.option("--acceptance", type=click.FloatRange(0, 1), default=None,
              help="Share of positions at which the first draft token is right [default: that of "
                   "the pair].")
@click.option("--slow", default="", metavar="NODE:FACTOR",
              help="Make a node slower, such as 4:2.5 for node 4.")
@click.option("--split", type=click.Choice(["planned", "equal"]), default="planned")
@click.option("--grid", default="", help="Wide stages, such as 2x4 or 4,3.")
@click.option("--head", default=wide.APART,
              type=click.Choice([wide.APART, wide.BESIDE, wide.TURNS, SLICED]),
              help="With --grid: head and draft on a node of their own, on a member's, or "
                   "sharing the first member's in time with the only stage; or sliced over all.")
@click.option("--sum-type", type=click.Choice(list(wide.ITEM_BYTES)), default="f32",
              help="With --grid: type of the sums between members.")
@click.option("--ablate", multiple=True, help="Switch off a component of pipeinfer (repeatable).")
@click.option("--tokens", type=click.IntRange(2), default=512)
@click.option("--prompt-tokens", "prompt", type=click.IntRange(1), default=128)
@click.option("--context", type=click.IntRange(0), default=0,
              help="Tokens that are cached before the prompt; with any, attention counts.")
@click.option("--seeds", type=click.IntRange(1), default=1, help="Number of texts to average over.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help="Fix a limit, such as draft_max=2; the controller does not tune it.")
@click.option("--no-adapt", is_flag=True, help="Do not tune pipeinfer while it runs.")
@click.option("--temp", "temperature", type=click.FloatRange(0), default=0.0,
              help="Temperature of a pair whose tokens are drawn [default: 0, greedy].")
@click.option("--verify", type=click.Choice([SHARED, MSS]), default=SHARED,
              help="With --temp: draft tokens are verified by noise that draft and target share, "
                   "as in jobs, or by SpecInfer's multi-step sampling.")
@click.option("--profiles", "profiles_file", default="", help="TOML file with further profiles.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_command(policies: tuple[str, ...], seeds: int, profiles_file: str, as_json: bool,
                  **given: Any) -> None:
    """Emulate one configuration: speed, latency and memory under each policy.

    \b
    pipeinfer bench --cluster c --pair goliath-xwin7b --nodes 8
    """
    if host.launched_size() > 1:
        raise UsageError("bench runs in one process, in virtual time: start it without mpirun")
    profiles = load_profiles(Path(profiles_file) if profiles_file else None)
    experiment = read_experiment(given)
    drawing = Drawing(given["temperature"], given["verify"])
    drawing.check()
    if isinstance(experiment, wide.WideExperiment) and (
            said := wide.warning(profiles, experiment)):
        click.echo(f"note: {said}", err=True)
    names = read_policies(policies)
    check_ablation(experiment, names)
    data = virtual(profiles, experiment, names, seeds, drawing)
    click.echo(json.dumps(data) if as_json else as_text(data))


def read_policies(names: Sequence[str]) -> list[str]:
    """Policies in the table's order. Raises UsageError."""
    chosen = set(names or ["all"])
    for name in chosen:
        lookup({**LABELS, "all": ""}, name, "policy")
    return [name for name in LABELS if name in chosen or "all" in chosen]


def check_ablation(experiment: Experiment, policies: Collection[str]) -> None:
    """Raise UsageError if --ablate would leave out nothing, or change more than its components."""
    parts = {one for name in policies if name in set(Policy) for one in COMPONENTS[Policy(name)]}
    for name in experiment.ablate:
        if name not in parts:
            raise UsageError(f"--ablate {name} names no component of --policy "
                             f"{' --policy '.join(policies)}: choose another policy or component")
    more = [] if not experiment.adapt or TUNABLE.issuperset(experiment.ablate) else ["--no-adapt"]
    if Ablation.CONTINUOUS in experiment.ablate and 0 < experiment.nodes <= JOIN_UP_TO + 1 \
            and "join_tip" not in dict(experiment.limits):
        more.append("--set join_tip=false")
    if more and Policy.PIPEINFER in policies:
        raise UsageError(f"--ablate {' --ablate '.join(experiment.ablate)} would change more than "
                         f"that: add {' '.join(more)}, here and to the run that you compare with "
                         "(`pipeinfer ablate --cluster` does both)")


def read_experiment(given: Mapping[str, Any]) -> Experiment:
    """The experiment that the options describe, as pipeinfer. Raises UsageError."""
    for name in given["ablate"]:
        lookup({one.value: 1 for one in Ablation}, name, "component")
    slow = None
    if given["slow"]:
        node, _, factor = given["slow"].partition(":")
        try:
            slow = int(node), float(factor)
        except ValueError:
            slow = (-1, 0.0)
        if slow[0] < 0 or not 0 < slow[1] < float("inf"):
            raise UsageError(f"--slow {given['slow']} is not NODE:FACTOR, such as 4:2.5")
        if given["nodes"] and slow[0] >= given["nodes"]:
            raise UsageError(f"--slow {given['slow']}: there are nodes 0 to {given['nodes'] - 1}")
    limits = tuple(read_limit(text) for text in given["settings"])
    grid: dict[str, Any] = {}
    if given["grid"]:
        grid = {"widths": parse_widths(given["grid"]), "head": given["head"],
                "sum_type": given["sum_type"]}
        if slow is not None or given["split"] != "planned":
            raise UsageError("--slow and --split are for pipelines of one rank a stage: leave out "
                             "--grid")
    return (wide.WideExperiment if grid else Experiment)(
        cluster=given["cluster"], pair=given["pair"], nodes=given["nodes"], link=given["link"],
        delay=given["delay"] * 1e-3, acceptance=given["acceptance"], slow=slow,
        split=given["split"], ablate=tuple(given["ablate"]), limits=limits,
        adapt=not given["no_adapt"], prompt=given["prompt"], tokens=given["tokens"],
        context=given["context"], **grid)


def read_limit(text: str) -> tuple[str, float | int | bool]:
    """NAME=VALUE of a field of `Limits`. Raises UsageError."""
    name, _, value = text.partition("=")
    start = Limits(n_ctx=1)
    defaults: dict[str, int | float | bool] = {
        f.name: getattr(start, f.name) for f in structs.fields(Limits) if f.name not in _FIXED}
    default = lookup(defaults, name, "limit")
    words = {"true": True, "false": False, "1": True, "0": False}
    try:
        return name, (words[value] if isinstance(default, bool) else type(default)(value))
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else (
            "a whole number" if isinstance(default, int) else "a number")
        raise UsageError(f"--set {text}: {name} is {kind}") from None


# --- virtual time -----------------------------------------------------------------------------


def virtual(profiles: Profiles, experiment: Experiment, policies: Collection[str], seeds: int,
            drawing: Drawing = GREEDY) -> dict[str, Any]:
    """Every policy over every seed, as plain data; times in seconds."""
    rows = []
    for policy in policies:
        candidates = (synchronous_grid(experiment) if policy == Policy.SPECULATIVE
                      else [as_policy(experiment, policy)])
        if experiment.ablate:
            candidates = [dataclasses.replace(one, ablate=tuple(
                name for name in one.ablate if name in COMPONENTS[Policy(one.policy)]))
                for one in candidates]
        chosen, runs = max(
            ((one, [measure(profiles, dataclasses.replace(one, prompt_seed=seed), drawing)
                    for seed in range(seeds)]) for one in candidates),
            key=lambda entry: statistics.fmean(r["tokens_per_second"] for r in entry[1]))
        speeds = [run["tokens_per_second"] for run in runs]
        rows.append({
            "policy": policy, "tokens_per_second": statistics.fmean(speeds),
            "spread": statistics.stdev(speeds) if seeds > 1 else 0.0,
            "ttft": statistics.fmean(run["ttft"] for run in runs),
            "itl_mean": statistics.fmean(run["itl_mean"] for run in runs),
            "memory_mean": statistics.fmean(runs[0]["memory"]),
            "tokens_equal": all(run["tokens_equal"] for run in runs),
            "setting": setting_text(chosen) if chosen.policy == Policy.SPECULATIVE else "",
            "ablated": list(chosen.ablate), "tuned": is_tuned(profiles, chosen), "runs": runs,
        })
    return {"experiment": dataclasses.asdict(experiment) | dataclasses.asdict(drawing),
            "seeds": seeds, "policies": rows}


def as_text(data: Mapping[str, Any]) -> str:
    """The result of `measure` as a table of text."""
    experiment = data["experiment"]
    speed = {row["policy"]: row["tokens_per_second"] for row in data["policies"]}
    head = ["policy", "tokens/s", "x iterative", "x synchronous", "TTFT", "ITL", "memory/node",
            "tokens"]
    table = [head]
    for row in data["policies"]:
        spread = f" +-{row['spread']:.2f}" if data["seeds"] > 1 else ""
        ratios = [f"{row['tokens_per_second'] / speed[name]:.2f}" if name in speed else "-"
                  for name in ("iterative", "speculative")]
        table.append([
            LABELS[row["policy"]], f"{row['tokens_per_second']:.2f}{spread}", *ratios,
            f"{1e3 * row['ttft']:.0f} ms", f"{1e3 * row['itl_mean']:.0f} ms",
            size_text(row["memory_mean"]), "equal" if row["tokens_equal"] else "DIFFER"])
    context = f" and {experiment['context']} cached ones" if experiment["context"] else ""
    lines = [
        f"cluster {experiment['cluster']}, {experiment['pair']}, {data['seeds']} x "
        f"{experiment['tokens']} tokens after {experiment['prompt']}{context}, virtual time", "",
        *aligned(table)]
    for row in data["policies"]:
        first = row["runs"][0]
        if row["policy"] == Policy.PIPEINFER:
            lines += ["", f"{len(first['stage_seconds'])} stages, slowest "
                      f"{1e3 * max(first['stage_seconds']):.1f} ms, a further row "
                      f"+{first['row_cost']:.0%}; draft {1e3 * first['draft_seconds']:.1f} ms per "
                      f"token; {first['runs']} runs, {first['cancelled_runs']} cancelled"]
        if row["ablated"]:
            tuned = "tuned" if row["tuned"] else "not tuned"
            lines.append(f"{LABELS[row['policy']]}: without {' and '.join(row['ablated'])}, {tuned}"
                         if row["policy"] == Policy.PIPEINFER else
                         f"{LABELS[row['policy']]}: without {' and '.join(row['ablated'])}")
        if row["setting"] and row["policy"] == Policy.SPECULATIVE:
            lines.append(f"{LABELS[row['policy']]}: {row['setting']}")
    return "\n".join(lines)
