"""Grids of hosts at 1 Gbit/s, paced: tokens per second of each, and what the planner takes.

    python -m benchmarks.wide.hosts --hosts 4 --pace-ms 25

Hosts are network namespaces of this machine (root). Members compute a small model and wait until
another machine would have computed: each has as many weights in every grid, so --pace-ms holds for
all of them; sums and messages take what the shaped links take. The head is a rank of its own on
the first host. Texts of one set of slices must be equal; of others they may differ in near-ties.
"""

from __future__ import annotations

import json
import statistics
import sys

import click

from pipeinfer.experiments.rig.namespaces import Cluster, why_not


def grids_of(hosts: int) -> list[str]:
    """Stages x members, from the plain pipeline to one stage."""
    return [f"{hosts // width}x{width}" for width in (1, 2, 4, 8) if hosts % width == 0
            and width <= hosts]


@click.command()
@click.option("--hosts", default=4, show_default=True)
@click.option("--pace-ms", default=25.0, show_default=True, help="Of each member, for one row.")
@click.option("--tokens", default=48, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--sum-types", default="f32,f16", show_default=True)
@click.option("--model", default="", help="Another target than the embedded one.")
@click.option("--burst", default="22kb", show_default=True, help="Of the links.")
def main(hosts: int, pace_ms: float, tokens: int, rounds: int, sum_types: str, model: str,
         burst: str) -> None:
    """Run every grid in turn, so often."""
    if reason := why_not():
        sys.exit(f"no cluster of namespaces here: {reason}")
    speeds: dict[str, list[float]] = {}
    notes: dict[str, list[str]] = {}
    texts: dict[str, set[str]] = {}
    with Cluster(hosts, burst=burst) as cluster:
        cluster.hostfile.write_text("".join(
            f"node{n} slots={1 + (n == 1)}\n" for n in cluster.nodes))
        for turn in range(rounds):
            for grid in [*grids_of(hosts), *(["auto"] if turn == 0 else [])]:
                for kind in sum_types.split(",") if grid[-2:] != "x1" else ["f32"]:
                    for policy in ("iterative", "pipeinfer"):
                        pace = [] if grid == "auto" else ["--pace-ms", str(pace_ms)]
                        done = cluster.pipeinfer(
                            ["generate", "-p", "def read(path):\n", "-n", str(tokens), "--temp",
                             "0", "--ignore-eos", "--json", "-t", "1", "--split", "equal" if pace
                             else "planned", "--policy", policy, "--grid", grid, "--sum-type",
                             kind, *pace, *(["-m", model] if model else [])],
                            ranks=hosts + 1, timeout=200)
                        if done.returncode:
                            sys.exit(done.stderr[-2000:])
                        found = json.loads(done.stdout)
                        name = f"{grid} {kind} {policy}"
                        speeds.setdefault(name, []).append(found["stats"]["tokens_per_second"])
                        notes[name] = found["stats"]["notes"]
                        texts.setdefault(f"{grid} {kind}", set()).add(found["text"])
                        click.echo(f"{name}: {speeds[name][-1]:.2f}", err=True)
    for name, own in speeds.items():
        print(f"{name:28} {statistics.median(own):6.2f} tokens/s ({min(own):.2f} to "
              f"{max(own):.2f})")
    for name in notes:
        if name.startswith("auto"):
            print(f"{name}: {'; '.join(notes[name])}")
    print("texts equal within each set of slices:", all(len(one) == 1 for one in texts.values()))


if __name__ == "__main__":
    main()
