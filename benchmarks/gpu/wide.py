"""Tokens per second of a wide stage whose members' slices are on devices, and on the processor.

    python -m benchmarks.gpu.wide FOLDER [--rounds 5]

FOLDER: with llama.cpp's library and RPC device, as benchmarks/gpu/build.sh makes it. Each rank has
an RPC server on this host's processor. A JSON object for each arrangement: the median and the range
of plain decoding of the embedded target, one thread to a rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import jobs
from benchmarks.gpu.devices import Device
from benchmarks.gpu.steps import child, json_lines

#: ranks, and their options
ARRANGEMENTS = {
    "one rank": (1, ()),
    "a stage of two members": (3, ("--grid", "1x2")),
    "two stages": (3, ("--layers", "6,6")),
}
_WORDS = ("-m", "pipeinfer", "generate", "-m", str(jobs.TARGET), "-p", "def main(", "-n", "120",
          "--temp", "0", "--ignore-eos", "-c", "512", "-t", "1", "-md", "none", "--policy",
          "iterative", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "--pad", "1", "--json")


def speed(device: Device, ranks: int, log: Path, *more: str) -> float:
    """Tokens per second of one job, by its median time between tokens."""
    with device.open(ranks) as env:
        command = jobs.command(ranks, [sys.executable, *_WORDS, *more])
        printed = child(command, 120, log, jobs.job_environment(env, MPIEXEC_TIMEOUT="115"))
    return 1 / float(json_lines(printed)[0]["stats"]["inter_token_latency_median"])


def main() -> None:
    """Print the figures of each arrangement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device = Device("rpc", given.folder)
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for name, (ranks, more) in ARRANGEMENTS.items():
                for where, layers in (("processor", "0"), ("RPC device", "99")):
                    found.setdefault((name, where), []).append(speed(
                        device, ranks, Path(folder) / "log", *more, "-ngl", layers))
    for (name, where), speeds in found.items():
        print(json.dumps({"arrangement": name, "where": where,
                          "median": round(statistics.median(speeds), 1),
                          "range": [round(min(speeds), 1), round(max(speeds), 1)]}))


if __name__ == "__main__":
    main()
