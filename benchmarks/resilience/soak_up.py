"""`pipeinfer up` for a long time under clients that never rest, with a fault every minute.

    python -m benchmarks.resilience.soak_up --minutes 120

Four clients of the official openai library, with its own time-outs, ask one thing after another.
Every minute one of these happens, shuffled: rank 0, the launcher, or all ranks with it are killed;
a stage is killed; the HTTP process, or everything of the host with `pipeinfer up` itself, which the
harness starts again as systemd would; the job moves to another number of ranks, or is reloaded with
other options. Every answer's tokens are compared with those of an undisturbed server. Clients whose
connection breaks ask again under their Idempotency-Key, as the journal allows.

Faults, answers and the memory of the processes that live on go to JSON lines. At the end the idle
server may hold nothing, and no process may be left. Needs the `test` extra; Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from pipeinfer.lab.chaos import client, openai_client, whole
from pipeinfer.lab.chaos.client import Answer
from pipeinfer.lab.chaos.job import ServerJob, Trouble, environment
from pipeinfer.lab.chaos.report import resumed
from pipeinfer.lab.chaos.trial import DRAIN_SECONDS, GONE_SECONDS, bodies

RESULTS = Path(__file__).parents[1] / "results" / "soak"
#: how often each comes, of all
SHARES = {"head": 28, "mpirun": 28, "job": 28, "door": 12, "host": 8, "stage": 6, "rescale": 5,
          "reload": 5}
READY_SECONDS, ANSWER_SECONDS, MEMORY_EVERY, SETTLE_SECONDS = 180.0, 240.0, 10.0, 30.0
QUEUE_FULL = 429
GAUGES = ("waiting", "lanes", "runs", "open_choices")


class Soak:
    """One soak; `run` gives its verdict."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self._cache = options, folder / "cache"
        self._rng = random.Random(options.seed)
        self.bodies = bodies(options.bodies, options.tokens, options.seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.faults: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._answers: list[Answer] = []  #: being given, and those of the last fault
        self._numbers = itertools.count()
        self._lines = options.out.open("w", encoding="utf-8")
        self._begin = time.monotonic()
        self._words = ["-c", "2048", "-t", "1", "--parallel", "4", "--any-model-name",
                       *options.serve]
        self._ranks = options.np
        self._wanted: list[tuple[int, ...]] = []

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """One line of the record; `t` is seconds since the server was ready."""
        line = {"t": round(time.monotonic() - self._begin, 2), "kind": kind, **values}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        return line

    async def run(self) -> dict[str, Any]:
        """The verdict. Raises Trouble."""
        options = self.options
        seconds = 60 * options.minutes + 900
        await self._undisturbed()
        job = whole.start(options.np, self._words, self._cache, seconds, disk=False)
        try:
            await asyncio.to_thread(job.await_ready, READY_SECONDS)
            self._begin = time.monotonic()
            await self._serve(job)
            found = await self._end(job)
        finally:
            await asyncio.to_thread(job.close)
            options.out.with_suffix(".log").write_text("".join(job.log), encoding="utf-8")
            whole.remove(self._cache)
        self.write("verdict", **found)
        self._lines.close()
        return found

    async def _undisturbed(self) -> None:
        job = ServerJob(self.options.np, ["--port", "0", *self._words], seconds=900,
                        environ={"PIPEINFER_CACHE": str(self._cache)})
        try:
            await asyncio.to_thread(job.await_ready, READY_SECONDS)
            for body in self.bodies:
                answer = await client.complete(job.url, body)
                if answer.trouble:
                    raise job.trouble(f"without any fault a request failed ({answer.trouble})")
                self._wanted.append(tuple(answer.tokens))
        finally:
            await asyncio.to_thread(job.close)

    async def _serve(self, job: ServerJob) -> None:
        end = self._begin + 60 * self.options.minutes
        clients = [asyncio.create_task(self._ask_on_and_on(job, end))
                   for _ in range(self.options.clients)]
        side = [asyncio.create_task(self._strike_every_minute(job)),
                asyncio.create_task(self._watch_memory(job))]
        last = end + ANSWER_SECONDS - time.monotonic()
        for task in (await asyncio.wait(clients, timeout=last))[1]:
            self.wrong.append("a client never came to its end")
            task.cancel()
        for task in side:
            task.cancel()
        for trouble in await asyncio.gather(*clients, *side, return_exceptions=True):
            if isinstance(trouble, Exception):
                self.wrong.append(f"the harness: {trouble!r}")

    # --- clients ------------------------------------------------------------------------------

    async def _ask_on_and_on(self, job: ServerJob, end: float) -> None:
        while time.monotonic() < end:
            await self._ask(job, self._rng.randrange(len(self.bodies)))

    async def _ask(self, job: ServerJob, index: int) -> None:
        answer, begin, asked = Answer(), time.monotonic(), 0
        wanted, key = self._wanted[index], f"{job.id}-{next(self._numbers)}"
        self._answers.append(answer)
        while True:
            asked += 1
            await openai_client.complete(job.url, self.bodies[index], answer=answer, key=key)
            late = time.monotonic() - begin > ANSWER_SECONDS
            refused = 400 <= answer.status < 500 and answer.status != QUEUE_FULL
            other = tuple(answer.tokens) != wanted[:len(answer.tokens)]
            if not answer.trouble or late or refused or other:
                break
            await asyncio.sleep(0.2)
        self._answers.remove(answer)
        got = tuple(answer.tokens)
        outcome = ("other tokens" if got != wanted[:len(got)] else
                   "whole" if not answer.trouble and got == wanted else "lost")
        self.counts[outcome] += 1
        hit = {fault["number"]: seconds for fault in self.faults if fault["at"] > begin
               if (seconds := resumed(answer.times, fault["at"])) is not None}
        self.write("answer", body=index, outcome=outcome, tokens=len(got), asked=asked,
                   trouble=answer.trouble, seconds=round(time.monotonic() - begin, 2), hit=hit)
        for number, seconds in hit.items():
            self.faults[number]["silences"].append(round(seconds, 2))
        if outcome != "whole":
            self.wrong.append(f"body {index}: {outcome}, {len(got)} of {len(wanted)} tokens, "
                              f"{answer.trouble}")

    # --- faults -------------------------------------------------------------------------------

    async def _strike_every_minute(self, job: ServerJob) -> None:
        kinds: list[str] = []
        while True:
            await asyncio.sleep(self.options.every)
            if not kinds:
                kinds = [kind for kind in self.options.do for _ in range(SHARES[kind])]
                self._rng.shuffle(kinds)
            begin = time.monotonic()
            while (await client.get(job.url, "/health"))[0] != 200:
                if time.monotonic() - begin > READY_SECONDS:
                    self.wrong.append("no server came back")
                    return
                await asyncio.sleep(0.2)
            # a stream must be there to be disturbed
            while not any(answer.tokens for answer in list(self._answers)):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(self._strike, job, kinds.pop())

    def _strike(self, job: ServerJob, kind: str) -> None:
        fault = {"number": len(self.faults), "at": time.monotonic(), "what": kind,
                 "open": len(self._answers), "silences": list[float](), "said": ""}
        self.faults.append(fault)
        match kind:
            case "rescale":
                self._ranks = 2 * self.options.np + 1 - self._ranks  # one more, and back
                fault["said"] = self._call("rescale", "-np", str(self._ranks))
            case "reload":
                how = self._rng.choice([["--speculation", "off"], ["--queue", "8"], []])
                serve = job.words[job.words.index("serve"):]
                fault["said"] = self._call("reload", "--", *serve, *how)
            case "stage":
                stages = {r: p for r, p in job.rank_processes().items() if r}
                if stages:
                    stages[self._rng.choice(list(stages))].kill()
            case _:
                for process in whole.processes(job, kind):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                if kind == "host":
                    job.start_again()
        self.write("fault", **{k: v for k, v in fault.items() if k != "silences"})

    def _call(self, *words: str) -> str:
        """What a command has printed, or why it failed."""
        done = subprocess.run(
            [sys.executable, "-m", "pipeinfer", *words], capture_output=True, text=True,
            timeout=300, check=False,
            env=environment(PIPEINFER_STATE=str(whole.state_of(self._cache))))
        if done.returncode:
            self.wrong.append(f"{words[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    # --- looking ------------------------------------------------------------------------------

    async def _watch_memory(self, job: ServerJob) -> None:
        while True:
            self.samples.append(self.write("memory", processes=await asyncio.to_thread(
                self._sizes, job)))
            await asyncio.sleep(MEMORY_EVERY)

    def _sizes(self, job: ServerJob) -> dict[str, dict[str, int]]:
        """Bytes and files of what outlives jobs: `up` and the HTTP process, each by name and pid;
        and of its folder."""
        found = {}
        for name in ("up", "door"):
            with contextlib.suppress(psutil.Error):
                for process in whole.processes(job, name):
                    found[f"{name} {process.pid}"] = {
                        "uss": process.memory_full_info().uss, "fds": process.num_fds()}
        state = whole.state_of(self._cache)
        found["folder"] = {"uss": sum(path.stat().st_size for path in state.rglob("*")
                                      if path.is_file()), "fds": 0}
        return found

    async def _gauges(self, job: ServerJob) -> dict[str, float]:
        status, text = await client.get(job.url, "/metrics")
        lines = text.splitlines() if status == 200 and isinstance(text, str) else []
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name.removeprefix("pipeinfer_"): float(value) for name, _, value in pairs
                if name.removeprefix("pipeinfer_") in GAUGES}

    async def _end(self, job: ServerJob) -> dict[str, Any]:
        deadline, gauges = time.monotonic() + 30.0, await self._gauges(job)
        while time.monotonic() < deadline and (not gauges or any(gauges.values())):
            await asyncio.sleep(0.5)
            gauges = await self._gauges(job)
        code = await asyncio.to_thread(job.drain, DRAIN_SECONDS)
        left = await asyncio.to_thread(job.left_over, GONE_SECONDS)
        grown = growths(self.samples)
        checks = {
            "every answer whole and right": not self.wrong,
            "idle at the end": bool(gauges) and not any(gauges.values()),
            "ended when asked": code is not None, "nothing left behind": not left,
            "memory flat": all(g["mib"] < self.options.flat_mib for g in grown.values()),
            "files flat": all(g["fds"] <= 8 for g in grown.values()),
        }
        kinds = {}
        for kind in SHARES:
            own = [fault for fault in self.faults if fault["what"] == kind]
            times = [s for fault in own for s in fault["silences"]]
            kinds[kind] = {"times": len(own), "streams": len(times),
                           "median_s": round(statistics.median(times), 1) if times else None,
                           "worst_s": max(times, default=None)}
        return {"minutes": self.options.minutes, "faults": len(self.faults), "kinds": kinds,
                "answers": dict(self.counts), "wrong": self.wrong[:20], "gauges": gauges,
                "exit_code": code, "left": left, "growth": grown, "checks": checks,
                "good": all(checks.values())}


def growths(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """MiB and files that each process has grown by: the median of its last three samples less that
    of its first three after SETTLE_SECONDS; `minutes` between them."""
    found = {}
    for name in sorted({name for sample in samples for name in sample["processes"]}):
        seen = [sample for sample in samples if name in sample["processes"]]
        seen = [sample for sample in seen if sample["t"] >= seen[0]["t"] + SETTLE_SECONDS]
        if len(seen) >= 6 and name != "folder":
            first, last = ({key: statistics.median(s["processes"][name][key] for s in part)
                            for key in ("uss", "fds")} for part in (seen[:3], seen[-3:]))
            found[name] = {"mib": round((last["uss"] - first["uss"]) / 2**20, 2),
                           "fds": last["fds"] - first["fds"],
                           "minutes": round((seen[-1]["t"] - seen[0]["t"]) / 60, 1)}
    return found


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--do", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--np", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--bodies", type=int, default=20, help="different requests")
    parser.add_argument("--tokens", type=int, default=400, help="most of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flat-mib", type=float, default=32.0,
                        help="growth of a process that still counts as flat")
    parser.add_argument("--out", type=Path, default=RESULTS / "up.jsonl")
    parser.add_argument("serve", nargs="*", help="options of `pipeinfer serve`, after --")
    return parser.parse_args()


def main() -> int:
    """Run and report."""
    options = parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pipeinfer-soak-"))
    try:
        found = asyncio.run(Soak(options, folder).run())
    except Trouble as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))
    for check, good in found["checks"].items():
        print(f"{'ok  ' if good else 'FAIL'} {check}", file=sys.stderr)
    return int(not found["good"])


if __name__ == "__main__":
    sys.exit(main())
