"""Lookahead decoding over replicas, and sizes for machines: tokens per second in virtual time.

    python -m benchmarks.methods.replicas run --work FOLDER   # decodes; a quarter of an hour
    python -m benchmarks.methods.replicas tables --work FOLDER
    python -m benchmarks.methods.replicas sizes --work FOLDER   # Table 4; `run --nodes 1` will do
    python -m benchmarks.methods.replicas real --pace-ms 60 --pace-row-ms 0.3    # over mpirun
    python -m benchmarks.methods.replicas several   # requests side by side, and one by one

The embedded target really chooses every token, on held-out text, greedily; steps and rows are its
own. Durations are those of a 7 B model on the emulator's machines. `real` decodes over processes
and takes the time, of this machine or of one that takes so long for a run and for each further row.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

from benchmarks.methods.heldout import prompts
from benchmarks.methods.matrix import answers_of
from benchmarks.methods.traced import Trace, trace
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.policy import Policy
from pipeinfer.lab.emulation.profiles import ModelProfile, NodeProfile, load_profiles
from pipeinfer.lab.emulation.virtual import Overheads, Wire
from pipeinfer.models.locate import EMBEDDED, open_model, open_tokenizer
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.rig.served import serve

#: (W, N, G); the paper's choices for 7 B on an A100 and for less of a machine, and small ones
SIZES = ((0, 5, 0), (0, 5, 2), (0, 5, 7), (2, 5, 2), (5, 5, 5), (7, 5, 7), (10, 5, 10),
         (15, 5, 15), (20, 7, 20))
NODES = (1, 2, 4)
MACHINES = (("i7-4790", "gigabit"), ("xeon-gold-6140x2", "infiniband-edr"),
            ("mi60", "infiniband-edr"), ("rtx-3090", "infiniband-edr"),
            ("a100-sxm", "infiniband-edr"))
REAL = ((0, 5, 0), (0, 5, 2), (5, 5, 5), (15, 5, 15))  #: of them, those that `real` takes
MODEL = "mistral-7b"
#: for `sizes`: machines whose rows cost much, something and little
THREE = ("xeon-gold-6140x2", "rtx-3090", "a100-sxm")
MODELS = ("mistral-7b", "xwin-13b", "yi-34b")
#: the paper's Table 4, for 16-bit models of 7, 13 and 34 B on an A100
PAPER = ((15, 5, 15), (10, 5, 10), (7, 5, 7))
BILLIONS = (7, 13, 34)
#: an A100 with 16-bit weights: bytes/s of memory, and of weights that half of its tensor cores'
#: 312 Tflop/s get through for one row; s of overhead
MEMORY, ARITHMETIC, OVERHEAD = 0.8 * 2.039e12, 0.5 * 312e12, 4e-4
CONTEXT, PROMPT = 1024, 200


@click.group()
def main() -> None:
    """See the module docstring."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--texts", default=3, show_default=True)
@click.option("--tokens", default=97, show_default=True)
@click.option("--nodes", "counts", type=int, multiple=True, default=NODES, show_default=True)
def run(work: Path, texts: int, tokens: int, counts: tuple[int, ...]) -> None:
    """Decode by every size over every number of replicas; what is there already stays."""
    path, work = EMBEDDED / "target.gguf", work / "replicas.json"
    layers = open_model(path).n_layers
    limits = Limits(n_ctx=CONTEXT, policy=Policy.SPECULATIVE, exact_width=256, partitions=100)
    backends = [LlamaCppBackend.load(
        path, layers=(0, layers), n_layers_total=layers, first=True, last=True,
        n_ctx=CONTEXT + 512, n_seq_max=limits.n_ids, n_batch=256, n_threads=os.cpu_count() or 1)
        for _ in range(max(counts))]
    held_out = prompts(open_tokenizer(path), texts, PROMPT)
    found = json.loads(work.read_text()) if work.exists() else []
    done = {(tuple(one["size"]), one["nodes"]) for one in found}
    for size in SIZES:
        for nodes in counts:
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


@main.command()
@click.option("--texts", default=2, show_default=True)
@click.option("--tokens", default=49, show_default=True)
@click.option("--nodes", type=int, multiple=True, default=NODES, show_default=True)
@click.option("--pace-ms", default=0.0, show_default=True, help="0: as fast as this machine is.")
@click.option("--pace-row-ms", default=0.0, show_default=True)
def real(texts: int, tokens: int, nodes: tuple[int, ...], pace_ms: float, pace_row_ms: float
         ) -> None:
    """Tokens per second over 1, 2 and 4 replicas, each a process with one thread; median of the
    texts. `--exact off`, so that a step is one run however wide; texts are compared."""
    path = EMBEDDED / "target.gguf"
    cases = [{"prompt": text, "params": {}, "count": tokens, "limits": {}}
             for text in prompts(open_tokenizer(path), texts, PROMPT)]
    click.echo("| replicas | " + " | ".join(map(str, REAL)) + " |\n|---" + "|---" * len(REAL)
               + "|")
    said: dict[tuple[int, int, int], list[list[int]]] = {}
    for count in nodes:
        cells = []
        for size in REAL:
            config = dict(zip(("lookahead_window", "lookahead_ngram", "lookahead_candidates"),
                              size, strict=True))
            found = answers_of(count + 1, {
                "model": str(path), "draft_model": "none", "layout": "replicate", "ctx": CONTEXT,
                "threads": 1, "exact": "off",
                "hook": (f"pace={pace_ms}+{pace_row_ms}",) if pace_ms else (),
                **config}, cases, timeout=600)["results"]
            answers = [one["tokens"] for one in found]
            steps = sum(one["steps"] for one in found)
            differ = sum(a != b for a, b in zip(answers, said.setdefault(size, answers),
                                                strict=True))
            speed = statistics.median(one["tokens_per_second"] for one in found)
            cells.append(f"{speed:.1f} (S {sum(map(len, answers)) / (steps + texts):.2f}"
                         + (f", {differ} texts differ)" if differ else ")"))
        click.echo(f"| {count} | " + " | ".join(cells) + " |")


@main.command()
@click.option("--nodes", type=int, multiple=True, default=(2,), show_default=True)
@click.option("--pace-ms", default=60.0, show_default=True)
@click.option("--pace-row-ms", default=1.0, show_default=True)
@click.option("--tokens", default=40, show_default=True, help="Of a short answer.")
def several(nodes: tuple[int, ...], pace_ms: float, pace_row_ms: float, tokens: int) -> None:
    """A long answer and three short ones that are asked for right behind it, through a server."""
    begun = ("def add(a, b):\n    return a + b\n\n\ndef ", "class Stack:\n    def __init__(self):",
             "import json\n\n\ndef read(path):", "for i in range(10):\n    ")
    click.echo("| replicas | requests at a time | long | short ones, mean | tokens/s in all |\n"
               "|---|---|---|---|---|")
    for count in nodes:
        for parallel in (1, 4):
            with serve(count + 1, "--layout", "replicate", "-c", "1024", "--parallel",
                       str(parallel), "--exact", "off", "-t", "1", "--hook",
                       f"pace={pace_ms}+{pace_row_ms}") as served, ThreadPoolExecutor(4) as pool:
                served.wait_until_ready()

                def ask(number: int, served=served) -> float:  # type: ignore[no-untyped-def]
                    started = time.monotonic()
                    served.post("/v1/completions", {
                        "prompt": begun[number], "max_tokens": tokens * (1 if number else 4),
                        "temperature": 0, "ignore_eos": True})
                    return time.monotonic() - started

                started = time.monotonic()
                asked = []
                for number in range(4):
                    asked.append(pool.submit(ask, number))
                    time.sleep(0.05)
                took = [one.result() for one in asked]
                whole = time.monotonic() - started
            short = statistics.fmean(took[1:])
            click.echo(f"| {count} | {parallel} | {took[0]:.1f} s | {short:.1f} s | "
                       f"{7 * tokens / whole:.1f} |")


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


def half_width(billions: float) -> Callable[[int], float]:
    """Seconds of a run of so many rows of a 16-bit model on an A100."""
    weights = 2e9 * billions
    return lambda rows: OVERHEAD + weights * max(1 / MEMORY, rows / ARITHMETIC)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
def sizes(work: Path) -> None:
    """The fastest W, N, G on one node for three machines and three sizes of models, by what rows
    cost there and what they brought here; beside the paper's Table 4."""
    found = json.loads((work / "replicas.json").read_text())
    traces = {tuple(p["size"]): [Trace(1, t["tokens"], t["steps"]) for t in p["traces"]]
              for p in found if p["nodes"] == 1}
    profiles, overheads = load_profiles(), Overheads()
    machines: dict[str, list[Callable[[int], float]]] = {}
    for name in THREE:
        node = profiles.nodes[name]
        machines[name] = [partial(_seconds, profiles.models[model], node) for model in MODELS]
    machines["a100, 16-bit weights"] = [half_width(billions) for billions in BILLIONS]
    click.echo("| machine | model | 2, 16, 121 rows, in times of one | best with a window | "
               "tokens/s over plain | best of all | over plain | paper |\n" + "|---" * 8 + "|")
    for machine, costs in machines.items():
        for billions, cost, paper in zip(BILLIONS, costs, PAPER, strict=True):
            speeds = {size: sum(len(t.tokens) - 1 for t in ours) / sum(
                t.seconds(cost, Wire(0.0, 1e12), overheads.head) for t in ours)
                for size, ours in traces.items()}
            plain = speeds[0, 5, 0]
            windows = [size for size in speeds if size[0]]
            window, best = max(windows, key=speeds.__getitem__), max(speeds, key=speeds.__getitem__)
            shape = ", ".join(f"{cost(rows) / cost(1):.1f}" for rows in (2, 16, 121))
            click.echo(f"| {machine} | {billions} B | {shape} | {window} | "
                       f"{speeds[window] / plain:.2f} | {best} | {speeds[best] / plain:.2f} | "
                       f"{paper if machine.startswith('a100') else ''} |")


def _seconds(model: ModelProfile, node: NodeProfile, rows: int) -> float:
    return model.stage_seconds(node, model.n_layers, rows, last=True)


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
