"""Measures how many threads a backend should decode single rows with.

Memory often cannot feed all cores, and on small models threads wait for one another longer than
they compute. Then fewer threads are as fast, and other programs on one of the cores do no harm. The
number is measured at every load and not stored, because the measurement may have been disturbed.
While other programs use the cores, measuring goes on: two threads that share a core look slower
than one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from pipeinfer.backends import measuring
from pipeinfer.backends.base import Backend
from pipeinfer.core.types import ALL_SEQS, END, make_rows

_ENOUGH = 1.03  #: times the best time: up to this a number of threads counts as equally fast
_HOPELESS = 1.3  #: times the best time beyond which fewer threads are not tried
_ROUNDS = 2  #: further measurements of each number of threads
_MOST_ROUNDS = 12  #: of them, while other programs use the cores
_WINDOW = 0.02  #: least seconds of a measurement: several time slices of the kernel's scheduler
_MANY = 24  #: decodes that suffice in less time
_LONG = 1.0  #: seconds after which a single decode suffices


class ThreadedBackend(Backend, Protocol):
    """A backend that can change the number of threads it decodes single rows with."""

    def use_threads(self, count: int) -> None: ...


def settle_threads(backend: ThreadedBackend, most: int,
                   progress: Callable[[], object] = lambda: None) -> int:
    """Set and return the number of threads for decodes of single rows.

    It is the fewest of `most`, `most` / 2, ... 1 threads that are about as fast as any other of
    these numbers.

    backend: to measure; its cache must be empty, and is empty afterwards
    most: largest number of threads
    progress: called now and then
    """
    if most == 1:
        backend.use_threads(1)
        return 1
    candidates = [most]
    times = {most: _seconds(backend, most)}
    while candidates[-1] > 1 and times[candidates[-1]] < _HOPELESS * min(times.values()):
        progress()
        candidates.append(candidates[-1] // 2)
        times[candidates[-1]] = _seconds(backend, candidates[-1])
    quick = len(candidates) > 1 and min(times.values()) < _LONG / 4
    rounds, quiet = 0, False
    while quick and rounds < (_ROUNDS if quiet else _MOST_ROUNDS):  # the best time counts
        progress()
        waited = measuring.watch()
        times = {count: min(before, _seconds(backend, count)) for count, before in times.items()}
        quiet |= waited() < measuring.DISTURBED
        rounds += 1
    chosen = min(count for count, seconds in times.items()
                 if seconds <= _ENOUGH * min(times.values()))
    backend.use_threads(chosen)
    return chosen


def _seconds(backend: ThreadedBackend, count: int) -> float:
    """The median time of a decode of one row with `count` threads, in seconds."""
    backend.use_threads(count)
    info = backend.info
    hidden = None if info.first else np.ones((1, info.n_embd), np.float32)
    row = make_rows([(1, 0, (0,), True)])
    times: list[float] = []
    for turn in range(1000):
        start = time.perf_counter()
        backend.decode(row, hidden)
        backend.seq_rm(ALL_SEQS, 0, END)
        if turn:  # the first pages in the weights, or wakes threads
            times.append(time.perf_counter() - start)
        if len(times) == _MANY or sum(times) >= (_WINDOW if len(times) >= 3 else _LONG):
            break
    return statistics.median(times)
