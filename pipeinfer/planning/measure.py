"""Measures the speed of this rank's machine, once per host, and stores the result.

There are three figures: bytes per second of a plain copy by all the rank's threads; the time of
runs of 1, 2 and 4 rows through one layer of the target on the rank's own backend; and the time
of one row through its output matrix, which processes more bytes per second than layers do.
Windows are long enough to include a CPU quota of the control group (its period is a tenth of a
second). No figure can change a token: only the planner reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.backends import exact_width
from pipeinfer.backends.base import Backend
from pipeinfer.config import JobConfig, ModelConfig
from pipeinfer.core.control import Measured
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.errors import PipeinferError
from pipeinfer.host import host_name
from pipeinfer.models.layers import barred, smallest_stage
from pipeinfer.models.shard import ShardSource
from pipeinfer.models.shard_cache import cache_directory, recall, remember

FORMAT = 3  #: part of the file's name; raise it when the measurement changes
ROWS = (1, 2, 4)
_SPOILED = 600.0  #: seconds for which figures are used that other programs have disturbed
_WINDOW = 0.25  #: seconds; two and a half periods of a processor quota
_COPY_BYTES = 128 << 20
_COPY_SHARE = 0.02  #: of free memory, at most
_HEAD_SHARE = 0.25  #: likewise, for the output matrix
_REPEATS = 4  #: times a GPU's layers, from which a decode without the launch is found
_LEAST_LAYER = 0.25  #: of a layer's share of a decode by several: at least so much is its own
_SMALL_HEAD = 0.25  #: of a layer's bytes, below which an output matrix is not worth a measurement


class Figures(Struct, frozen=True):
    """The measured speed of a rank.

    bandwidth: bytes/s moved by a copy (read and written).
    layer_bytes: bytes of the measured layer (or a few that belong together) that a row reads.
    seconds: rows -> time of that layer.
    head: seconds of the output matrix for one row, 0 if not measured.
    overhead: seconds of a decode besides its layers, as of a GPU's launch; 0 if not measured.
    """

    bandwidth: float
    layer_bytes: int
    seconds: Mapping[int, float]
    head: float = 0.0
    overhead: float = 0.0

    @property
    def per_byte(self) -> float:
        """Seconds per byte of weights in a run of one row."""
        return self.seconds[1] / self.layer_bytes

    @property
    def row_cost(self) -> float:
        """The time of a further row relative to the first one's."""
        return max(0.0, (self.seconds[4] / self.seconds[1] - 1) / 3)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for messages and files."""
        return structs.asdict(self)


def from_json(data: Any) -> Figures:
    """Return the inverse of `to_json`. Raises ValueError for anything else."""
    try:
        seconds = {int(k): float(v) for k, v in data["seconds"].items()}
        found = Figures(float(data["bandwidth"]), int(data["layer_bytes"]), seconds,
                        float(data.get("head", 0.0)), float(data.get("overhead", 0.0)))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no figures: {error}") from error
    values = (found.bandwidth, found.layer_bytes, *seconds.values())
    good = all(math.isfinite(v) and v > 0 for v in values) and all(
        0 <= v < math.inf for v in (found.head, found.overhead))
    if set(seconds) != set(ROWS) or not good:
        raise ValueError("no usable figures: rows are missing, or values are impossible")
    return found


class Hollow(Struct, frozen=True):
    """A model without a file on this host, as far as measuring needs it.

    layers: the middle layer `[start, stop)`. reads: bytes of it that a row reads.
    header, total: of its shard. The weights are zeros: the time of a product does not depend on
        them.
    """

    fingerprint: str
    n_layers: int
    layers: tuple[int, int]
    reads: int
    header: bytes
    total: int

    @classmethod
    def of(cls, model: Any) -> Hollow:
        """Return what has to be sent about `model`, a ModelFile."""
        start, stop = smallest_stage(model, model.n_layers // 2)
        source = ShardSource(model, start, stop)
        return cls(model.fingerprint, model.n_layers, (start, stop),
                   sum(model.layer_reads[start:stop]), source.header, source.total)

    def write(self, folder: str) -> Path:
        """Write the middle layer's shard as a sparse file of zeros; return its path."""
        path = Path(folder) / "layer.gguf"
        path.write_bytes(self.header)
        os.truncate(path, self.total)
        return path


def figures_here(config: ModelConfig, model: Any, threads: int, *, again: bool = False) -> Figures:
    """Return this host's figures for a model, from the cache or measured now.

    What was measured while other programs used the cores is measured again after ten minutes: a
    machine that was busy once would else be slow, and left out, for ever.

    config: with the host's own settings. model: a ModelFile or a Hollow. threads: to compute with.
    again: measure even if there are stored figures.
    Raises ModelError or BackendError when the layer cannot be extracted or loaded.
    """
    path = cache_directory() / _name(config, model, threads)
    stored = recall(path)
    if isinstance(stored, dict) and not again and stored.get("until", math.inf) > time.time():
        with contextlib.suppress(ValueError):
            return from_json(stored)
    waited = exact_width.watch()
    found = _measure(config, model, threads)
    spoiled = {"until": time.time() + _SPOILED} if waited() > exact_width.DISTURBED else {}
    remember(path, found.to_json() | spoiled)
    return found


def _name(config: ModelConfig, model: Any, threads: int) -> str:
    """Return the file name: a digest of everything that the figures depend on."""
    from pipeinfer.backends.factory import llama_options
    from pipeinfer.backends.pytorch.options import torch_version
    from pipeinfer.llama.library import llama_identity

    own = (config.device, config.dtype, torch_version()) if _on_torch(config, model) else ()
    identity = (*own, FORMAT, host_name(), model.fingerprint, llama_identity(), threads,
                os.cpu_count(), host.quota(), host.cpu_features(), llama_options(config),
                os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    return f"speed-{digest}.json"


def _on_torch(config: ModelConfig, model: Any) -> bool:
    from pipeinfer.backends.factory import backend_for

    return not isinstance(model, Hollow) and backend_for(config.backend, model.path) == "torch"


def _measure(config: ModelConfig, model: Any, threads: int) -> Figures:
    from pipeinfer.backends.factory import load_torch
    from pipeinfer.models.shard import extract_shard

    if _on_torch(config, model):
        middle = model.n_layers // 2
        sizes = {"n_ctx": 256, "n_seq_max": 1, "n_batch": max(ROWS)}
        with contextlib.closing(load_torch(
                config, model.path, (middle, middle + 1), sizes, threads)) as alone:
            seconds = layer_seconds(alone)
        return Figures(copy_bandwidth(threads), model.layer_bytes[middle], seconds)
    hollow, n = isinstance(model, Hollow), model.n_layers
    layers = model.layers if hollow else smallest_stage(model, n // 2)
    reads = model.reads if hollow else sum(model.layer_reads[slice(*layers)])
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="layer-",
                                     ignore_cleanup_errors=True) as folder:
        shard = model.write(folder) if hollow else extract_shard(
            model, *layers, cache_dir=folder)
        seconds, overhead = _shard_seconds(config, shard, layers, n, threads, ROWS), 0.0
        if config.gpu_layers and not hollow and (times := repeats(model, layers)) > 1:
            more = layers[0], layers[0] + times * (layers[1] - layers[0])
            several = _shard_seconds(config, extract_shard(model, *more, cache_dir=folder), more,
                                     n, threads, ROWS)
            seconds, overhead = without_launch(seconds, several, times)
        head = 0.0 if hollow or layers[1] == n else _head_seconds(
            config, model, threads, seconds[1] / reads, folder)
    return Figures(copy_bandwidth(threads), reads, seconds, max(0.0, head - overhead), overhead)


def repeats(model: Any, layers: tuple[int, int]) -> int:
    """Return how many times as many layers, from the first of these on and without the last of the
    model, can be a stage; at most 4."""
    start, size = layers[0], layers[1] - layers[0]
    return next((times for times in range(_REPEATS, 1, -1) if start + times * size < model.n_layers
                 and (start, start + times * size) not in barred(model)[0]), 1)


def without_launch(one: Mapping[int, float], several: Mapping[int, float], times: int
                   ) -> tuple[dict[int, float], float]:
    """Return rows -> seconds of layers alone, and the seconds of a decode besides them.

    A GPU needs about as long to begin and to end a decode as for a layer. one, several: rows ->
    seconds of a decode by the layers, and by `times` as many.
    """
    alone = {}
    for rows in one:
        share = several[rows] / times  # with its part of the launch; times also differ by noise
        layers = (several[rows] - one[rows]) / (times - 1)
        alone[rows] = min(max(layers, _LEAST_LAYER * share), share)
    return alone, max(0.0, one[1] - alone[1])


def _head_seconds(config: ModelConfig, model: Any, threads: int, per_byte: float, folder: str
                  ) -> float:
    """Return the time of the output matrix: that of the last layer with it, minus a layer's
    time. 0 if the matrix is small compared with a layer, or large compared with the memory."""
    from pipeinfer.models.shard import extract_shard, shard_bytes

    n = model.n_layers
    layers = smallest_stage(model, n - 1)
    size, own = shard_bytes(model, *layers), sum(model.layer_bytes[slice(*layers)])
    room = _HEAD_SHARE * psutil.virtual_memory().available
    if layers[0] == 0 or not own * (1 + _SMALL_HEAD) < size < room:
        return 0.0
    shard = extract_shard(model, *layers, cache_dir=folder)
    both = _shard_seconds(config, shard, layers, n, threads, (1,))[1]
    return max(0.0, both - per_byte * float(sum(model.layer_reads[slice(*layers)])))


def _shard_seconds(config: ModelConfig, shard: Path, layers: tuple[int, int], n_layers: int,
                   threads: int, rows: Sequence[int]) -> dict[int, float]:
    """Return rows -> seconds of a decode by a shard with these layers of `n_layers`, on
    llama.cpp."""
    from pipeinfer.backends.factory import llama_options
    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend

    first, last = layers[0] == 0, layers[1] == n_layers
    with contextlib.closing(LlamaCppBackend.load(
            shard, layers=layers, n_layers_total=n_layers, first=first, last=last, n_ctx=256,
            n_seq_max=1, n_batch=max(ROWS), n_threads=threads,
            options=llama_options(config, callbacks=not last))) as backend:
        return layer_seconds(backend, rows=rows)


def layer_seconds(backend: Backend, window: float | None = None, rows: Sequence[int] = ROWS
                  ) -> dict[int, float]:
    """Return rows -> seconds of a decode.

    window: seconds of measuring. rows: the sizes of the runs. For one row it is the better of two
        windows' means.
    Rows differ, so that those of a mixture select different experts. The cache must be empty, and
    is empty afterwards.
    """
    window = _WINDOW if window is None else window
    info = backend.info
    hidden = None if info.first else np.random.default_rng(0).standard_normal(
        (max(ROWS), info.n_embd), np.float32)
    found = {}
    for count in rows:
        batch = make_rows([(1 + i, i, (0,), True) for i in range(count)])
        states = None if hidden is None else hidden[:count]

        def mean(batch: Any = batch, states: Any = states) -> float:
            start, done = time.perf_counter(), 0
            while done < 2 or time.perf_counter() - start < window:
                backend.decode(batch, states)
                backend.seq_rm(ALL_SEQS, 0, END)
                done += 1
            return (time.perf_counter() - start) / done

        backend.decode(batch, states)  # pages in the weights, builds the graph
        backend.seq_rm(ALL_SEQS, 0, END)
        found[count] = min(mean() for _ in range(2 if count == 1 else 1))
    return found


def copy_bandwidth(threads: int, rounds: int = 4) -> float:
    """Return the bytes/s read and written by `threads` concurrent copies; the best of `rounds`."""
    room = psutil.virtual_memory().available * _COPY_SHARE / 2
    count = max(1024, int(min(_COPY_BYTES, room) / 8 / threads))
    pairs = [(np.ones(count), np.empty(count)) for _ in range(threads)]
    best = 0.0
    for _ in range(rounds):
        workers = [threading.Thread(target=np.copyto, args=(target, source))
                   for source, target in pairs]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 2 * 8 * count * threads / (time.perf_counter() - start))
    return best


def try_figures(
    config: JobConfig, path: Path, fingerprint: str, threads: int,
    hollow: Mapping[str, Any] | None = None,
) -> Measured:
    """Return a rank's answer to the head: its figures, or why there are none.

    hollow: replaces a model that is to be distributed and has no file here.
    """
    from pipeinfer.models.locate import open_model

    try:
        absent = hollow and not path.exists()
        model = msgspec.convert(hollow, Hollow) if absent else open_model(path)
        if model.fingerprint != fingerprint:
            return Measured(error=f"{path} is not the same file as on rank 0")
        return Measured(figures_here(
            config.model, model, threads, again=config.cluster.remeasure).to_json())
    except (PipeinferError, OSError, ValueError) as error:
        return Measured(error=" ".join(str(error).split()))
