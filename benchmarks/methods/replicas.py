"""Lookahead decoding over replicas, and sizes for machines: tokens per second in virtual time.

    python -m benchmarks.methods.replicas run --work FOLDER   # decodes; a quarter of an hour
    python -m benchmarks.methods.replicas tables --work FOLDER

The embedded target really chooses every token, on held-out text, greedily; steps and rows are its
own. Durations are those of a 7 B model on the emulator's machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.methods.heldout import prompts
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.policy import Policy
from pipeinfer.experiments.emulation.profiles import load_profiles
from pipeinfer.experiments.emulation.replicas import Trace, trace
from pipeinfer.experiments.emulation.virtual import Overheads, Wire
from pipeinfer.models.locate import EMBEDDED, open_model, open_tokenizer
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.lookahead import Lookahead

#: (W, N, G); the paper's choices for 7 B on an A100 and for less of a machine, and small ones
SIZES = ((0, 5, 0), (0, 5, 2), (0, 5, 7), (2, 5, 2), (5, 5, 5), (7, 5, 7), (10, 5, 10),
         (15, 5, 15), (20, 7, 20))
NODES = (1, 2, 4)
MACHINES = (("i7-4790", "gigabit"), ("xeon-gold-6140x2", "infiniband-edr"),
            ("mi60", "infiniband-edr"), ("rtx-3090", "infiniband-edr"))
MODEL = "mistral-7b"
CONTEXT, PROMPT = 1024, 200


@click.group()
def main() -> None:
    """See the module docstring."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--texts", default=3, show_default=True)
@click.option("--tokens", default=97, show_default=True)
def run(work: Path, texts: int, tokens: int) -> None:
    """Decode by every size over every number of replicas; what is there already stays."""
    path, work = EMBEDDED / "target.gguf", work / "replicas.json"
    layers = open_model(path).n_layers
    limits = Limits(n_ctx=CONTEXT, policy=Policy.SPECULATIVE, exact_width=256, partitions=100)
    backends = [LlamaCppBackend.load(
        path, layers=(0, layers), n_layers_total=layers, first=True, last=True,
        n_ctx=CONTEXT + 512, n_seq_max=limits.n_ids, n_batch=256, n_threads=os.cpu_count() or 1)
        for _ in range(max(NODES))]
    held_out = prompts(open_tokenizer(path), texts, PROMPT)
    found = json.loads(work.read_text()) if work.exists() else []
    done = {(tuple(one["size"]), one["nodes"]) for one in found}
    for size in SIZES:
        for nodes in NODES:
            if (size, nodes) in done:
                continue
            traces = []
            for text in held_out:
                for backend in backends:
                    backend.seq_rm(-1, 0, -1)
                made = trace(backends[:nodes], limits, Lookahead(*size), text, tokens)
                traces.append({"tokens": made.tokens, "steps": made.steps})
            found.append({"size": size, "nodes": nodes, "traces": traces})
            work.write_text(json.dumps(found))
            click.echo(f"{size} {nodes}")


def lines(found: list[dict]) -> Iterator[str]:  # type: ignore[type-arg]
    """Markdown: tokens per second of every size, machine and number of replicas."""
    profiles, overheads = load_profiles(), Overheads()
    model = profiles.models[MODEL]
    yield "| machine, link | replicas | " + " | ".join(str(size) for size in SIZES) + " | best |"
    yield "|---" * (len(SIZES) + 3) + "|"
    for machine, link in MACHINES:
        node, wire = profiles.nodes[machine], profiles.links[link]

        def cost(rows: int, node=node) -> float:  # type: ignore[no-untyped-def]
            return float(model.stage_seconds(node, model.n_layers, rows, last=True))

        for nodes in NODES:
            speeds = []
            for size in SIZES:
                (one,) = [p for p in found if tuple(p["size"]) == size and p["nodes"] == nodes]
                traces = [Trace(nodes, t["tokens"], t["steps"]) for t in one["traces"]]
                seconds = sum(t.seconds(cost, Wire(wire.latency, wire.bandwidth), overheads.head)
                              for t in traces)
                speeds.append(sum(len(t.tokens) - 1 for t in traces) / seconds)
            best = SIZES[max(range(len(SIZES)), key=speeds.__getitem__)]
            yield (f"| {machine}, {link} | {nodes} | "
                   + " | ".join(f"{speed:.1f}" for speed in speeds) + f" | {best} |")


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
def tables(work: Path) -> None:
    """Print the tables."""
    found = json.loads((work / "replicas.json").read_text())
    for size in SIZES:
        (one,) = [p for p in found if tuple(p["size"]) == size and p["nodes"] == 1]
        steps = [step for t in one["traces"] for step in t["steps"]]
        tokens = sum(len(t["tokens"]) - 1 for t in one["traces"])
        click.echo(f"{size}: S = {tokens / len(steps):.2f}, "
                   f"{sum(sum(map(sum, s)) for s in steps) / len(steps):.1f} rows per step")
    click.echo("\n".join(lines(found)))


if __name__ == "__main__":
    main()
