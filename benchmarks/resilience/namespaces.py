"""A planned split against an equal one over unequal hosts, each in a network namespace.

    pipeinfer inflate pipeinfer/models/embedded/target.gguf -o big.gguf --n-embd 1024 --n-layer 20
    python -m benchmarks.resilience.namespaces --model big.gguf

Five hosts at 1 Gbit/s (tests/rig/namespaces.py), one of them with a quarter of the others'
processor time, real mpirun over ssh. Every split generates the same text from the same seed; the
splits take turns, the median over rounds is reported, and all tokens are compared with one
process's. Needs root. Prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import click

from tests.rig.launch import ROOT, run
from tests.rig.namespaces import Cluster, why_not

RATE, JOB_SECONDS = "1gbit", 600.0
EMBEDDED = ROOT / "pipeinfer" / "models" / "embedded"


def splits(more: tuple[str, ...]) -> dict[str, list[str]]:
    """Options by the name of a split. A name had other quotas in earlier runs: measure anew."""
    return {"planned": ["--split", "planned", "--remeasure"], "equal": ["--split", "equal"],
            **{text: ["--layers", text] for text in more}}


@click.command()
@click.option("--model", default=str(EMBEDDED / "target.gguf"), show_default=False)
@click.option("--draft", default=str(EMBEDDED / "draft.gguf"), show_default=False)
@click.option("--nodes", default=5, show_default=True)
@click.option("--cpu", default=0.4, show_default=True, help="Cores of a host.")
@click.option("--slow", default=3, show_default=True, help="The slow host's number.")
@click.option("--share", default=0.25, show_default=True, help="Its part of the others' quota.")
@click.option("--policy", default="pipeinfer", show_default=True)
@click.option("--tokens", default=48, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--layers", multiple=True, help="A further split to try, such as 6,6,2,6.")
def main(model: str, draft: str, nodes: int, cpu: float, slow: int, share: float, policy: str,
         tokens: int, rounds: int, layers: tuple[str, ...]) -> None:
    """Compare splits over hosts of unequal speed."""
    reason = why_not()
    if reason:
        sys.exit(f"no cluster of namespaces here: {reason}")
    request = ["generate", "-m", model, "-md", draft, "-p", "def read_config(path):\n", "-n",
               str(tokens), "--temp", "0.6", "--seed", "3", "--ignore-eos", "--json", "-c", "512"]
    one = run(1, [sys.executable, "-m", "pipeinfer", *request, "--policy", "iterative"],
              timeout=JOB_SECONDS)
    if one.returncode:
        sys.exit(one.stderr[-2000:])
    wanted = json.loads(one.stdout)["tokens"]
    todo = splits(layers)
    rows: dict[str, dict] = {name: {"tokens_per_second": [], "time_to_first_token": []}
                             for name in todo}
    same = True
    with Cluster(nodes, rate=RATE, cpu=cpu, cpus={slow: cpu * share}) as cluster:
        for number in range(rounds + 1):  # the first one cuts and measures; it does not count
            for name, more in todo.items():
                done = cluster.pipeinfer([*request, "--policy", policy, *more],
                                         timeout=JOB_SECONDS)
                if done.returncode:
                    sys.exit(f"{name}: {done.stderr[-3000:]}")
                answer = json.loads(done.stdout)
                same = same and answer["tokens"] == wanted
                stats, row = answer["stats"], rows[name]
                row["layers"] = {s["host"]: s["layers"][1] - s["layers"][0]
                                 for s in stats["stages"].values()}
                print(f"{'warm-up' if number == 0 else f'round {number}'} {name} "
                      f"{row['layers']}: {stats['tokens_per_second']:.2f} tokens/s",
                      file=sys.stderr)
                if number:
                    for key in ("tokens_per_second", "time_to_first_token"):
                        row[key].append(stats[key])
    medians = {name: statistics.median(row["tokens_per_second"]) for name, row in rows.items()}
    print(json.dumps({
        "model": Path(model).name, "policy": policy, "hosts": nodes, "rate": RATE,
        "cores_per_host": cpu, "slow_host": f"node{slow}", "slow_cores": cpu * share,
        "tokens": tokens, "identical_to_one_process": same, "splits": rows,
        "median_tokens_per_second": medians,
        "planned_over_equal": medians["planned"] / medians["equal"],
    }, indent=1))


if __name__ == "__main__":
    main()
