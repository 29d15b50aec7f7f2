"""Large sends move while their sender computes, over TCP (MPI fact: without help they do not).

    python -m benchmarks.kernels.overlap -o overlap.png

Runs benchmarks/kernels/programs/overlap.py over `--mca btl tcp,self` with launch/mpi.env and, for
comparison, without its TCP settings; prints arrival times and throughput, draws the stages.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import click

from pipeinfer.cli.timeline import chrome_trace, draw_timeline
from tests.rig.launch import ROOT, run

TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
OFF = {"OMPI_MCA_btl_tcp_progress_thread": "0", "OMPI_MCA_btl_tcp_eager_limit": "65536"}


def measure(megabytes: float, **env: str) -> dict:
    """One job of four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        program = ROOT / "benchmarks" / "kernels" / "programs" / "overlap.py"
        done = run(4, [sys.executable, str(program), str(out), str(megabytes)], timeout=120,
                   mpi_args=TCP, **env)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        return json.loads(out.read_text())


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Timeline picture.")
@click.option("--megabytes", default=1.0, help="Activations per run.")
def main(output: Path | None, megabytes: float) -> None:
    """Print arrivals and throughput with and without the TCP settings."""
    for label, env in (("with launch/mpi.env", {}), ("without its TCP settings", OFF)):
        got = measure(megabytes, **env)
        arrivals = [1e3 * a for a in got["arrivals"]]
        print(f"{label}: {got['bytes'] / 2**20:.2f} MiB arrive after median "
              f"{statistics.median(arrivals):.1f} ms, worst {max(arrivals):.1f} ms, while the "
              f"sender computes for 300 ms; three stages of "
              f"{1e3 * got['stage_seconds']:.0f} ms finish a run every "
              f"{1e3 * got['run_seconds']:.1f} ms")
        if output and not env:
            reports = {int(k): {**v, "host": "tcp"} for k, v in got["reports"].items()}
            zero = min(e[1] for r in reports.values() for e in r["events"])
            fates = {e[0]: "non-speculative" for r in reports.values() for e in r["events"]}
            trace = chrome_trace([(0, zero, False, 1)], [], [], reports, fates)
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(trace, file)
                file.flush()
                draw_timeline(Path(file.name), output, start_ms=150, span_ms=400)


if __name__ == "__main__":
    main()
