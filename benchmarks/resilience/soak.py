"""One server for a long time: random arrivals and disconnects, a stage killed every so often.

    python -m benchmarks.resilience.soak --minutes 30 --kill-every 120 --np 20 --spares 15

Every answer is compared with an undisturbed one. Memory, files and threads of every rank and of
the HTTP process, open requests, lanes and cells go to JSON lines as the server runs. At the end
the idle server has to hold nothing: no request, run or lane, cells of remembered prompts only,
no file that is half written, no process more than ranks. Prints one JSON object; the figure is
drawn by benchmarks.soak_plot.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.resilience.soak_plot import draw
from pipeinfer.lab.chaos import client
from pipeinfer.lab.chaos.client import Answer
from pipeinfer.lab.chaos.job import ServerJob, Trouble
from pipeinfer.lab.chaos.trial import DRAIN_SECONDS, GONE_SECONDS, bodies, holders

RESULTS = Path(__file__).parents[1] / "results" / "soak"
READY_SECONDS, MEMORY_EVERY, STATE_EVERY = 180.0, 10.0, 5.0
LAST_ANSWERS_SECONDS, IDLE_SECONDS = 120.0, 15.0
SETTLE_SECONDS = 30.0  #: after the start and after a death, before growth is counted
GAUGES = ("waiting", "lanes", "runs", "cells_used", "cells", "kept_prefixes", "open_choices")


class Soak:
    """One soak; `found` is its verdict."""

    def __init__(self, options: argparse.Namespace, cache: Path) -> None:
        self.options, self._cache = options, cache
        self.rng = random.Random(options.seed)
        self.bodies = bodies(options.bodies, options.tokens, options.seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kills: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._wanted: list[tuple[int, ...]] = []
        self._open: set[asyncio.Task[None]] = set()
        self._processes: dict[str, psutil.Process] = {}
        self._lines = options.out.open("w", encoding="utf-8")
        self._begin = time.monotonic()

    def server(self, ranks: int, spares: int, seconds: float) -> ServerJob:
        """A server as the soak has it."""
        arguments = ["--port", "0", "-c", "1024", "-t", "1", "--parallel", "8", "--split", "equal",
                     *(["--spares", str(spares)] if spares else []), *self.options.serve]
        return ServerJob(ranks, arguments, seconds=seconds,
                         environ={"PIPEINFER_CACHE": str(self._cache)})

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """One line of the record; `t` is seconds since the server was ready."""
        line = {"t": round(time.monotonic() - self._begin, 2), "kind": kind, **values}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        return line

    # --- the whole ----------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """The verdict."""
        options = self.options
        await self._undisturbed()
        job = self.server(options.np, options.spares, 60 * options.minutes + 900)
        try:
            ranks = await asyncio.to_thread(job.await_ranks, READY_SECONDS)
            await asyncio.to_thread(job.await_ready, READY_SECONDS)
            http = job.http_process()
            self._processes = {str(rank): process for rank, process in ranks.items()}
            self._processes |= {"http": http} if http is not None else {}
            self._begin = time.monotonic()
            await self._serve(job)
            found = await self._end(job)
        finally:
            job.close()
            options.out.with_suffix(".log").write_text("".join(job.log), encoding="utf-8")
        self.write("verdict", **found)
        self._lines.close()
        return found

    async def _undisturbed(self) -> None:
        """What every request has to get, from a small server that nobody disturbs."""
        job = self.server(min(self.options.np, 5), 0, 900)
        try:
            await asyncio.to_thread(job.await_ready, READY_SECONDS)
            room = asyncio.Semaphore(8)

            async def one(body: dict[str, Any]) -> Answer:
                async with room:
                    return await client.complete(job.url, body)

            answers = await asyncio.gather(*(one(body) for body in self.bodies))
            bad = [answer.trouble for answer in answers if answer.trouble]
            if bad:
                raise job.trouble(f"without any fault a request failed ({bad[0]})")
            self._wanted = [tuple(answer.tokens) for answer in answers]
        finally:
            await asyncio.to_thread(job.close)

    async def _serve(self, job: ServerJob) -> None:
        watchers = [asyncio.create_task(each) for each in (
            self._repeat(MEMORY_EVERY, self._memory), self._repeat(STATE_EVERY, self._state, job))]
        killer = asyncio.create_task(self._kill_now_and_then(job))
        end = self._begin + 60 * self.options.minutes
        while time.monotonic() < end and job.process.poll() is None:
            await asyncio.sleep(min(self.rng.expovariate(self.options.rate),
                                    max(0.0, end - time.monotonic())))
            task = asyncio.create_task(self._request(job))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        killer.cancel()
        if self._open:
            late = (await asyncio.wait(set(self._open), timeout=LAST_ANSWERS_SECONDS))[1]
            for task in late:
                self.counts["never ended"] += 1
                task.cancel()
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(killer, *watchers, return_exceptions=True)

    async def _repeat(self, seconds: float, what: Any, *args: Any) -> None:
        while True:
            await what(*args)
            await asyncio.sleep(seconds)

    # --- requests and deaths ------------------------------------------------------------------

    async def _request(self, job: ServerJob) -> None:
        index = self.rng.randrange(len(self.bodies))
        wanted = self._wanted[index]
        leave = self.rng.randrange(1, len(wanted)) if self.rng.random() < 0.2 else None
        begin = time.monotonic()
        answer = await client.complete(job.url, self.bodies[index], leave_after=leave)
        got = tuple(answer.tokens)
        if got != wanted[:len(got)]:
            outcome = "other tokens"
        elif answer.left:
            outcome = "left"
        else:
            outcome = "whole" if not answer.trouble and got == wanted else "lost"
        self.counts[outcome] += 1
        gaps = [b - a for a, b in pairwise(answer.times)]
        self.write("answer", body=index, outcome=outcome, tokens=len(got), trouble=answer.trouble,
                   seconds=round(time.monotonic() - begin, 3),
                   longest_gap=round(max(gaps, default=0.0), 3))
        if outcome in ("other tokens", "lost"):
            self.wrong.append(f"body {index}: {outcome}, {len(got)} of {len(wanted)} tokens, "
                              f"{answer.trouble}")

    async def _kill_now_and_then(self, job: ServerJob) -> None:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.options.fault]
        while True:
            await asyncio.sleep(self.options.kill_every)
            dead = {kill["rank"] for kill in self.kills}
            active = [r for r in await holders(job.url) if r not in dead]
            if not active:
                self.write("no kill", why="the server names no stage that lives")
                continue
            rank = self.rng.choice(active)
            with contextlib.suppress(psutil.Error):
                self._processes[str(rank)].send_signal(number)
                self.kills.append(self.write("kill", rank=rank, fault=self.options.fault,
                                             open=len(self._open)))

    # --- looking ------------------------------------------------------------------------------

    async def _memory(self) -> None:
        sample = self.write("memory", processes=await asyncio.to_thread(self._sizes))
        self.samples.append(sample)

    def _sizes(self) -> dict[str, dict[str, int]]:
        """Bytes, files and threads of every process that lives."""
        found = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    continue
                memory = process.memory_full_info()
                found[name] = {"uss": memory.uss, "rss": memory.rss, "fds": process.num_fds(),
                               "threads": process.num_threads()}
        return found

    async def _state(self, job: ServerJob) -> dict[str, float]:
        status, text = await client.get(job.url, "/metrics")
        gauges = {}
        for line in text.splitlines() if status == 200 and isinstance(text, str) else []:
            name, _, value = line.rpartition(" ")
            if name.removeprefix("pipeinfer_") in GAUGES:
                gauges[name.removeprefix("pipeinfer_")] = float(value)
        health = (await client.get(job.url, "/health"))[1]
        self.write("state", gauges=gauges, health=health, clients=len(self._open))
        return gauges

    # --- the end ------------------------------------------------------------------------------

    async def _end(self, job: ServerJob) -> dict[str, Any]:
        deadline, gauges = time.monotonic() + IDLE_SECONDS, await self._state(job)
        while time.monotonic() < deadline and not self._idle(gauges):
            await asyncio.sleep(0.5)
            gauges = await self._state(job)
        await self._memory()
        health = (await client.get(job.url, "/health"))[1]
        lived = job.process.poll() is None
        alive = await asyncio.to_thread(job.rank_processes)
        code = await asyncio.to_thread(job.drain, DRAIN_SECONDS)
        left = await asyncio.to_thread(job.left_over, GONE_SECONDS)
        files = [path.name for suffix in ("tmp", "part")
                 for path in self._cache.glob(f"*.{suffix}")]
        growth = growths(self.samples, [kill["t"] for kill in self.kills])
        most = self.options.np - len(self.kills)
        bounds = sum(len(str(body["prompt"])) for body in self.bodies)  # a token has a character
        checks = {
            "the server lived to the end": lived,
            "every answer right": not self.wrong and not self.counts["never ended"],
            "idle at the end": self._idle(gauges),
            "cells only of remembered prompts":
                gauges.get("cells_used", 1.0) <= (bounds if gauges.get("kept_prefixes") else 0),
            "no process more than ranks that live": len(alive) <= most,
            "nothing left behind": not left and not files,
            "memory flat": "0" in growth and all(
                g["mib"] < self.options.flat_mib for g in growth.values()),
            "files flat": all(g["fds"] <= 8 for g in growth.values()),
        }
        return {
            "np": self.options.np, "spares": self.options.spares, "fault": self.options.fault,
            "minutes": self.options.minutes, "kills": len(self.kills), "answers": self.counts,
            "recoveries": health.get("recoveries") if isinstance(health, dict) else None,
            "wrong": self.wrong[:20], "gauges": gauges, "exit_code": code, "left": left,
            "files": files, "growth": growth, "checks": checks, "good": all(checks.values()),
        }

    @staticmethod
    def _idle(gauges: dict[str, float]) -> bool:
        return bool(gauges) and not any(
            gauges.get(name, 1.0) for name in ("waiting", "lanes", "runs", "open_choices"))


def growths(samples: list[dict[str, Any]], deaths: list[float]) -> dict[str, dict[str, float]]:
    """MiB and files that each process has grown by, steps right after deaths left out.

    Memory may step when layers move; between deaths it has to stay. Each stretch between two
    deaths counts from SETTLE_SECONDS on, as the median of its last three samples less that of its
    first three. Processes without such a stretch are left out.
    """
    bounds = [0.0, *deaths, float("inf")]
    names = {name for sample in samples for name in sample["processes"]}
    found = {}
    for name in sorted(names, key=lambda n: (not n.isdecimal(), n.zfill(4))):
        total, stretches = {"uss": 0.0, "fds": 0.0}, 0
        for start, stop in pairwise(bounds):
            seen = [s["processes"][name] for s in samples
                    if start + SETTLE_SECONDS <= s["t"] < stop and name in s["processes"]]
            if len(seen) >= 6:
                stretches += 1
                for key in total:
                    first, last = ([one[key] for one in part] for part in (seen[:3], seen[-3:]))
                    total[key] += statistics.median(last) - statistics.median(first)
        if stretches:
            found[name] = {"mib": round(total["uss"] / 2**20, 2), "fds": total["fds"],
                           "stretches": stretches}
    return found


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--fault", choices=("kill", "stop"), default="kill")
    parser.add_argument("--np", type=int, default=20)
    parser.add_argument("--spares", type=int, default=15)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--bodies", type=int, default=40, help="different requests")
    parser.add_argument("--tokens", type=int, default=120, help="most of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flat-mib", type=float, default=16.0,
                        help="growth of a process that still counts as flat")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.jsonl")
    parser.add_argument("serve", nargs="*", help="options of `pipeinfer serve`, after --")
    return parser.parse_args()


def main() -> int:
    """Run, draw and report."""
    options = parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="pipeinfer-soak-"))
    try:
        found = asyncio.run(Soak(options, cache).run())
    except Trouble as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    draw(options.out, options.out.with_suffix(".png"))
    print(json.dumps(found))
    for check, good in found["checks"].items():
        print(f"{'ok  ' if good else 'FAIL'} {check}", file=sys.stderr)
    return int(not found["good"])


if __name__ == "__main__":
    sys.exit(main())
