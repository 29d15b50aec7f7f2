"""Microseconds of one exchange of parts, by bytes and type, beside bare MPI.

    python -m benchmarks.wide.exchange                 ranks of this host: memory and messages
    python -m benchmarks.wide.exchange --hosts 2,4     hosts in namespaces at 1 Gbit/s (root)

With hosts a control transfer of 32 KB is timed in the same job: at 1 Gbit/s the wire alone takes
262 us. Prints a table, and JSON with --json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from tests.rig.launch import ROOT, environment, mpirun_path, run
from tests.rig.namespaces import Cluster, why_not

PROGRAM = ROOT / "benchmarks" / "wide" / "programs" / "exchange.py"
BYTES = (2304, 16384, 32768, 65536, 131072)
LOCAL = "memory,messages,messages:f16,messages:bf16,bare"
SETTINGS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
            "OMPI_MCA_btl_tcp_progress_thread", "OMPI_MCA_btl_tcp_eager_limit",
            "OMPI_MCA_mpi_yield_when_idle", "OMP_NUM_THREADS")
REMOTE = "messages,messages:f16,messages:bf16,bare"


def local(width: int, rounds: int) -> dict[str, Any]:
    """Members on this host."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        done = run(width + 1, [sys.executable, str(PROGRAM), str(out), str(width), str(rounds),
                               LOCAL, *map(str, BYTES)], timeout=280)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def remote(hosts: int, rounds: int, rate: str) -> dict[str, Any]:
    """A member on each of so many hosts, and the head's rank on the first."""
    out = Path(tempfile.gettempdir()) / f"exchange-{hosts}.json"
    out.unlink(missing_ok=True)
    with Cluster(hosts, rate=rate, burst="20kb") as cluster:
        slots = cluster.state / "slots"
        slots.write_text("".join(f"node{n} slots={1 + (n == 1)}\n" for n in cluster.nodes))
        launcher = mpirun_path()
        assert launcher is not None
        done = cluster.run(
            [launcher, "--prefix", str(Path(launcher).parents[1]), "--hostfile", str(slots),
             "--map-by", "node", "--bind-to", "none", "-np", str(hosts + 1),
             "--mca", "plm_ssh_args", cluster.environment()["PIPEINFER_SSH_ARGS"],
             "--mca", "btl_tcp_if_include", cluster.subnet,
             "--prtemca", "prte_if_include", cluster.subnet, "-x", "PYTHONPATH",
             *(word for name in SETTINGS for word in ("-x", name)),
             sys.executable, str(PROGRAM), str(out), str(hosts), str(rounds), REMOTE,
             *map(str, BYTES)], timeout=280, **{name: environment()[name] for name in SETTINGS})
        if done.returncode:
            sys.exit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return found


@click.command()
@click.option("--hosts", default="", help="Numbers of hosts, such as 2,4.")
@click.option("--widths", default="2", show_default=True, help="Members on this host.")
@click.option("--rounds", default=200, show_default=True)
@click.option("--rate", default="1gbit", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(hosts: str, widths: str, rounds: int, rate: str, as_json: bool) -> None:
    """Measure."""
    if hosts and (reason := why_not()):
        sys.exit(f"no cluster of namespaces here: {reason}")
    for count in map(int, (hosts or widths).split(",")):
        found = remote(count, rounds, rate) if hosts else local(count, rounds)
        if as_json:
            print(json.dumps({"members": count, "hosts": bool(hosts), **found}))
            continue
        print(f"{count} members{f' on {count} hosts at {rate}' if hosts else ''}; control: 32 KB "
              f"one way {1e6 * found['control']:.0f} us")
        print(f"{'bytes':>8}  " + "  ".join(f"{way:>13}" for way in found["seconds"]))
        for size in map(str, BYTES):
            print(f"{size:>8}  " + "  ".join(f"{1e6 * times[size]:>10.0f} us"
                                            for times in found["seconds"].values()))


if __name__ == "__main__":
    main()
