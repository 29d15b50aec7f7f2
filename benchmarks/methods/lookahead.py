"""Tokens per step of lookahead decoding against W, N and G, on held-out text.

    python -m benchmarks.methods.lookahead run      # records/raw/lookahead.json; half an hour
    python -m benchmarks.methods.lookahead draw     # docs/lookahead.png, tables on standard output

The synchronous policy, greedy, `--exact off` (one run per step, however wide; tokens may differ
from plain ones in near-ties). A step is a run of generated tokens; the prompt's runs are not
counted, so S = (tokens - 1) / steps, the first token being the prompt's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl

from benchmarks import pictures
from benchmarks.methods.heldout import prompts
from benchmarks.records import raw_files
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.core.types import SamplingParams
from pipeinfer.scheduler.hint_rows import HintRows
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.kit.configs import job_config

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = raw_files.HERE / "lookahead.json"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "lookahead.png"
#: (label, W, N, G, n-grams of prompt and output); the paper's Table 3, then Figure 4's sweep
TABLE = (("(5,15,15)", 15, 5, 15, False), ("(5,15,15), text's n-grams too", 15, 5, 15, True),
         ("(5,30,1)", 30, 5, 1, False), ("(5,1,30)", 1, 5, 30, False),
         ("text's n-grams alone, G=15", 0, 5, 15, True),
         ("text's n-grams alone, G=1", 0, 5, 1, True))
SMALL = (("(3,5,2)", 5, 3, 2, True), ("(3,5,2), window alone", 5, 3, 2, False),
         ("(4,4,1)", 4, 4, 1, True), ("(3,4,3)", 4, 3, 3, True), ("(2,7,7)", 7, 2, 7, True),
         ("(4,3,2)", 3, 4, 2, True), ("(3,0,7)", 0, 3, 7, True), ("(4,0,5)", 0, 4, 5, True),
         ("(5,0,3)", 0, 5, 3, True))
DEFAULT = ("(5,2,2)", 2, 5, 2, True)
SWEEP = tuple(("", w, n, w, False) for n in (2, 3, 5, 7) for w in (1, 2, 4, 8, 16, 32))


def measure(session: Session, setting: tuple[str, int, int, int, bool], texts: list[list[int]],
            tokens: int, params: SamplingParams) -> dict[str, Any]:
    """Tokens and steps of one setting over all texts."""
    label, window, ngram, most, pool = setting
    session.head.drain(60)
    scheduler = session.head.scheduler
    scheduler.speculation.hints = HintRows(Lookahead(window, ngram, most, prompt_pool=pool))
    steps = made = 0
    for text in texts:
        out = run_request(session, text, params, tokens, ignore_eos=True)
        steps += out.lane.runs - -(-len(text) // session.limits.chunk)
        made += len(out.tokens) - 1
    return {"label": label, "W": window, "N": ngram, "G": most, "pool": pool, "tokens": made,
            "steps": steps, "S": made / steps, "rows": (window + most) * (ngram - 1),
            "temperature": params.temperature}


def expected(alpha: float, rare: float, gamma: int, width: int) -> float:
    """S (docs/algorithms.md 6.7): one step in `rare` speculates well, `width` candidates of
    `gamma`."""
    good = gamma + 1 - sum((1 - alpha**i) ** width for i in range(1, gamma + 1))
    return (rare - 1 + good) / rare


def fit(found: list[dict[str, Any]]) -> tuple[float, float, float]:
    """alpha and f that come closest to all points, and the root mean square difference."""
    best = (math.inf, 0.0, 1.0)
    for a in range(2, 99, 2):
        for f in (k / 4 for k in range(4, 80)):
            wrong = math.fsum((expected(a / 100, f, p["N"] - 1, p["W"]) - p["S"]) ** 2
                              for p in found)
            best = min(best, (wrong, a / 100, f))
    return best[1], best[2], math.sqrt(best[0] / len(found))


@click.group()
def main() -> None:
    """See the module docstring."""


@main.command()
@click.option("--texts", default=12, show_default=True)
@click.option("--prompt", default=200, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=129, show_default=True, help="Tokens generated for each.")
def run(texts: int, prompt: int, tokens: int) -> None:
    """Measure every setting; those that are in the file already stay."""
    config = job_config(
        policy="speculative",
        proposer=("lookahead",),
        exact="off",
        ctx=1024,
        threads=1,
        partitions=100,
        lookahead_window=32,
        lookahead_ngram=7,
        lookahead_candidates=32,
        adapt=False,
    )
    found = raw_files.read(RESULTS) if RESULTS.exists() else []
    done = {(p["W"], p["N"], p["G"], p["pool"], p["temperature"]) for p in found}
    sampled = SamplingParams(0.8, 40, 0.95, 0.05, key=7)
    todo = [(s, SamplingParams()) for s in (*TABLE, *SMALL, DEFAULT, *SWEEP)]
    todo += [(s, sampled) for s in (*TABLE, *SMALL[:2], DEFAULT, SMALL[-1])]
    todo += [(s, sampled) for s in SWEEP if s[2] == 5 and s[1] < 32]
    RESULTS.parent.mkdir(exist_ok=True)
    with join(config).lead() as session:
        held_out = prompts(session.tokenizer, texts, prompt)
        for setting, params in todo:
            if (*setting[1:], params.temperature) in done:
                continue
            found.append(measure(session, setting, held_out, tokens, params))
            click.echo(json.dumps(found[-1]))
            raw_files.write(RESULTS, found)


def curves(found: list[dict[str, Any]]) -> dict[tuple[float, int], list[dict[str, Any]]]:
    """The sweep's points by (temperature, N), in order of W."""
    lines: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for point in sorted((p for p in found if not p["label"]), key=lambda p: p["W"]):
        lines.setdefault((point["temperature"], point["N"]), []).append(point)
    return dict(sorted(lines.items()))


def table_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """The record `lookahead-s`: S of each named setting, greedy and at T=0.8."""
    speeds = {(p["label"], p["temperature"]): f"{p['S']:.2f}" for p in found}
    return [[p["label"], str(p["rows"]), f"{p['S']:.2f}", speeds.get((p["label"], 0.8), "")]
            for p in found if p["label"] and not p["temperature"]]


def sweep_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """The record `lookahead-figure-4`: S by W = G, and the formula's fit."""
    rows = []
    for (heat, size), points in curves(found).items():
        alpha, rare, wrong = fit(points)
        by_width = {p["W"]: f"{p['S']:.2f}" for p in points}
        rows.append([f"{size}, {heat or 'greedy'}", *(by_width.get(2**k, "") for k in range(6)),
                     f"{alpha:.2f}, {rare:.2f} ({wrong:.2f})"])
    return rows


@main.command()
def draw() -> None:
    """S against rows, with the formula fitted to each N."""
    found = raw_files.read(RESULTS)
    figure, axis = plt.subplots(figsize=(7, 4.2))
    colours = {2: "#7a8594", 3: "#2563c9", 5: "#c2601c", 7: "#2e8b57"}
    for (heat, size), points in curves(found).items():
        alpha, rare, _ = fit(points)
        rows = [p["rows"] for p in points]
        axis.plot(rows, [p["S"] for p in points], color=colours[size], lw=1.5,
                  marker="^" if heat else "o", ls="--" if heat else "-",
                  label=f"N = {size}" + (f", T = {heat}" if heat else ""))
        axis.plot(rows, [expected(alpha, rare, size - 1, p["W"]) for p in points],
                  color=colours[size], lw=1, ls=":")
    axis.set_xscale("log", base=2)
    ticks = [2**k for k in range(1, 9)]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("rows beside the current token, (W + G)(N - 1) with W = G")
    axis.set_ylabel("tokens per step (S)")
    axis.grid(alpha=0.3)
    axis.legend(title="dotted: formula of section 6.7, fitted", frameon=False)
    figure.tight_layout()
    pictures.save(figure, PICTURE, 150)
    for row in (*table_rows(found), *sweep_rows(found)):
        click.echo(" | ".join(row))


if __name__ == "__main__":
    main()
