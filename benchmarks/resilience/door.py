"""The whole job is killed under streaming clients: do their streams go on, and how soon?

    python -m benchmarks.resilience.door --runs 10
    python -m benchmarks.resilience.door --runs 50 --kill head

Four clients of the official openai library, with its own time-outs, stream from `launch/run 3
serve` with PIPEINFER_RESTARTS. At a random moment rank 0, mpirun, or every process of the job is
killed. Every stream's tokens are compared with those of an undisturbed run. Times are from the kill
to each client's next token. Needs the `test` extra; Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pipeinfer.cluster import cleanup
from tests.rig import launch
from tests.rig.served import Served

CLIENTS = 4
KINDS = ("head", "mpirun", "all")
_PROMPTS = ("def f(", "import os\n", "class Stack:\n    def ", "for i in range(10):\n")


class Stream(threading.Thread):
    """One client: its tokens, and when they came."""

    def __init__(self, url: str, number: int, count: int) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.error = ""
        self._url, self._number, self._count = url, number, count
        self.start()

    def run(self) -> None:
        """Read the whole stream."""
        from openai import OpenAI, OpenAIError

        try:
            with OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
                for chunk in client.completions.create(
                        model="embedded", prompt=_PROMPTS[self._number], stream=True,
                        max_tokens=self._count, temperature=1.0, seed=self._number,
                        extra_body={"ignore_eos": True, "pipeinfer": {"detail": True}}):
                    found = (chunk.model_extra or {}).get("pipeinfer") or {}
                    if found:
                        self.tokens += found["tokens"]
                        self.times.append(time.monotonic())
        except OpenAIError as error:
            self.error = str(error)


def all_of(url: str, count: int) -> list[Stream]:
    """Every client at once."""
    return [Stream(url, number, count) for number in range(CLIENTS)]


def victims(job: str, kind: str) -> list[psutil.Process]:
    """The processes to kill."""
    found = []
    for process in cleanup.processes_of(job):
        with contextlib.suppress(psutil.Error):
            line, rank = process.cmdline(), process.environ().get("OMPI_COMM_WORLD_RANK")
            is_rank = rank is not None and "serve" in line
            starts = rank is None and os.path.basename(line[0]).startswith(("mpirun", "prterun"))
            if {"head": is_rank and rank == "0", "mpirun": starts, "all": is_rank or starts}[kind]:
                found.append(process)
    return found


def one(served: Served, job: str, kind: str, wanted: list[list[int]], rng: random.Random
        ) -> dict[str, Any]:
    """Kill during four streams; what came of them."""
    def kill() -> None:
        for process in victims(job, kind):
            with contextlib.suppress(psutil.Error):
                process.kill()

    return {"kind": kind, **during(served.url, wanted, rng, 0.8, kill)}


def during(url: str, wanted: list[list[int]], rng: random.Random, latest: float,
           act: Callable[[], None]) -> dict[str, Any]:
    """Act at some moment of four streams, at the `latest` part of them; what came of them."""
    count = len(wanted[0])
    streams = all_of(url, count)
    moment = rng.uniform(0.05, latest)
    while min(len(stream.tokens) for stream in streams) < moment * count:
        if any(stream.error for stream in streams):
            break
        time.sleep(0.005)
    acted = time.monotonic()
    act()
    for stream in streams:
        stream.join(120)
    silences = [max(b - a for a, b in zip([acted, *after], after, strict=False))
                for stream in streams if (after := [t for t in stream.times if t > acted])]
    return {"same": [s.tokens == w for s, w in zip(streams, wanted, strict=True)],
            "errors": [s.error for s in streams if s.error], "silences": silences}


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10, help="of each kind")
    parser.add_argument("--kill", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace-ms", type=float, default=10.0)
    parser.add_argument("--settle", type=float, default=20.0,
                        help="seconds between kills; jobs that live for less are started again "
                             "after longer and longer pauses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    port = launch.free_port()
    job, rng, rows = f"door-{os.getpid()}", random.Random(given.seed), []
    process = launch.start(
        [str(launch.ROOT / "launch" / "run"), "3", "serve", "--port", str(port), "-c", "2048", "-t",
         "1", "--hook", f"pace={given.pace_ms}"],
        timeout=36000, PIPEINFER_RESTARTS="1000", PIPEINFER_JOB=job)
    served = Served(process)
    try:
        served.wait_until_ready()
        undisturbed = all_of(served.url, given.tokens)
        for stream in undisturbed:
            stream.join(120)
        wanted = [stream.tokens for stream in undisturbed]
        assert all(len(tokens) == given.tokens for tokens in wanted)
        for _ in range(given.runs):
            for kind in given.kill:
                row = one(served, job, kind, wanted, rng)
                rows.append(row)
                print(f"{kind}: {sum(row['same'])} of {CLIENTS} streams the same, next token after "
                      f"{', '.join(f'{s:.1f}' for s in row['silences'])} s"
                      + "".join(f"; {error}" for error in row["errors"]), flush=True)
                served.until(lambda: served.health()[0] == 200, "a server", timeout=120)
                time.sleep(given.settle)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        cleanup.end(job)
    for kind in given.kill:
        own = [row for row in rows if row["kind"] == kind]
        times = [s for row in own for s in row["silences"]]
        print(f"{kind}: {len(own)} kills, {sum(sum(row['same']) for row in own)} of "
              f"{CLIENTS * len(own)} streams with the same tokens; longest silence median "
              f"{statistics.median(times):.1f} s, most {max(times):.1f} s")
    if given.json:
        given.json.write_text(json.dumps(rows))
    return int(not all(all(row["same"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
