"""One server under `pipeinfer up` for a long time, with clients that never rest and faults.

Besides the faults of other campaigns the job moves to another number of ranks and is loaded again
with other options. Every answer's tokens are compared with those of an undisturbed run. At the end
the idle server may hold nothing, what outlives jobs may not have grown, and no process may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from pipeinfer_lab.chaos import client, whole
from pipeinfer_lab.chaos.client import Answer
from pipeinfer_lab.chaos.job import ServerJob, Trouble, environment
from pipeinfer_lab.chaos.report import Outcome, resumed
from pipeinfer_lab.chaos.trial import (
    DRAIN_SECONDS,
    GONE_SECONDS,
    Setup,
    Undisturbed,
    keep_log,
)

RESCALE, RELOAD = "rescale", "reload"
MOVES = (RESCALE, RELOAD)
FAULTS = ("kill", *whole.WHOLE, *MOVES)
MOMENT, END = "serving", "end"
_READY_SECONDS, _MEMORY_EVERY, _IDLE_SECONDS = 180.0, 10.0, 120.0
_SETTLE, _ENDS = 3, 3  #: samples of memory that are left out at the start, and that are compared
_FLAT_BYTES, _FLAT_FILES = 32 * 2**20, 8  #: by how much a process may grow
_QUEUE_FULL = 429
_GAUGES = ("waiting", "lanes", "runs", "open_choices")


async def soak(setup: Setup, wanted: Undisturbed, faults: Sequence[str], minutes: float,
               every: float, rng: random.Random) -> list[Outcome]:
    """Return an outcome for each fault, and a last one for what was found at the end.

    faults: of FAULTS; each comes once before any comes again
    every: seconds between two of them
    """
    job = setup.start(setup.cache, "kill-up", seconds=60 * minutes)  # so under `pipeinfer up`
    try:
        await asyncio.to_thread(job.await_ready, _READY_SECONDS)
        return await _Soak(setup, wanted, job, rng).run(faults, 60 * minutes, every)
    finally:
        await asyncio.to_thread(job.close)
        keep_log(setup, job, "soak")
        whole.remove(setup.cache)


class _Soak:
    def __init__(self, setup: Setup, wanted: Undisturbed, job: ServerJob, rng: random.Random
                 ) -> None:
        self._setup, self._wanted, self._job, self._rng = setup, wanted, job, rng
        self._faults: list[Outcome] = []
        self._times: list[float] = []  #: of the faults
        self._end = Outcome(0, END, MOMENT, "the end", happened=True)
        self._open: list[Answer] = []
        self._over = asyncio.Event()
        self._keys = itertools.count()
        self._ranks, self._more = setup.ranks, 1
        self._sizes: dict[str, list[tuple[int, int]]] = {}  #: by process: bytes and open files

    async def run(self, faults: Sequence[str], seconds: float, every: float) -> list[Outcome]:
        """Ask, strike, and look at what is left. Raises Trouble."""
        end = time.monotonic() + seconds
        clients = [asyncio.create_task(self._ask_on_and_on(end)) for _ in self._setup.bodies]
        strikes = asyncio.create_task(self._strike_again_and_again(faults, every))
        memory = asyncio.create_task(self._watch_memory())
        late = (await asyncio.wait(clients, timeout=seconds + self._setup.answer_seconds))[1]
        self._over.set()  # the last fault comes to its end: a move may be under way
        for task in (*late, memory):
            task.cancel()
        found = await asyncio.gather(*clients, strikes, memory, return_exceptions=True)
        for trouble in found:
            if isinstance(trouble, Exception):
                self._end.trouble += f"{trouble}\n"
        if late:
            self._end.trouble += f"{len(late)} answers had no end\n"
        await self._look_at_the_end()
        for outcome in self._faults:
            outcome.exit_code = self._end.exit_code
            outcome.next_any = min(outcome.next_all, default=None)
        self._end.number = len(self._faults)
        return [*self._faults, self._end]

    # --- clients ------------------------------------------------------------------------------

    async def _ask_on_and_on(self, end: float) -> None:
        while time.monotonic() < end:
            await self._ask(self._rng.randrange(len(self._setup.bodies)))

    async def _ask(self, index: int) -> None:
        """One request until it is whole, wrong or late: when a connection breaks, under its key."""
        answer, begin = Answer(), time.monotonic()
        wanted, key = self._wanted.tokens[index], f"{self._job.id}-{next(self._keys)}"
        self._open.append(answer)
        while True:
            await self._setup.complete(self._job.url, self._setup.bodies[index], answer=answer,
                                       key=key)
            same = tuple(answer.tokens) == wanted[:len(answer.tokens)]
            refused = 400 <= answer.status < 500 and answer.status != _QUEUE_FULL
            late = time.monotonic() - begin > self._setup.answer_seconds
            if not answer.trouble or not same or refused or late:
                break
            await asyncio.sleep(0.2)
        self._open.remove(answer)
        last = self._faults[-1] if self._faults else self._end
        if not same:
            last.different.append(index)
        elif answer.trouble or len(answer.tokens) < len(wanted):
            last.lost[index] = f"{len(answer.tokens)} of {len(wanted)} tokens, {answer.trouble}"
        for outcome, at in zip(self._faults, self._times, strict=True):
            if at > begin and (silence := resumed(answer.times, at)) is not None:
                outcome.next_all.append(silence)

    # --- faults -------------------------------------------------------------------------------

    async def _strike_again_and_again(self, faults: Sequence[str], every: float) -> None:
        left: list[str] = []
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), every)
            left = left or self._rng.sample(faults, len(faults))
            begin = time.monotonic()
            while (await client.get(self._job.url, "/health"))[0] != 200:
                if time.monotonic() - begin > _READY_SECONDS:
                    raise Trouble("no server came back")
                await asyncio.sleep(0.2)
            while not (any(answer.tokens for answer in self._open) or self._over.is_set()):
                await asyncio.sleep(0.01)  # a stream must be there to be disturbed
            if self._over.is_set():
                return
            await asyncio.to_thread(self._strike, left.pop())

    def _strike(self, fault: str) -> None:
        out = Outcome(len(self._faults), fault, MOMENT, fault)
        self._times.append(time.monotonic())
        self._faults.append(out)
        if fault in MOVES:
            out.happened = self._move(out, fault)
            return
        if fault == "kill":
            stages = [(rank, p) for rank, p in self._job.rank_processes().items() if rank]
            hit = [(self._rng.choice(stages)[1], whole.KILL)] if stages else []
        else:
            who, number = whole.WHOLE[fault]
            hit = [(process, number) for process in whole.processes(self._job, who)]
        for process, number in hit:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
                out.happened = True
        if fault in whole.NOBODY_LEFT:
            self._job.start_again()

    def _move(self, out: Outcome, fault: str) -> bool:
        """Let the job move, by the command of an operator; whether it did."""
        if fault == RESCALE:
            self._ranks, self._more = self._ranks + self._more, -self._more
            words = ["rescale", "-np", str(self._ranks)]
        else:
            serve = self._job.words[self._job.words.index("serve"):]
            words = ["reload", "--", *serve, *self._rng.choice((["--speculation", "off"], []))]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pipeinfer", *words], capture_output=True, text=True,
            timeout=300, check=False,
            env=environment(PIPEINFER_STATE=str(whole.state_of(self._setup.cache))))
        if done.returncode:
            out.trouble = done.stderr.strip()
        return done.returncode == 0

    # --- what is left -------------------------------------------------------------------------

    async def _watch_memory(self) -> None:
        while True:
            for name, size in (await asyncio.to_thread(self._measured)).items():
                self._sizes.setdefault(name, []).append(size)
            await asyncio.sleep(_MEMORY_EVERY)

    def _measured(self) -> dict[str, tuple[int, int]]:
        """Bytes and open files of what outlives jobs, `up` and the HTTP process."""
        found = {}
        for name in ("up", "door"):
            with contextlib.suppress(psutil.Error):
                for process in whole.processes(self._job, name):
                    found[f"{name} {process.pid}"] = (process.memory_full_info().uss,
                                                      process.num_fds())
        return found

    async def _look_at_the_end(self) -> None:
        out, deadline = self._end, time.monotonic() + _IDLE_SECONDS
        held = await self._held()
        while held and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            held = await self._held()
        out.left += held
        out.exit_code = await asyncio.to_thread(self._job.drain, DRAIN_SECONDS)
        if out.exit_code is None:
            out.left.append(f"the job did not end {DRAIN_SECONDS:g} s after it was asked to")
        out.left += await asyncio.to_thread(self._job.left_over, GONE_SECONDS)
        out.left += grown(self._sizes)

    async def _held(self) -> list[str]:
        """What the server counts although nothing is asked of it."""
        status, text = await client.get(self._job.url, "/metrics")
        if status != 200:
            return ["no metrics"]
        values = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return [f"{name} of {value}" for name, _, value in values
                if name.removeprefix("pipeinfer_") in _GAUGES and float(value)]


def grown(sizes: dict[str, list[tuple[int, int]]]) -> list[str]:
    """Return the processes that have grown, in words.

    sizes: by process, bytes and open files at equal distances in time; the medians of the first and
        the last samples are compared
    """
    found = []
    for name, samples in sizes.items():
        seen = samples[_SETTLE:]
        if len(seen) >= 2 * _ENDS:
            n_bytes, files = (statistics.median(last[k] for last in seen[-_ENDS:])
                              - statistics.median(first[k] for first in seen[:_ENDS])
                              for k in (0, 1))
            if n_bytes > _FLAT_BYTES or files > _FLAT_FILES:
                found.append(f"{name} has grown by {n_bytes / 2**20:.0f} MiB, {files:.0f} files")
    return found
