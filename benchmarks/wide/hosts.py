"""Grids of hosts at 1 Gbit/s, paced: tokens per second of each, and what the planner takes.

    python -m benchmarks.wide.hosts --hosts 4 --pace-ms 40 --exchange-us 600

Hosts are network namespaces of this machine (root). Members compute a small model and wait until
another machine would have computed: each has as many weights in every grid, so --pace-ms holds for
all of them; sums and messages take what the shaped links take. The head is a rank of its own on
the first host. The planner is told the pace, the wire and what one exchange takes here
(benchmarks.wide.exchange, the smallest parts). Texts of one set of slices must be equal; those of
other sets may differ in near-ties.
"""

from __future__ import annotations

import json
import statistics
import sys

import click

from pipeinfer.core.policy import Policy
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.planning.grid_cluster import Cluster
from pipeinfer.planning.grids import best_grid
from pipeinfer.planning.judge import LoadMix
from pipeinfer.planning.measured_grid import cut_from
from pipeinfer.planning.partition import Member
from pipeinfer.planning.planner import load_of
from pipeinfer.planning.teams import Network, SumCost, Wire
from tests.rig import namespaces


def grids_of(hosts: int) -> list[str]:
    """Stages x members, from the plain pipeline to one stage."""
    return [f"{hosts // width}x{width}" for width in (1, 2, 4, 8) if hosts % width == 0
            and width <= hosts]


def planned(hosts: int, pace: float, exchange: float, kind: str, policy: Policy, model: str) -> str:
    """What the planner takes, and why."""
    file = ModelFile(model or EMBEDDED / "target.gguf")
    load = load_of(file, 512, 64)
    whole = load.stage_cost(0, file.n_layers)
    members = tuple(Member(f"node{n}", pace * hosts / whole) for n in range(1, hosts + 1))
    cluster = Cluster(members, Network(Wire(0.0, 125e6)), load, cut_from(file),
                      SumCost(4 if kind == "f32" else 2, exchange, 0.0), (LoadMix(policy),))
    return best_grid(cluster).why()


@click.command()
@click.option("--hosts", default=4, show_default=True)
@click.option("--pace-ms", default=25.0, show_default=True, help="Of each member, for one row.")
@click.option("--tokens", default=48, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--sum-types", default="f32,f16", show_default=True)
@click.option("--model", default="", help="Another target than the embedded one.")
@click.option("--exchange-us", default=100.0, show_default=True, help="Of the smallest parts.")
@click.option("--burst", default="20kb", show_default=True, help="Of the links.")
def main(hosts: int, pace_ms: float, tokens: int, rounds: int, sum_types: str, model: str,
         exchange_us: float, burst: str) -> None:
    """Run every grid in turn, so often."""
    if reason := namespaces.why_not():
        sys.exit(f"no cluster of namespaces here: {reason}")
    speeds: dict[str, list[float]] = {}
    texts: dict[str, set[str]] = {}
    with namespaces.Cluster(hosts, burst=burst) as cluster:
        cluster.hostfile.write_text("".join(
            f"node{n} slots={1 + (n == 1)}\n" for n in cluster.nodes))
        for _ in range(rounds):
            for grid in grids_of(hosts):
                for kind in sum_types.split(",") if grid[-2:] != "x1" else ["f32"]:
                    for policy in ("iterative", "pipeinfer"):
                        done = cluster.pipeinfer(
                            ["generate", "-p", "def read(path):\n", "-n", str(tokens), "--temp",
                             "0", "--ignore-eos", "--json", "-t", "1", "--split", "equal",
                             "--policy", policy, "--grid", grid, "--sum-type", kind, "--pace-ms",
                             str(pace_ms), *(["-m", model] if model else [])],
                            ranks=hosts + 1, timeout=200)
                        if done.returncode:
                            sys.exit(done.stderr[-2000:])
                        found = json.loads(done.stdout)
                        name = f"{grid} {kind} {policy}"
                        speeds.setdefault(name, []).append(found["stats"]["tokens_per_second"])
                        texts.setdefault(f"{grid} {kind}", set()).add(found["text"])
                        click.echo(f"{name}: {speeds[name][-1]:.2f}", err=True)
    for name, own in speeds.items():
        print(f"{name:28} {statistics.median(own):6.2f} tokens/s ({min(own):.2f} to "
              f"{max(own):.2f})")
    for kind in sum_types.split(","):
        for policy in (Policy.ITERATIVE, Policy.PIPEINFER):
            print(f"the planner, {kind} {policy.value}: "
                  f"{planned(hosts, pace_ms / 1e3, exchange_us / 1e6, kind, policy, model)}")
    print("texts equal within each set of slices:", all(len(one) == 1 for one in texts.values()))


if __name__ == "__main__":
    main()
