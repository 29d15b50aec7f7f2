"""Finished experiments in a file, one JSON line each, and the pool that adds to it.

A line is keyed by the experiment and by the sources that it depends on: after a change of the
scheduler or of a profile everything is computed anew, and a killed run loses at most what it was
computing. Knows no figure.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pipeinfer
import pipeinfer_lab
from pipeinfer.emulation import scenarios, virtual
from pipeinfer.emulation.profiles import Profiles, load_profiles
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer_lab.commands import bench
from pipeinfer_lab.traced import Traced, simulate

_DIE_WITH_PARENT = 1  #: PR_SET_PDEATHSIG
EXTRA = Path(__file__).with_name("paper.toml")
#: Whatever decides, proposes or emulates: an experiment's result may depend on any of it.
_SOURCES = ("core/**/*.py", "scheduler/**/*.py", "strategies/**/*.py", "planning/*.py",
            "emulation/*.py", "emulation/*.toml")
_LAB = ("commands/bench.py", "traced.py", "two_drafts.py")


@dataclass(frozen=True, slots=True)
class Job:
    """An experiment to run; timed: note the scheduler's own processor time too."""

    experiment: Experiment
    timed: bool = False

    def key(self) -> str:
        """Tells jobs of any version apart."""
        text = f"{version()} {self.timed} {self.experiment!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@lru_cache(maxsize=1)
def version() -> str:
    """A hash of everything that a result depends on."""
    digest = hashlib.sha256()
    root, lab = Path(pipeinfer.__file__).parent, Path(pipeinfer_lab.__file__).parent
    for path in [*sorted(p for pattern in _SOURCES for p in root.glob(pattern)), EXTRA,
                 *(lab / name for name in _LAB)]:
        digest.update(str(path.relative_to(root) if root in path.parents else path.name).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=1)
def profiles() -> Profiles:
    """The package's profiles and those of the experiments."""
    return load_profiles(EXTRA)


def compute(job: Job) -> dict[str, Any]:
    """Run a job; {"error": why} when the model does not fit the machines."""
    try:
        if not job.timed:
            return bench.measure(profiles(), job.experiment)
        with _timed_scheduler() as spent:
            start = time.process_time()
            record = bench.measure(profiles(), job.experiment)
            return record | {"processor_seconds": time.process_time() - start, **spent}
    except PlanError as error:
        return {"error": str(error)}


@contextmanager
def _timed_scheduler() -> Iterator[dict[str, float]]:
    spent = {"scheduler_seconds": 0.0, "events": 0}

    class Timed(Scheduler):
        def handle(self, event):
            start = time.perf_counter()
            try:
                return super().handle(event)
            finally:
                spent["scheduler_seconds"] += time.perf_counter() - start
                spent["events"] += 1

    virtual.Scheduler = Timed
    try:
        yield spent
    finally:
        virtual.Scheduler = Scheduler


class Store:
    """The results file; one process at a time may add to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.notices = path, []
        self._found: dict[str, dict[str, Any]] = {}
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(f"{path} is in use by another run: wait for it, or give --out "
                             "another folder") from None
        self._read()

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole, _, rest = data.rpartition(b"\n")
        if rest:
            self.notices.append(f"{self.path.name}: the last line was half written and is dropped "
                                f"({len(rest)} bytes); that experiment runs again")
            os.truncate(self.path, len(whole) + 1 if whole else 0)
        others = 0
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                if entry["version"] == version():
                    self._found[entry["key"]] = entry["result"]
                else:
                    others += 1
            except (ValueError, KeyError, TypeError):
                self.notices.append(f"{self.path.name}: line {number} is no result and is ignored")
        if others:
            self.notices.append(f"{self.path.name}: {others} results of other versions of the "
                                "sources are not used")

    def __contains__(self, job: Job) -> bool:
        return job.key() in self._found

    def __len__(self) -> int:
        return len(self._found)

    def add(self, job: Job, result: dict[str, Any]) -> None:
        """Keep a result; it is on disk when this returns."""
        entry = {"key": job.key(), "version": version(), "experiment": repr(job.experiment),
                 "timed": job.timed, "result": result}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._found[entry["key"]] = result

    def get(self, experiment: Experiment, *, timed: bool = False) -> dict[str, Any]:
        """What an experiment showed. Raises KeyError."""
        return self._found[Job(experiment, timed).key()]

    def fileno(self) -> int:
        """The file's descriptor, which holds the lock."""
        return self._file.fileno()

    def close(self) -> None:
        """Let others use the file."""
        self._file.close()


def fill(store: Store, jobs: Iterable[Job], workers: int, *, show: bool = True) -> float:
    """Compute what is missing, saving each as it comes; returns the seconds taken.

    workers: processes of low priority; 0: here. Raises what a job raised.
    """
    wanted = list(dict.fromkeys(jobs))
    missing = [job for job in wanted if job not in store]
    progress = _Progress(len(wanted), len(wanted) - len(missing), show=show)
    if workers == 0:
        for job in missing:
            store.add(job, compute(job))
            progress.step()
    elif missing:
        _in_pool(store, missing, workers, progress)
    return progress.end()


def _in_pool(store: Store, missing: Sequence[Job], workers: int, progress: _Progress) -> None:
    queue = iter(missing)
    running: dict[Future[dict[str, Any]], Job] = {}
    with ProcessPoolExecutor(workers, initializer=_settle, initargs=(store.fileno(),)) as pool:
        try:
            while True:
                while len(running) < 2 * workers and (job := next(queue, None)) is not None:
                    running[pool.submit(compute, job)] = job
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    store.add(running.pop(future), future.result())
                    progress.step()
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _settle(lock: int) -> None:
    """A worker: of low priority, without the parent's lock, and gone when the parent is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    with contextlib.suppress(OSError):
        os.close(lock)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)


class _Progress:
    """Count, time taken and time to come, on one line of a terminal or now and then elsewhere."""

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        self._total, self._done, self._first, self._show = total, done, done, show
        self._start = self._last = time.monotonic()
        if show:
            print(f"{total} experiments, {done} of them already in the file", file=sys.stderr)

    def step(self) -> None:
        self._done += 1
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if not self._show or now - self._last < (0.2 if terminal else 15):
            return
        self._last = now
        spent = now - self._start
        left = spent / (self._done - self._first) * (self._total - self._done)
        line = (f"{self._done} of {self._total} experiments, {_clock(spent)} gone, about "
                f"{_clock(left)} to go")
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n",
              file=sys.stderr, flush=True)

    def end(self) -> float:
        spent = time.monotonic() - self._start
        if self._show:
            start = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(f"{start}{self._done - self._first} experiments in {_clock(spent)}",
                  file=sys.stderr)
        return spent


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def traced(experiment: Experiment) -> tuple[virtual.Result, Traced]:
    """A run with its spans, which are too long to keep."""
    built = scenarios.build(profiles(), experiment)
    return simulate(built.scenario, scenarios.controller_of(built, experiment))
