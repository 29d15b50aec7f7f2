"""What a waiting job costs: processor time of all ranks while no request is open.

    python -m benchmarks.kernels.idle --ranks 4 --seconds 10
"""

from __future__ import annotations

import subprocess
import sys
import time

import click
import psutil

from tests.rig.launch import environment, mpirun_path

PROGRAM = """
import time
from pipeinfer.cluster.launch import join
from pipeinfer.config import JobConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.cluster.generate import run_request
joined = join(JobConfig.of(ctx=512))
if joined.place.rank:
    joined.serve()
else:
    with joined.lead() as session:
        run_request(session, [1, 2, 3], SamplingParams(), 8, ignore_eos=True)
        print("idle", flush=True)
        end = time.monotonic() + {seconds}
        while time.monotonic() < end:
            session.head.next_news(1.0)
"""


@click.command()
@click.option("--ranks", default=4)
@click.option("--seconds", default=10.0)
def main(ranks: int, seconds: float) -> None:
    """Print the share of one core that the whole job uses."""
    launcher = mpirun_path()
    assert launcher is not None
    job = subprocess.Popen(
        [launcher, "-np", str(ranks), sys.executable, "-c", PROGRAM.format(seconds=seconds + 3)],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment())
    assert job.stdout is not None
    while "idle" not in job.stdout.readline():
        pass
    time.sleep(1)
    processes = [p for p in psutil.Process(job.pid).children(recursive=True)
                 if "python" in p.name()]

    def used() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    start, before = time.monotonic(), used()
    time.sleep(seconds)
    share = (used() - before) / (time.monotonic() - start)
    print(f"{len(processes)} waiting ranks use {share:.2%} of one core in all")
    job.wait(60)


if __name__ == "__main__":
    main()
