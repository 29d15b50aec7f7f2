"""Tokens per step of BiTA on held-out text: kinds of prompts, shapes of the tree, one pass per step
or two, and numbers of prompts and masks (the paper's Figures 8 and 9).

    python -m benchmarks.methods.bita tune --work .work/bita  # three adapters, an hour on one core
    python -m benchmarks.methods.bita run --work .work/bita      # results/bita.json
    python -m benchmarks.methods.bita tables
    python -m benchmarks.methods.bita passes                     # one pass per step against two
    python -m benchmarks.methods.bita stages     # runs in a chain over paced stages, and one by one
    python -m benchmarks.methods.bita figures --work .work/bita  # Figures 8 and 9; resumable

Greedy, on the torch backend, `--exact off` (but for `passes`). A step is a run that verifies, with
the run of masks behind it if there is one; the prompt's are not counted: (tokens - 1) / steps.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.methods.heldout import prompts
from benchmarks.methods.matrix import answers_of
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.config import JobConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.scheduler.hint_rows import HintRows
from pipeinfer.strategies.proposers.bita import Bita, Shape, tree_size
from pipeinfer_lab.commands.comparison import use_of_stages
from tests.kit.configs import job_config

RESULTS = Path(__file__).parents[1] / "results" / "bita.json"
TARGET = Path(__file__).resolve().parents[2] / "pipeinfer" / "models" / "embedded" / "target.gguf"
KINDS = ("none", "shallow", "deep")
#: (kind of prompts, shape, k, temperature)
TODO = (*((kind, Shape.EFFICIENT, k, 0.0) for kind in KINDS for k in (1, 3, 5)),
        ("deep", Shape.EFFICIENT, 2, 0.0), ("deep", Shape.EFFICIENT, 4, 0.0),
        ("deep", Shape.CHAIN, 1, 0.0), *(("deep", Shape.FULL, k, 0.0) for k in (1, 2, 3, 4)),
        ("deep", Shape.EFFICIENT, 3, 0.8), ("deep", Shape.EFFICIENT, 5, 0.8))

#: (prompts, masks): Figure 8 with 3 masks, then Figure 9 with 16 prompts
FIGURES = (*((p, 3) for p in (1, 4, 8, 16, 32, 64)), *((16, m) for m in (1, 2, 4, 5)))


def adapter_path(work: Path, kind: str) -> Path:
    """Where `tune` has put the adapter of a kind."""
    return work / ("bita.safetensors" if kind == "deep" else f"bita-{kind}.safetensors")


def measure(session: Session, texts: list[list[int]], tokens: int, proposer: Bita,
            params: SamplingParams) -> dict[str, Any]:
    """Tokens and steps over all texts."""
    session.head.drain(60)
    session.head.scheduler.speculation.hints = HintRows(proposer)
    made = steps = passes = 0
    started = time.process_time()
    for text in texts:
        out = run_request(session, text, params, tokens, ignore_eos=True)
        own = out.lane.runs - -(-len(text) // session.limits.chunk)
        passes += own
        steps += own - out.lane.speculative_runs
        made += len(out.tokens) - 1
    return {"tokens": made, "steps": steps, "per_step": made / steps, "passes": passes / steps,
            "cpu": time.process_time() - started}


@click.group()
def main() -> None:
    """See the module docstring."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".work/bita"))
@click.option("--steps", default=1000, show_default=True)
def tune(work: Path, steps: int) -> None:
    """Tune the three kinds of prompts on the same batches."""
    from pipeinfer_lab.training.bita.bita import Plan
    from pipeinfer_lab.training.bita.bita import run as run_tuning

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


#: (shape, k, width of a run or 0, groups)
PASSES = ((Shape.EFFICIENT, 3, 0, 0), (Shape.EFFICIENT, 5, 0, 0), (Shape.CHAIN, 1, 0, 0),
          (Shape.EFFICIENT, 1, 16, 0), *((Shape.EFFICIENT, 5, 16, g) for g in (1, 2, 3, 4)),
          (Shape.EFFICIENT, 3, 16, 0), (Shape.FULL, 3, 16, 0))


def config_of(adapter: Path, **values: Any) -> JobConfig:
    """A job of one rank on torch with an adapter."""
    return job_config(model=str(TARGET), backend="torch", device="cpu", bita=str(adapter), ctx=512,
                      threads=1, partitions=200, chunk=256, adapt=False, **values)


@main.command()
@click.option("--texts", default=8, show_default=True)
@click.option("--prompt", default=200, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=65, show_default=True, help="Tokens generated for each.")
def passes(texts: int, prompt: int, tokens: int) -> None:
    """One pass per step against two, with runs of exact width. Every text by every setting before
    the next text; processor time, so that other programs matter little."""
    path = TARGET.with_name("bita.safetensors")
    masks = load_bita(path).n_masks
    total: dict[int, dict[str, Any]] = {}
    with join(config_of(path, bita_top=5)).lead() as session:
        vocabulary, prompt_id = session.tokenizer.n_vocab, session.limits.n_ids
        measured = {-1: None, **dict(enumerate(PASSES))}
        for text in prompts(session.tokenizer, texts, prompt):
            for number, setting in measured.items():
                shape, k, width, groups = setting or (Shape.CHAIN, 1, 0, 0)
                found = measure(session, [text], tokens,
                                Bita(vocabulary, masks, k, prompt_id, shape, width, groups),
                                SamplingParams()) if setting else plain(session, text, tokens)
                sums = total.setdefault(number, dict.fromkeys(("tokens", "steps", "passes", "cpu"),
                                                              0.0))
                sums["passes"] += found["passes"] * found["steps"]
                for key in ("tokens", "steps", "cpu"):
                    sums[key] += found[key]
        click.echo(f"rows of a run that verifies: {session.limits.exact_width}")
    click.echo("| tree | k | rows | groups | tokens per step | passes per step | "
               "tokens per pass | processor ms per token |\n|---|---|---|---|---|---|---|---|")
    for number, sums in total.items():
        shape, k, width, groups = measured[number] or ("plain", 0, 0, 0)
        rows = groups = 0
        if number >= 0:
            made = Bita(0, masks, k, None, *PASSES[number][:1], *PASSES[number][2:])
            groups = made.rows // masks
            rows = 1 + made.candidates + made.rows
        click.echo(f"| {shape} | {k} | {rows} | {groups} | {sums['tokens'] / sums['steps']:.2f} | "
                   f"{sums['passes'] / sums['steps']:.2f} | {sums['tokens'] / sums['passes']:.2f} "
                   f"| {1e3 * sums['cpu'] / sums['tokens']:.1f} |")


#: what `stages` compares: limits of the scheduler
CHAINED: dict[str, dict[str, Any]] = {
    "plain": {"policy": "iterative"},
    "one pass after the other": {"policy": "speculative"},
    **{f"chained, up to {most} guesses a run, likelier than {least:g}": {
        "policy": "pipeinfer", "draft_max": most, "path_min": least}
       for most, least in ((4, 0.08), (4, 0.02), (4, 0.005), (1, 0.005))}}


@main.command()
@click.option("--adapter", type=click.Path(path_type=Path, exists=True),
              default=TARGET.with_name("bita.safetensors"), show_default=True)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=TARGET,
              show_default=True)
@click.option("--backend", default="torch", show_default=True)
@click.option("--nodes", type=int, multiple=True, default=(2, 4), show_default=True)
@click.option("--texts", default=3, show_default=True)
@click.option("--tokens", default=49, show_default=True, help="Tokens generated for each.")
@click.option("--pace-ms", default=60.0, show_default=True, help="A run takes a stage so long.")
@click.option("--pace-row-ms", default=0.0, show_default=True, help="More for each further row.")
def stages(adapter: Path, model: Path, backend: str, nodes: tuple[int, ...], texts: int,
           tokens: int, pace_ms: float, pace_row_ms: float) -> None:
    """BiTA over stages of a pipeline: how busy they are, what of it is for guesses that were wrong,
    tokens per second. Every text by every setting before the next; texts are compared."""
    tokenizer = open_tokenizer(model)
    asked = prompts(tokenizer, texts, 200)
    tokenizer.close()
    cases = [{"prompt": text, "params": {}, "count": tokens, "limits": limits, "observed": True}
             for text in asked for limits in CHAINED.values()]
    click.echo("| stages | | busy | of that wasted | runs per token | tokens/s | over plain |\n"
               + "|---" * 7 + "|")
    for count in nodes:
        found = answers_of(count + 1, {
            "model": str(model), "draft_model": "none", "bita": str(adapter), "backend": backend,
            "device": "cpu", "policy": "pipeinfer", "ctx": 512, "threads": 1, "chunk": 256,
            "hook": (f"pace={pace_ms}+{pace_row_ms}",), "adapt": False,
            }, cases, timeout=1200)["results"]
        speeds: dict[str, float] = {}
        for number, name in enumerate(CHAINED):
            mine = found[number :: len(CHAINED)]
            differ = sum(one["tokens"] != first["tokens"] for one, first in
                         zip(mine, found[:: len(CHAINED)], strict=True))
            speeds[name] = statistics.fmean(one["tokens_per_second"] for one in mine)
            spent = [use_of_stages(one["seen"]) for one in mine]
            busy = sum(one[0] for one in spent) / sum(one["stage_seconds"] for one in mine)
            wasted = sum(one[1] for one in spent) / sum(one[0] for one in spent)
            runs = sum(one["runs"] for one in mine) / sum(len(one["tokens"]) for one in mine)
            click.echo(f"| {count} | {name} | {busy:.0%} | {wasted:.0%} | {runs:.2f} | "
                       f"{speeds[name]:.2f} | {speeds[name] / speeds['plain']:.2f}"
                       + (f" ({differ} texts differ)" if differ else "") + " |")


def plain(session: Session, text: list[int], tokens: int) -> dict[str, Any]:
    """The same without guesses."""
    config = session.config
    session.use(config.replace(policy="iterative"))
    started = time.process_time()
    out = run_request(session, text, SamplingParams(), tokens, ignore_eos=True)
    spent = time.process_time() - started
    session.use(config)
    return {"tokens": len(out.tokens) - 1, "steps": len(out.tokens) - 1, "passes": 1.0,
            "cpu": spent}


@main.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".work/bita"))
@click.option("--steps", default=1000, show_default=True, help="Of tuning, for each adapter.")
@click.option("--batch", default=8, show_default=True, help="Texts per step.")
@click.option("--groups", default=24, show_default=True, help="Groups of masks per text.")
@click.option("--samples", default=1024, show_default=True, help="Texts of the model's own.")
@click.option("--texts", default=12, show_default=True)
@click.option("--tokens", default=97, show_default=True, help="Tokens generated for each.")
def figures(work: Path, steps: int, batch: int, groups: int, samples: int, texts: int, tokens: int
            ) -> None:
    """Tokens per step by the number of prompts (Figure 8) and of masks (Figure 9).

    Every adapter is tuned on the same texts of the model's own; adapters and figures that are there
    stay.
    """
    from pipeinfer_lab.training.bita.bita import Plan
    from pipeinfer_lab.training.bita.bita import run as run_tuning
    from pipeinfer_lab.training.work_folder import NOTE

    path = work / "figures.json"
    found = json.loads(path.read_text()) if path.exists() else []
    for n_prompts, n_masks in FIGURES:
        if any((p["prompts"], p["masks"]) == (n_prompts, n_masks) for p in found):
            continue
        folder = work / f"p{n_prompts}-m{n_masks}"
        adapter = folder / "bita.safetensors"
        if not adapter.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made = next(work.glob("p*-m*/samples.npy"), None)
            if made is not None and not (folder / made.name).exists():
                shutil.copy(made, folder)
                shutil.copy(made.with_name(NOTE), folder)
            run_tuning(TARGET, adapter, folder, Plan(
                steps=steps, prompts=n_prompts, masks=n_masks, batch=batch, groups=groups,
                samples=samples, tokens=128), report=click.echo)
        with join(config_of(adapter, exact="off", tree_max=128, bita_top=3)).lead() as session:
            proposer = Bita(session.tokenizer.n_vocab, n_masks, 3, session.limits.n_ids)
            found.append({"prompts": n_prompts, "masks": n_masks, "steps_tuned": steps, **measure(
                session, prompts(session.tokenizer, texts, 200), tokens, proposer,
                SamplingParams())})
        path.write_text(json.dumps(found, indent=1))
    click.echo("| prompts | masks | rows | tokens per step |\n|---|---|---|---|")
    for p in found:
        rows = 1 + tree_size(p["masks"], 3, Shape.EFFICIENT) * (1 + p["masks"]) + p["masks"]
        click.echo(f"| {p['prompts']} | {p['masks']} | {rows} | {p['per_step']:.2f} |")


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
