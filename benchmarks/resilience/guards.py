"""What heartbeats and watchdogs cost while nothing fails.

    python -m benchmarks.resilience.guards

1. their threads and processes alone: processor time per second of a rank that does nothing else;
2. tokens per second of jobs with them, without them, and without them once more, in turns: the
   second ratio is what the machine's noise makes of no difference at all.

Epochs have no part of their own: they are in MPI's tag, and without heartbeats as well.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from pipeinfer.cluster.heartbeat import HeadPulse, RankPulse
from pipeinfer.cluster.watchdog import Watchdog
from pipeinfer.runtime.pulse import Pulse
from tests.rig.launch import ROOT, run

PROGRAMS = ROOT / "benchmarks" / "kernels" / "programs"
_SECONDS = 2.0  #: `--heartbeat`'s default
_RESAMPLES = 10_000


def alone(seconds: float) -> dict[str, float]:
    """Part 1: shares of one core, for one rank (its threads and its watchdog) and for the head's
    side of that rank."""
    pulse = Pulse()
    watchdog = Watchdog("rank 1", _SECONDS, pulse)
    head = HeadPulse(_SECONDS)
    rank = RankPulse(1, head.meeting, pulse, lambda: None)
    watchdog.arm()
    pulse.settle()
    time.sleep(1.0)
    process = psutil.Process()
    (child,) = process.children()
    begin, before, child_before = time.monotonic(), time.process_time(), _cpu(child.pid)
    time.sleep(seconds)
    wall = time.monotonic() - begin
    found = {"threads": (time.process_time() - before) / wall,
             "watchdog": (_cpu(child.pid) - child_before) / wall}
    watchdog.close()
    rank.close()
    head.close()
    return found


def _cpu(pid: int) -> float:
    """Processor seconds of a process with one thread, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def job(np_: int, rounds: int, tokens: int, config: dict[str, Any]) -> dict[str, Any]:
    """What `programs/steady.py` found, and the processor seconds of the whole job."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steady.json"
        before = os.times()
        done = run(np_, [sys.executable, str(PROGRAMS / "steady.py"),
                         str(out), str(rounds), str(tokens), json.dumps(config)], timeout=300.0)
        after = os.times()
        if done.returncode or not out.exists():
            sys.exit(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(out.read_text())
    found["cpu"] = (after.children_user + after.children_system
                    - before.children_user - before.children_system)
    return found


def interval(ratios: list[float]) -> str:
    """Median, and where 95 % of resampled medians lie."""
    draws = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


@click.command()
@click.option("--np", "np_", default=4)
@click.option("--pairs", default=12)
@click.option("--rounds", default=10, help="Requests of a job that count.")
@click.option("--tokens", default=400)
@click.option("--config", default='{"policy": "iterative"}', help="Options, as JSON.")
@click.option("--seconds", default=30.0, help="For part 1.")
def main(np_: int, pairs: int, rounds: int, tokens: int, config: str, seconds: float) -> None:
    """Run both parts."""
    for name, share in alone(seconds).items():
        print(f"{name}: {100 * share:.3f} % of a core for a rank", flush=True)
    given = json.loads(config)
    arms = {"on": _SECONDS, "off": 0.0, "off again": 0.0}
    speed: dict[str, list[float]] = {arm: [] for arm in arms}
    cpu: dict[str, list[float]] = {arm: [] for arm in arms}
    texts = set()
    for turn in range(pairs):
        names = list(arms)
        for arm in names[turn % 3:] + names[: turn % 3]:
            found = job(np_, rounds, tokens, {**given, "heartbeat": arms[arm]})
            speed[arm].append(statistics.median(found["speeds"]))
            cpu[arm].append(found["cpu"])
            texts |= {tuple(text) for text in found["texts"]}
        print(f"{turn + 1}: " + ", ".join(
            f"{arm} {speed[arm][-1]:.1f} tokens/s {cpu[arm][-1]:.2f} s"
            for arm in arms), flush=True)
    for label, values in (("tokens/s", speed), ("processor time", cpu)):
        for arm in ("on", "off again"):
            ratios = [a / b for a, b in zip(values[arm], values["off"], strict=True)]
            print(f"{label}, {arm} / off: {interval(ratios)}")
    print("texts are equal" if len(texts) == 1 else f"{len(texts)} DIFFERENT TEXTS")


if __name__ == "__main__":
    main()
