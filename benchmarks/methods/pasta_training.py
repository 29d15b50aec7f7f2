"""PASTA's quality against speed after preference learning, in the way of the paper's Figure 4.

    python -m benchmarks.methods.pasta_training run     # results/pasta-training.json; resumes
    python -m benchmarks.methods.pasta_training draw    # docs/pasta-lambda.png, and a table

Starts from the embedded task model (its PASTA format is stage 1). For every lambda it samples
responses at temperature 1, scores them by theoretical speedup and share of right sentences, and
trains with BoNBoN; a second round samples from the first round's model. Every model is decoded
greedily on the same held-out tasks. Speedups are steps of the sequential answer over steps of an
ideal interpreter, aggregated by geometric mean; no clock is involved.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
import numpy as np
import torch

from benchmarks import pictures
from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pair.restore import restore
from pipeinfer.lab.training.pasta import preference, rounds
from pipeinfer.lab.training.pasta.preference import Preference
from pipeinfer.lab.training.tasks import programs, reference, tasks
from pipeinfer.lab.training.tasks.markup import Codec

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parents[1] / "results" / "pasta-training.json"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pasta-lambda.png"
MODEL = Path(__file__).resolve().parents[2] / "pipeinfer" / "models" / "embedded" / "task.gguf"
WEIGHTS = (1.0, 2.0, 4.0, 8.0, math.inf)


def evaluate(model: Llama, codec: Codec, asked: Sequence[tasks.Task], form: str) -> dict[str, Any]:
    """Exact match, score, steps and response syncs of greedy decoding, in all and by kind."""
    started = [programs.start(form, codec, task.question) for task in asked]
    outcomes = reference.run(model, started)
    rows = [
        {
            "kind": task.kind,
            "exact": tasks.exact_match(task, outcome.text),
            "score": tasks.score(task, outcome.text),
            "steps": outcome.steps,
            "promises": outcome.text.count("<promise"),
            "syncs": outcome.text.count("<sync/>"),
        }
        for task, outcome in zip(asked, outcomes, strict=True)
    ]
    return {"rows": rows}


def summary(rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of quality, geometric mean of speedup over the sequential rows ``base``."""
    ratios = [b["steps"] / r["steps"] for r, b in zip(rows, base, strict=True)]
    return {
        "exact": float(np.mean([r["exact"] for r in rows])),
        "score": float(np.mean([r["score"] for r in rows])),
        "speedup": float(np.exp(np.mean(np.log(ratios)))),
        "promises": float(np.mean([r["promises"] for r in rows])),
    }


def name_of(weight: float) -> str:
    return "inf" if math.isinf(weight) else f"{weight:g}"


@click.group()
def main() -> None:
    """Quality and speed of PASTA models by lambda and round."""


@main.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=MODEL)
@click.option("--prompts", default=96, show_default=True)
@click.option("--samples", default=8, show_default=True)
@click.option("--steps", default=60, show_default=True)
@click.option("--rate", default=1e-4, show_default=True)
@click.option("--held-out", default=100, show_default=True)
@click.option("--rounds", "count", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True)
def run(
    model: Path,
    prompts: int,
    samples: int,
    steps: int,
    rate: float,
    held_out: int,
    count: int,
    seed: int,
) -> None:
    """Train and evaluate the suite; what a results file already holds is kept."""
    torch.set_num_threads(1)
    stage1, codec = restore(model)
    stage1.eval()
    asked = list(islice(tasks.stream([seed, 11], held_out=True), held_out))
    settings = {"prompts": prompts, "samples": samples, "steps": steps, "rate": rate}
    result: dict[str, Any] = {"settings": settings | {"held_out": held_out, "seed": seed}}
    if RESULTS.exists():
        stored = json.loads(RESULTS.read_text())
        result = stored if stored["settings"] == result["settings"] else result
    points: dict[str, Any] = result.setdefault("points", {})

    def keep(name: str, network: Llama, form: str) -> None:
        if name not in points:
            started = time.monotonic()
            points[name] = evaluate(network, codec, asked, form)
            base = points["sequential"]["rows"]
            click.echo(f"{name}: {summary(points[name]['rows'], base)}")
            click.echo(f"  {time.monotonic() - started:.0f} s")
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(result))

    keep("sequential", stage1, "plain")
    keep("sft", stage1, "pasta")
    source = rounds.generated(prompts, seed)
    questions = {number: source.prompts(number) for number in range(1, count + 1)}
    baseline = {n: preference.sequential_lengths(stage1, codec, q) for n, q in questions.items()}
    first = preference.sample(
        stage1,
        codec,
        questions[1],
        source.quality,
        samples=samples,
        seed=seed + 1000,
        baseline=baseline[1],
    )
    result["stage1_samples"] = {
        "speedup": float(np.exp(np.mean([np.log(s.speedup) for p in first for s in p.samples]))),
        "quality": float(np.mean([s.quality for p in first for s in p.samples])),
        "layouts": sum(len(p.samples) for p in first) / (prompts * samples),
    }
    for weight in WEIGHTS:
        network = copy.deepcopy(stage1)
        chosen = Preference(weight=weight, samples=samples, steps=steps, rate=rate, seed=seed)
        for number in range(1, count + 1):
            if all(f"{name_of(weight)}/{n}" in points for n in range(number, count + 1)):
                break
            rounds.one_round(
                network,
                codec,
                source,
                chosen,
                number,
                pools=first if number == 1 else None,
                baseline=lambda _, n=number: baseline[n],
                report=click.echo,
            )
            keep(f"{name_of(weight)}/{number}", network, "pasta")


@main.command()
def draw() -> None:
    """The picture and the table."""
    result = json.loads(RESULTS.read_text())
    points = result["points"]
    base = points["sequential"]["rows"]
    figures = {name: summary(point["rows"], base) for name, point in points.items()}
    print("| model | exact | score | speedup | promises |\n|---|---|---|---|---|")
    for name, row in figures.items():
        print(
            f"| {name} | {row['exact']:.2f} | {row['score']:.3f} | {row['speedup']:.2f} "
            f"| {row['promises']:.1f} |"
        )
    print("\n| model | " + " | ".join(tasks.KINDS) + " |")
    print("|---|" + "---|" * len(tasks.KINDS))
    for name, point in points.items():
        cells = []
        for kind in tasks.KINDS:
            pairs = [(r, b) for r, b in zip(point["rows"], base, strict=True) if r["kind"] == kind]
            row = summary([r for r, _ in pairs], [b for _, b in pairs])
            cells.append(f"{row['score']:.2f} at {row['speedup']:.2f}x")
        print(f"| {name} | " + " | ".join(cells) + " |")
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for number, colour, mark in ((1, "#7a8594", "o"), (2, "#2563c9", "s")):
        names = [f"{name_of(w)}/{number}" for w in WEIGHTS if f"{name_of(w)}/{number}" in figures]
        if not names:
            continue
        rows = [figures[name] for name in names]
        axes.plot(
            [r["speedup"] for r in rows],
            [100 * r["score"] for r in rows],
            mark,
            color=colour,
            label=f"round {number}",
            linestyle="-",
            linewidth=0.8,
        )
        for name, row in zip(names, rows, strict=True):
            weight = name.split("/")[0].replace("inf", "\u221e")
            axes.annotate(
                f"\u03bb={weight}",
                (row["speedup"], 100 * row["score"]),
                fontsize=8,
                xytext=(4, 4 if number == 2 else -10),
                textcoords="offset points",
            )
    for name, label, mark in (("sequential", "sequential", "D"), ("sft", "stage 1 (SFT)", "*")):
        row = figures[name]
        axes.plot(
            [row["speedup"]],
            [100 * row["score"]],
            mark,
            color="#c2601c",
            markersize=9,
            label=label,
            linestyle="none",
        )
    axes.set_xlabel("theoretical speedup over the sequential answer (geometric mean)")
    axes.set_ylabel("sentences right, %")
    axes.grid(alpha=0.3)
    axes.legend()
    pictures.save(figure, PICTURE, 110)
    print(PICTURE)


if __name__ == "__main__":
    main()
