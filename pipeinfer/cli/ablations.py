"""What each of PipeInfer's components brings: one job, the same tuning for all.

Nothing but the line "all, tuned" is tuned: all components, and all without each, take turns text by
text, and speeds are compared pair by pair. With --policy published the components are those of the
paper's own policy. With --cluster the cluster is emulated, in virtual time.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.cli.drawing import pyplot
from pipeinfer.cluster.generate import run_request, sampling_params
from pipeinfer.cluster.session import Session
from pipeinfer.config import JobConfig, SamplingConfig
from pipeinfer.core.policy import COMPONENTS, Policy
from pipeinfer.errors import UsageError
from pipeinfer.text_table import aligned

TUNED, ALL, PLAIN, AS_PUBLISHED = "all, tuned", "all", "iterative", "as published"
TEXTS = (
    "def fibonacci(n):\n", "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n", "The old bridge over the river was built in",
    "When the rain stopped, the children",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A line of the table. ablate: the component that is left out, if any."""

    name: str
    ablate: tuple[str, ...] = ()
    tuned: bool = False
    policy: Policy = Policy.PIPEINFER


def variants_of(policy: Policy) -> tuple[Variant, ...]:
    """The lines of the table for a policy with components."""
    own = tuple(Variant(f"without {one.value}", (one.value,), policy=policy)
                for one in COMPONENTS[policy])
    plain = Variant(PLAIN, policy=Policy.ITERATIVE)
    if policy is Policy.PUBLISHED:
        return Variant(ALL, policy=policy), *own, plain
    return (Variant(TUNED, tuned=True), Variant(ALL), *own,
            Variant(AS_PUBLISHED, policy=Policy.PUBLISHED), plain)


VARIANTS = variants_of(Policy.PIPEINFER)


@dataclass(frozen=True, slots=True)
class Sample:
    """One text by one variant. cancelled: of `runs`; right: share of tested guesses."""

    tokens: tuple[int, ...]
    tokens_per_second: float
    runs: int
    cancelled: int
    right: float


Measure = Callable[[Variant, int], Sample]


def samples(count: int, measure: Measure, told: Callable[[str], None] = lambda _: None,
            variants: Sequence[Variant] = VARIANTS) -> dict[str, list[Sample]]:
    """Every variant on every text, in turns; the turn's order goes round, so that no variant always
    follows the same one."""
    found: dict[str, list[Sample]] = {one.name: [] for one in variants}
    for number in range(count):
        first = number % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            told(f"text {number + 1}/{count}: {variant.name}")
            found[variant.name].append(measure(variant, number))
    return found


def rows_of(found: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """A row for each variant: mean speed, and its ratio to all components without tuning, text by
    text (geometric mean; spread: standard deviation of the ratios). equal: whether tokens are."""
    base, rows = found[ALL], []
    for name, own in found.items():
        ratios = [one.tokens_per_second / other.tokens_per_second
                  for one, other in zip(own, base, strict=True) if other.tokens_per_second > 0]
        runs = sum(one.runs for one in own)
        rows.append({
            "variant": name,
            "tokens_per_second": statistics.fmean(one.tokens_per_second for one in own),
            "ratio": math.exp(statistics.fmean(math.log(max(r, 1e-9)) for r in ratios))
            if ratios else 0.0,
            "spread": statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
            "runs": runs, "cancelled": sum(one.cancelled for one in own) / max(runs, 1),
            "right": statistics.fmean(one.right for one in own),
            "equal": all(one.tokens == other.tokens
                         for one, other in zip(own, base, strict=True)),
        })
    return rows


def as_text(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    table = [["", "tokens/s", "of all", "runs", "cancelled", "guesses right", "tokens"]]
    for row in rows:
        spread = f" +-{row['spread']:.2f}" if row["spread"] else ""
        table.append([
            row["variant"], f"{row['tokens_per_second']:.2f}", f"{row['ratio']:.2f}{spread}",
            str(row["runs"]), f"{row['cancelled']:.0%}",
            f"{row['right']:.2f}" if row["right"] else "-", "equal" if row["equal"] else "DIFFER"])
    return "\n".join([title, "", *aligned(table)])


def draw(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of the ratios. Raises UsageError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.0, 0.42 * len(rows) + 1.4), layout="constrained")
    bars = axes.barh([row["variant"] for row in rows], [row["ratio"] for row in rows],
                     xerr=[row["spread"] for row in rows], capsize=3, height=0.6,
                     color=["C1" if row["variant"] in (TUNED, PLAIN) else "C0" for row in rows])
    axes.bar_label(bars, fmt="%.2f", padding=12, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("times the speed of all components, not tuned (bars: standard deviation)")
    axes.set_title(textwrap.fill(title, 80), fontsize=10)
    axes.margins(x=0.15)
    figure.savefig(path, dpi=140)
    plt.close(figure)


# --- real ranks -------------------------------------------------------------------------------


def configs_of(base: JobConfig) -> dict[str, JobConfig]:
    """A config for each variant. Raises UsageError for options that the command decides."""
    own = base.speculation
    if own.ablate or own.decomposer:
        raise UsageError("ablate decides about --ablate and --decomposer: leave them out")
    # a tip that waits for its tokens makes "without continuous" the same as "without async"
    tip = "alone" if own.tip == "auto" else own.tip
    return {one.name: base.replace(
        ablate=one.ablate, adapt=one.tuned, policy=one.policy.value,
        tip=own.tip if one.tuned else tip)
        for one in variants_of(whose(base))}


def whose(base: JobConfig) -> Policy:
    """The policy whose components are left out. Raises UsageError for one that has none."""
    policy = Policy(base.speculation.policy or Policy.PIPEINFER)
    if not COMPONENTS[policy]:
        raise UsageError(f"--policy {policy} has no components to leave out: give pipeinfer or "
                         "published, or leave it out")
    return policy


def measured(session: Session, configs: Mapping[str, JobConfig], prompts: Sequence[Sequence[int]],
             sampling: SamplingConfig, seed: int, n_predict: int) -> Measure:
    """What asks a session. seed: of the first text."""

    def measure(variant: Variant, number: int) -> Sample:
        session.use(configs[variant.name])
        params = sampling_params(sampling, seed + number)
        out = run_request(session, prompts[number % len(prompts)], params, n_predict,
                          ignore_eos=True)
        session.head.drain(configs[variant.name].cluster.timeout)
        return Sample(tuple(out.tokens), out.tokens_per_second, out.lane.runs,
                      out.lane.cancelled_runs, out.acceptance)

    return measure


# --- emulated ---------------------------------------------------------------------------------


def emulated(cluster: str, pair: str, nodes: int, tokens: int) -> Measure:
    """What runs in virtual time. Raises UsageError for unknown profiles."""
    from pipeinfer.emulation import scenarios
    from pipeinfer.emulation.profiles import load_profiles
    from pipeinfer.emulation.scenarios import Experiment
    from pipeinfer.emulation.virtual import simulate

    profiles = load_profiles(None)
    base = Experiment(cluster=cluster, pair=pair, nodes=nodes, tokens=tokens)

    def measure(variant: Variant, number: int) -> Sample:
        experiment = dataclasses.replace(
            base, policy=variant.policy.value, ablate=variant.ablate, adapt=variant.tuned,
            limits=() if variant.tuned else (("join_tip", False),), prompt_seed=number)
        built = scenarios.build(profiles, experiment)
        result = simulate(built.scenario, scenarios.controller_of(built, experiment))
        stats = result.stats
        return Sample(tuple(result.tokens), result.tokens_per_second, stats.runs,
                      stats.cancelled_runs,
                      stats.accepted_speculative / max(stats.guesses_tested, 1))

    return measure
