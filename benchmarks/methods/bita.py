"""Tokens per step of BiTA on held-out text: kinds of prompts, shapes of the tree.

    python -m benchmarks.methods.bita tune --work .work/bita  # three adapters, an hour on one core
    python -m benchmarks.methods.bita run --work .work/bita      # results/bita.json
    python -m benchmarks.methods.bita tables

Greedy, on the torch backend, `--exact off`. A step is a run that verifies, with the run of masks
behind it if there is one; the prompt's are not counted: (tokens - 1) / steps per step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.methods.heldout import prompts
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.scheduler.hint_rows import HintRows
from pipeinfer.strategies.proposers.bita import Bita, Shape, tree_size
from pipeinfer.strategies.registry import job_config

RESULTS = Path(__file__).parents[1] / "results" / "bita.json"
TARGET = Path(__file__).resolve().parents[2] / "pipeinfer" / "models" / "embedded" / "target.gguf"
KINDS = ("none", "shallow", "deep")
#: (kind of prompts, shape, k, temperature)
TODO = (*((kind, Shape.EFFICIENT, k, 0.0) for kind in KINDS for k in (1, 3, 5)),
        ("deep", Shape.EFFICIENT, 2, 0.0), ("deep", Shape.EFFICIENT, 4, 0.0),
        ("deep", Shape.CHAIN, 1, 0.0), *(("deep", Shape.FULL, k, 0.0) for k in (1, 2, 3, 4)),
        ("deep", Shape.EFFICIENT, 3, 0.8), ("deep", Shape.EFFICIENT, 5, 0.8))


def adapter_path(work: Path, kind: str) -> Path:
    """Where `tune` has put the adapter of a kind."""
    return work / ("bita.safetensors" if kind == "deep" else f"bita-{kind}.safetensors")


def measure(session: Session, texts: list[list[int]], tokens: int, proposer: Bita,
            params: SamplingParams) -> dict[str, Any]:
    """Tokens and steps over all texts."""
    session.head.drain(60)
    session.head.scheduler.speculation.hints = HintRows(proposer)
    made = steps = 0
    for text in texts:
        out = run_request(session, text, params, tokens, ignore_eos=True)
        steps += out.lane.runs - out.lane.speculative_runs - -(-len(text) // session.limits.chunk)
        made += len(out.tokens) - 1
    return {"tokens": made, "steps": steps, "per_step": made / steps}


@click.group()
def main() -> None:
    """See the module docstring."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".work/bita"))
@click.option("--steps", default=1000, show_default=True)
def tune(work: Path, steps: int) -> None:
    """Tune the three kinds of prompts on the same batches."""
    from pipeinfer.training.bita.bita import Plan
    from pipeinfer.training.bita.bita import run as run_tuning

    run_tuning(TARGET, adapter_path(work, "deep"), work, Plan(steps=steps),
               kinds=("deep", "shallow", "none"), report=click.echo)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".work/bita"))
@click.option("--texts", default=12, show_default=True)
@click.option("--prompt", default=200, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=97, show_default=True, help="Tokens generated for each.")
def run(work: Path, texts: int, prompt: int, tokens: int) -> None:
    """Measure every setting; those that are in the file already stay."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(p["kind"], p["shape"], p["k"], p["temperature"]) for p in found}
    RESULTS.parent.mkdir(exist_ok=True)
    for kind in KINDS:
        todo = [t for t in TODO if t[0] == kind and (*t[:3], t[3]) not in done]
        if not todo:
            continue
        path = adapter_path(work, kind)
        learned = load_bita(path)
        config = job_config(
            model=str(TARGET),
            backend="torch",
            device="cpu",
            bita=str(path),
            ctx=512,
            threads=1,
            exact="off",
            tree_max=128,
            partitions=200,
            chunk=256,
            adapt=False,
        )
        with join(config).lead() as session:
            held_out = prompts(session.tokenizer, texts, prompt)
            prompt_id = session.limits.n_ids if learned.n_prompts else None
            for _, shape, k, heat in todo:
                proposer = Bita(session.tokenizer.n_vocab, learned.n_masks, k, prompt_id, shape)
                params = SamplingParams(heat, 40, 0.95, 0.05, key=7) if heat else SamplingParams()
                found.append({"kind": kind, "shape": shape, "k": k, "temperature": heat,
                              "rows": 1 + proposer.candidates + proposer.rows,
                              "nodes": tree_size(learned.n_masks, k, shape),
                              **measure(session, held_out, tokens, proposer, params)})
                click.echo(json.dumps(found[-1]))
                RESULTS.write_text(json.dumps(found, indent=1))


@main.command()
def tables() -> None:
    """Markdown."""
    click.echo("| prompts | tree | k | rows | tokens | steps | tokens per step |")
    click.echo("|---|---|---|---|---|---|---|")
    for p in json.loads(RESULTS.read_text()):
        heat = f" (T={p['temperature']})" if p["temperature"] else ""
        click.echo(f"| {p['kind']} | {p['shape']}{heat} | {p['k']} | {p['rows']} | {p['tokens']} | "
                   f"{p['steps']} | {p['per_step']:.2f} |")


if __name__ == "__main__":
    main()
