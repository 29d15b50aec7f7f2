"""Measures how many rows a backend may decode together with the bits of single rows, and how many
threads it should decode single rows with.

Matrix kernels differ by the number of rows, and a logit that moves by a rounding error can flip a
near-tie. The pipeline uses the smallest R of its stages, so that its tokens do not depend on which
rows were decoded together. R is measured, not assumed: it depends on processor, file and threads.

The place of a cell in memory matters, too: see `backends.llamacpp.cells`.

Threads: memory often cannot feed all cores, and on small models threads wait for one another longer
than they compute. Then fewer threads are as fast, and other programs on one of the cores do no
harm. While other programs use the cores, measuring goes on for up to a second, because two threads
that share a core look slower than one; only what was measured on quiet cores is stored.

What loads at the same time in one process is measured one at a time: a draft and a stage on the
same cores would slow each other down, and the results are used for the whole job, those of widths
also for later jobs. The kernel's statistics show whether other processes used the cores meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.backends.base import Backend
from pipeinfer.core.types import ALL_SEQS, CURVE_ROWS, END, FloatArray, Rows, make_rows
from pipeinfer.models.shard_cache import cache_directory, recall, remember, turn

_ENOUGH = 1.03  #: times the best time: up to this a number of threads counts as equally fast
_HOPELESS = 1.3  #: times the best time beyond which fewer threads are not tried
_ROUNDS = 2  #: further measurements of each number of threads
_SETTLING = 1.0  #: seconds after which no further round of them begins
_WINDOW = 0.02  #: least seconds of a measurement: several time slices of the kernel's scheduler
_MANY = 24  #: decodes that suffice in less time
_LONG = 1.0  #: seconds after which a single decode suffices


class ThreadedBackend(Backend, Protocol):
    """A backend that can change the number of threads it decodes single rows with."""

    def use_threads(self, count: int) -> None: ...


def settle_threads(backend: ThreadedBackend, most: int, identity: Sequence[object],
                   progress: Callable[[], object] = lambda: None) -> int:
    """Set and return the number of threads for decodes of single rows.

    It is the fewest of `most`, `most` / 2, ... 1 threads that are about as fast as any other of
    these numbers.

    backend: to measure; its cache must be empty, and is empty afterwards
    most: largest number of threads
    identity: what the number depends on besides `most` and the processor, such as the layers
    progress: called now and then
    """
    path = _note_of("threads", host.processor_name(), most, identity)
    known = 1 if most == 1 else recall(path)
    if isinstance(known, int) and 1 <= known <= most:
        backend.use_threads(known)
        return known
    count, times = most, {most: _seconds(backend, most)}
    while count > 1 and times[count] < _HOPELESS * min(times.values()):
        progress()
        count //= 2
        times[count] = _seconds(backend, count)
    rounds, quiet, end = 0, False, time.perf_counter() + _SETTLING
    # the best time counts; a round of a slow model may take longer than all the time that there is
    while len(times) > 1 and (rounds < _ROUNDS or not quiet) and time.perf_counter() < end:
        progress()
        waited = watch()
        times = {count: min(before, _seconds(backend, count)) for count, before in times.items()}
        quiet |= waited() < DISTURBED
        rounds += 1
    chosen = min(count for count, seconds in times.items()
                 if seconds <= _ENOUGH * min(times.values()))
    if quiet:
        remember(path, chosen)
    backend.use_threads(chosen)
    return chosen


def _note_of(kind: str, *what: object) -> Path:
    """The file of a measurement's result, by what it depends on."""
    digest = hashlib.blake2b(json.dumps(what, default=str).encode(), digest_size=12)
    return cache_directory() / f"{kind}-{digest.hexdigest()}"


def _seconds(backend: ThreadedBackend, count: int) -> float:
    """The median time of a decode of one row with `count` threads, in seconds."""
    backend.use_threads(count)
    info = backend.info
    hidden = None if info.first else np.ones((1, info.n_embd), np.float32)
    row = make_rows([(1, 0, (0,), True)])
    times: list[float] = []
    for trial in range(1000):
        start = time.perf_counter()
        backend.decode(row, hidden)
        backend.seq_rm(ALL_SEQS, 0, END)
        if trial:  # the first pages in the weights, or wakes threads
            times.append(time.perf_counter() - start)
        if len(times) == _MANY or sum(times) >= (_WINDOW if len(times) >= 3 else _LONG):
            break
    return statistics.median(times)


DISTURBED = 0.1  #: seconds of waiting for a core, per second, that spoil a measurement
_PATIENCE = 10.0  #: seconds after which two measurements at once are better than waiting
_turn = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Exclude other measurements of this process; after _PATIENCE seconds, proceed anyway."""
    mine = _turn.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if mine:
            _turn.release()


def waited() -> float:
    """Return the seconds for which threads of this process were ready to run and had no core, so
    far.

    The number of preemptions would not distinguish a competing process from one that polls for
    messages now and then. 0 where the system does not report the times.
    """
    found = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # threads end meanwhile
            found += int(path.read_text(encoding="ascii").split()[1])
    return found / 1e9


def watch() -> Callable[[], float]:
    """Start a measurement of waiting times.

    Returns a function that returns the time that threads have waited for cores since then, in
    seconds per second.
    """
    before, began = waited(), time.perf_counter()
    return lambda: (waited() - before) / max(time.perf_counter() - began, 1e-9)


Indices = npt.NDArray[np.signedinteger]

_EACH = 17  #: width up to which every width is tried
_CONTEXT = 40  #: tokens before the rows that are compared
#: further contexts that the width must hold in: quantised activations hide a rounding error of a
#: kernel more often than not, so rows of one context can agree where others do not
FURTHER = (0, 7, 23, 40, 11)
#: cells and rows of a batch beyond which the result is the same: search and curve need fewer
MOST_CELLS, MOST_ROWS = 1024, 64
FAR = 560  #: a context beyond the 512 cells from which some kernels split a row over threads
_PROBE = 5  #: version of the search; raise it when it finds more
_CONTEXT_ID, _CHILD, _OTHER = range(3)  #: sequence ids of the search
#: options on which neither bits nor times of a decode depend
_NO_BITS = ("rows", "layer_callbacks", "lend", "use_mlock")


Progress = Callable[[int, int], None]


class Widths(Struct, frozen=True):
    """The measured width R, and the times of runs of CURVE_ROWS rows relative to one row.

    padded: rows to which a device's short decodes are filled up; 0: they are not
    padding_cost: the time of so many rows relative to one
    """

    exact: int
    curve: tuple[float, ...]
    padded: int = 0
    padding_cost: float = 1.0

    @property
    def row_cost(self) -> float:
        """The time of a second, third, fourth row relative to the first, on average.

        Near 0 where memory bounds a decode (GPUs), near 1 or above where arithmetic does.
        """
        return max(0.0, (self.curve[CURVE_ROWS.index(4)] - 1.0) / 3)


class Excerpt(Protocol):
    """A part of a loaded file that is measured in place of all of it."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the kinds of its layers; equal ones have equal results."""

    def width(self, limit: int, progress: Progress | None) -> int:
        """Return R of the whole file; arguments as for `exact_width`."""

    def curve(self, progress: Progress | None) -> tuple[float, ...]:
        """Return `curve_of` the file's layers."""


def known_widths(
    backend: Backend, identity: Sequence[object], limit: int = 16,
    progress: Progress | None = None, known_curve: Sequence[float] | None = None,
    excerpt: Excerpt | None = None,
) -> Widths:
    """Return `exact_width` and the curve of a backend, stored in the shard cache after the first
    time.

    A process that finds another one measuring the same waits for its result.

    backend: to measure; its cache must be empty
    identity: what the result depends on besides the backend's own sizes and options (library,
        threads, processor; without an excerpt the model). Caches of 1,024 and more cells share a
        result, and so do batches of 64 and more rows
    limit: largest width to try
    progress: called with (widths tried, limit)
    known_curve: used instead of measuring the curve
    excerpt: is measured in place of the backend
    """
    info = backend.info
    limit = min(limit, int(getattr(backend, "exact_limit", limit)))
    options = getattr(backend, "options", None)
    kind = [info.layers] if excerpt is None else sorted(excerpt.names)
    path = _note_of("widths", _PROBE, kind, identity, min(info.n_ctx, MOST_CELLS),
                    min(info.n_batch, MOST_ROWS), {} if options is None else {
                        name: value for name, value in structs.asdict(options).items()
                        if name not in _NO_BITS})
    with turn(path, lambda: progress and progress(0, limit)):
        known = _note_from(recall(path))
        tried, exact, curve = known or (0, 0, ())
        if exact == tried < limit:  # more rows may be exact, too
            exact, tried = (exact_width(backend, limit, progress=progress) if excerpt is None
                            else excerpt.width(limit, progress)), limit
        if not (curve or known_curve):
            curve = curve_of(backend, progress=progress) if excerpt is None \
                else excerpt.curve(progress)
        if (tried, exact, curve) != known:
            remember(path, [tried, exact, *curve])
    return Widths(min(exact, limit), tuple(known_curve or curve))


def _note_from(note: object) -> tuple[int, int, tuple[float, ...]] | None:
    """The limit of a stored search, its result, and the curve, empty if none was measured; None if
    `note` is nothing of the kind."""
    if not isinstance(note, list) or len(note) not in (2, 2 + len(CURVE_ROWS)):
        return None
    tried, width, *curve = note
    if not isinstance(tried, int) or not isinstance(width, int) or not 1 <= width <= tried <= 4096:
        return None
    if not all(isinstance(time, int | float) and 0 < time < 1e6 for time in curve):
        return None
    return tried, width, tuple(map(float, curve))


def curve_of(backend: Backend, rounds: int = 5, progress: Progress | None = None,
             widths: Sequence[int] = CURVE_ROWS) -> tuple[float, ...]:
    """Return the times of decodes of CURVE_ROWS rows, or of other `widths`, relative to one row.

    The shortest time of `rounds` counts, since other programs only lengthen it.

    Four rows may take less than three: some kernels process rows in fours, and the rest one by one.
    For widths that the backend cannot decode, every row counts like the first. The cache must be
    empty, and is empty afterwards.
    """
    info = backend.info
    rng = np.random.default_rng(0)  # different rows: those of a mixture draw different experts
    hidden = None if info.first else rng.standard_normal(
        (max(widths), info.n_embd), np.float32)
    tokens = rng.integers(0, info.n_vocab, max(widths)).tolist()

    def seconds(width: int) -> float:
        rows = make_rows([(tokens[i], i, (0,), True) for i in range(width)])
        times = []
        for _ in range(rounds):
            if progress is not None:
                progress(0, 1)
            start = time.perf_counter()
            backend.decode(rows, None if hidden is None else hidden[:width])
            times.append(time.perf_counter() - start)
            backend.seq_rm(ALL_SEQS, 0, END)
        return min(times)

    one = max(seconds(1), 1e-9)
    most = min(info.n_batch, info.n_ctx)
    return tuple(round(max(1.0, seconds(width) / one), 3) if width <= most else float(width)
                 for width in widths)


def exact_width(
    backend: Backend, limit: int = 16, seed: int = 0, progress: Progress | None = None,
    contexts: Sequence[int] = FURTHER,
) -> int:
    """Return the largest R <= limit at which decodes of 2, 3, ... R rows are bit-equal to single
    rows.

    backend: to measure; its cache must be empty, and is empty afterwards. With one sequence id
        the result is 1, with two no branches are tried
    limit: largest width to try
    seed: of the random rows
    contexts: numbers of tokens before the rows of further tries
    progress: called with (widths tried, limit) before every decode

    After a random context, `limit` random rows are decoded one by one, then as chains of 2, 3, ...
    rows up to the first width that differs; each time in a copy of the context, since a state
    cannot be taken back. (A wider chain may agree again, but runs have any width up
    to R, so none beyond the first difference counts.) This R is also tried as two branches in two
    sequence ids, and, with some smaller widths, over other random rows after other contexts; it is
    lowered until all agree. A shard that is not the first gets random activations instead of
    tokens. A backend may state a bound that a short context cannot show, as an attribute
    `exact_limit`. Costs about 2 limit² rows.
    """
    info = backend.info
    limit = min(limit, info.n_batch, int(getattr(backend, "exact_limit", limit)))
    limit = min(limit, (info.n_ctx - 1) // 3)
    if limit < 2 or info.n_seq_max <= _CHILD:
        return 1
    room = info.n_ctx - 2 * limit
    try:
        width = _Probe(backend, np.random.default_rng(seed), min(_CONTEXT, room), limit, progress
                       ).run(limit)
    finally:
        backend.seq_rm(ALL_SEQS, 0, END)
    few = contexts if width <= _EACH else contexts[:2]  # wide tries take long
    return still_exact(backend, width, few, seed=seed + 1, progress=progress)


def still_exact(
    backend: Backend, width: int, contexts: Sequence[int], seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Return the largest R <= `width` at which other random rows after each of these contexts are
    bit-equal to single rows.

    Tries `width` and some smaller widths. Arguments as for `exact_width`.
    """
    rng = np.random.default_rng(seed)
    room = backend.info.n_ctx - 2 * width
    for context in contexts:
        if width == 1:
            break
        try:
            width = _Probe(backend, rng, min(context, room), width, progress).holds(width)
        finally:
            backend.seq_rm(ALL_SEQS, 0, END)
    return width


def _widths_up_to(limit: int) -> Iterator[int]:
    """Widths that are tried: all up to `_EACH`, then every eighth, for kernels change by eights."""
    yield from range(2, min(limit, _EACH) + 1)
    yield from range(_EACH + 8, limit, 8)
    if limit > _EACH:
        yield limit


class _Probe:
    """The rows of one search: a context, and two continuations of it."""

    def __init__(
        self, backend: Backend, rng: np.random.Generator, context: int, limit: int,
        progress: Progress | None,
    ) -> None:
        self.backend, self.context, self.progress = backend, context, progress
        self.tried, self.limit = 1, limit
        n, info = context + 2 * limit, backend.info
        self.tokens = rng.integers(0, info.n_vocab, n).astype(np.int32)
        self.hidden: FloatArray | None = None
        if not info.first:
            # Channels of a trained model's residual stream differ in scale by orders.
            scale = np.exp(rng.standard_normal(info.n_embd))
            self.hidden = (rng.standard_normal((n, info.n_embd)) * scale).astype(np.float32)

    def holds(self, width: int) -> int:
        """The largest R <= `width` at which rows agree here, tried with `width` and some smaller
        ones.
        """
        self._begin()
        first = np.arange(self.context, self.context + width)
        singles = self._singles(first)
        for smaller in sorted({2, 3, 4, width // 2, width - 1, width}):
            if 1 < smaller <= width and not self._same_chain(first[:smaller], singles):
                return smaller - 1
        return width

    def _begin(self) -> None:
        context, chunk = self.context, self.backend.info.n_batch
        for start in range(0, context, chunk):
            stop = min(start + chunk, context)
            rows = np.arange(start, stop)
            self._decode(rows, rows, [(_CONTEXT_ID,)] * (stop - start), results=False)

    def run(self, limit: int) -> int:
        """The search over one context that `exact_width` describes."""
        self._begin()
        context = self.context
        first = np.arange(context, context + limit)
        second = first + limit
        singles = self._singles(first)
        width = 1
        for wider in _widths_up_to(limit):
            if not self._same_chain(first[:wider], singles):
                break
            self.tried = width = wider
        if width == 1 or self.backend.info.n_seq_max <= _OTHER:
            return width
        others = self._singles(second)
        while width > 1 and not self._same_branches(first, second, width, singles, others):
            width -= 1
        return width

    def _singles(self, source: Indices) -> FloatArray:
        """Results of `source` decoded one by one after the context."""
        with self._copies(_CHILD):
            return np.concatenate([
                self._decode(source[i : i + 1], np.array([self.context + i]), [(_CHILD,)])
                for i in range(len(source))])

    def _same_chain(self, source: Indices, singles: FloatArray) -> bool:
        positions = self.context + np.arange(len(source))
        with self._copies(_CHILD):
            result = self._decode(source, positions, [(_CHILD,)] * len(source))
        return result.tobytes() == singles[: len(source)].tobytes()

    def _same_branches(
        self,
        first: Indices,
        second: Indices,
        width: int,
        singles: FloatArray,
        others: FloatArray,
    ) -> bool:
        right = width // 2
        # llama.cpp cuts a decode where ids with a state have different numbers of rows
        left = width - right if self.backend.capabilities.takes_back else right
        with self._copies(_CHILD, _OTHER):
            result = self._decode(
                np.concatenate([first[:left], second[:right]]),
                self.context + np.concatenate([np.arange(left), np.arange(right)]),
                [(_CHILD,)] * left + [(_OTHER,)] * right,
            )
        return (
            result[:left].tobytes() == singles[:left].tobytes()
            and result[left:].tobytes() == others[:right].tobytes()
        )

    @contextmanager
    def _copies(self, *seq_ids: int) -> Iterator[None]:
        """Let these ids have copies of the context, and be empty afterwards."""
        if self.context:
            for seq_id in seq_ids:
                self.backend.seq_cp(_CONTEXT_ID, seq_id, 0, self.context)
        yield
        for seq_id in seq_ids:
            self.backend.seq_rm(seq_id, 0, END)

    def _decode(
        self, source: Indices, positions: Indices, seq_ids: Sequence[tuple[int, ...]], *,
        results: bool = True,
    ) -> FloatArray:
        if self.progress is not None:
            self.progress(self.tried, self.limit)
        rows = Rows(
            self.tokens[source],
            positions.astype(np.int32),
            tuple(seq_ids),
            np.full(len(source), results, np.bool_),
        )
        hidden = None if self.hidden is None else self.hidden[source]
        result = self.backend.decode(rows, hidden)
        assert result is not None  # None results from a stop only, and there is no `should_stop`
        return result.copy()  # the next decode may overwrite the backend's array
