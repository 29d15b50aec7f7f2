"""The parts of a stage: shards that a rank loads and measures, by a loader for each backend, and
the team with which a member of a wide stage adds sums.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.backends import exact_width
from pipeinfer.backends.base import Backend
from pipeinfer.backends.composed import ChainBackend, Embedding
from pipeinfer.backends.exact_width import Widths, known_widths, settle_threads
from pipeinfer.backends.factory import EXACT_LIMIT, llama_options, load_torch, torch_embedding
from pipeinfer.backends.pytorch.options import torch_version
from pipeinfer.backends.team import PeerSilent, Region, SharedTeam, Team, TeamShape, available
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.cluster.shard_transfer import stage_shard
from pipeinfer.cluster.sizing import exact_rows
from pipeinfer.cluster.stored_prompts import no_disk
from pipeinfer.config import ClusterConfig, JobConfig, ModelConfig
from pipeinfer.core.control import Setup, SumRegion
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Part, Tag
from pipeinfer.errors import ProtocolError, TransportTimeout, UsageError
from pipeinfer.llama.library import gpus, has_gpu, llama_identity
from pipeinfer.models.embedding import PIECE as EMBEDDING
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.locate import open_model, same_model
from pipeinfer.models.shard import ShardSource, shard_name
from pipeinfer.models.shard_cache import cache_directory, turn
from pipeinfer.models.slice_parts import Slice
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.transport.base import Port

_TRIES = 24  #: sums that are timed at the start
_LOOKS = 8  #: times within a run that the leader checks whether to stop
PATIENCE = 0.5  #: of --timeout, for a part: waits for the stage or its run last longer


def shape_of(setup: Setup, n_embd: int, sum_type: str) -> TeamShape:
    """Return what the members of a stage have to know of each other. n_embd: elements of a row."""
    slices = [Slice.parse(name) for name in setup.cut]
    last = setup.stop == setup.n_layers
    vocabulary = tuple(one.vocab for one in slices) if last else ()
    capacity = max([setup.n_batch * n_embd, *(stop - start for start, stop in vocabulary)])
    return TeamShape(setup.holders, setup.port.member, sum_type, capacity, vocabulary,
                     max(1, (setup.stop - setup.start) // _LOOKS))


def team_of(config: ClusterConfig, setup: Setup, n_embd: int, port: Port, pulse: Pulse) -> Team:
    """Return this member's side of the stage's sums.

    All members call it together: the leader sends the others the path of the sums. Raises
    TransportTimeout, BackendError, UsageError.
    """
    shape = shape_of(setup, n_embd, config.sum_type)
    grid = Grid(setup.widths)
    nodes = grid.members(setup.port.stage)
    watch = SumWatch(port, nodes, shape, pulse, config.timeout)
    if config.sum_path == "memory" and not (setup.near and available()):
        raise UsageError("--set sum_path=memory needs all members of a stage on one host, and the "
                         "C part of pipeinfer (see pipeinfer doctor)")
    wanted = setup.near and config.sum_path != "messages" and available()
    region: Region | None = None
    early: list[Part] = []
    if len(nodes) == 1:
        region = Region.private(shape) if wanted else None
    elif shape.leads:
        region = Region.create(shape) if wanted else None
        for node in nodes[1:]:
            port.send(node, Tag.SUM, SumRegion(region.name if region else ""))
    else:
        name = _hear_region(port, config.timeout, nodes[0], early)
        region = Region.open(name, shape) if name else None
    team: Team = PortTeam(shape, port, nodes, watch, early) if region is None else \
        SharedTeam(shape, region, watch)
    watch.team = team
    return team


def _hear_region(port: Port, timeout: float, leader: int, early: list[Part]) -> str:
    """Wait for the leader's message on shared memory; return the region's name, "" for none.

    early: receives the parts of members that got this message before.

    The message is not a transaction, because the head sends those as well, and the order of
    messages from two senders is undefined. Raises TransportTimeout.
    """
    deadline = time.monotonic() + timeout
    # parts of faster members may come before the leader's message, and are kept
    while True:
        envelope = port.take(Tag.SUM)
        match envelope.message if envelope else None:
            case SumRegion(name):
                return name
            case Part() as part:
                early.append(part)
            case None:
                if time.monotonic() > deadline:
                    raise TransportTimeout(
                        rank=port.rank_of(port.node), peer=port.rank_of(leader), tag="SumRegion",
                        run_id=None, seconds=timeout)
                port.wait(0.2, tag=Tag.SUM)
            case other:
                raise ProtocolError(f"a member of a stage was sent {type(other).__name__} as a "
                                    "part of a sum")


def sum_seconds(team: Team, n_embd: int) -> float:
    """Return the median time of one sum for a single row, in seconds.

    All members call it together. Raises what waiting for others raises.
    """
    zeros = [np.zeros(n_embd, np.float32) for _ in team.shape.own]
    times = []

    def add(turn: int) -> bool:
        return team.part(team.shape.own[turn]).add(zeros[turn], 0)

    team.begin(-1, cancelled=False)
    team.arm(None)
    with ThreadPoolExecutor(len(zeros)) as pool:
        for _ in range(_TRIES):
            start = time.perf_counter()
            further = [pool.submit(add, turn) for turn in range(1, len(zeros))]
            if not add(0) or not all(one.result() for one in further):
                team.check()
            times.append(time.perf_counter() - start)
    if isinstance(team, SharedTeam):  # not only with the first run: members may die before it
        team.forget_name()
    return statistics.median(times[_TRIES // 4:])


class SumWatch:
    """Called repeatedly while a member waits for a part; limits that wait.

    timeout: --timeout in seconds, half of which is the limit. A call raises PeerSilent after it,
        and Regrouped or Dismissed if the job has gone on without this sum.
    """

    def __init__(self, port: Port, nodes: Sequence[int], shape: TeamShape, pulse: Pulse,
                 timeout: float) -> None:
        self.team: Team | None = None
        self._port, self._nodes, self._shape = port, tuple(nodes), shape
        self._pulse, self._timeout = pulse, PATIENCE * timeout
        self._sum, self._since, self._called = -1, 0.0, 0.0

    def __call__(self, index: int) -> None:
        member = self._shape.holder_of(index)
        count, now = (self.team.count if self.team else 0), time.monotonic()
        if count != self._sum or now - self._called > 1.0:  # the next wait has begun
            self._sum, self._since = count, now
        self._called = now
        self._pulse.beat(f"waits for slice {index} of its stage")
        self._port.take(Tag.ERROR)  # never sent to stages; raises if an epoch has begun meanwhile
        if now - self._since > self._timeout:
            run = None if self.team is None else self.team.run_id
            raise PeerSilent(rank=self._port.node, peer=self._nodes[member], tag=Tag.SUM.name,
                             run_id=run, seconds=self._timeout)


Report = Callable[[str, int, int], None]


class LoadedPart(Struct, frozen=True):
    """A loaded shard.

    piece: name of the slice that it holds of its layers, "" for all of them.
    threads: CPU threads that decode a single row.
    received: bytes of it that came from rank 0.
    """

    layers: tuple[int, int]
    piece: str
    backend: Backend
    widths: Widths
    threads: int
    received: int


@dataclass(frozen=True, slots=True)
class PartLoader(ABC):
    """Loads parts of one stage.

    threads: CPU threads of each part. report: called with phase, done and total
    """

    config: JobConfig
    setup: Setup
    port: Port
    hooks: Hooks
    threads: int
    report: Report

    @abstractmethod
    def load(self, piece: str, layers: tuple[int, int]) -> LoadedPart:
        """Load layers `[start, stop)`, or the slice of them named `piece`, and measure them.

        Raises ModelError, MismatchError, BackendError and ProtocolError.
        """

    @abstractmethod
    def embedding(self) -> Embedding:
        """Return the embedding table, which is stored apart from the stage's slices."""

    def _measured(self, backend: Backend, shard: Path | ShardSource | None, version: str,
                  kind: str, piece: str) -> tuple[Widths, int]:
        model = self.config.model
        try:
            return _measured(
                backend, shard, self.setup, (version, *host.cpu_features(), gpu_of(model, kind)),
                piece, self.threads, None if model.threads else self.threads, self.report,
                model.pad)
        except BaseException:
            backend.close()
            raise


class TorchLoader(PartLoader):
    """Loads from the model's folder or file, which is on this host."""

    def load(self, piece: str, layers: tuple[int, int]) -> LoadedPart:
        """Load and measure a part with torch; nothing is received."""
        setup = self.setup
        path = same_model(setup.model, setup.fingerprint)
        self.report("loading", 0, 1)
        backend = load_torch(self.config.model, path, layers, {
            "n_ctx": setup.n_ctx, "n_seq_max": setup.n_seq_max, "n_batch": setup.n_batch},
            self.threads, piece, exact_rows(self.config))
        widths, used = self._measured(backend, None, torch_version(), "torch", piece)
        return LoadedPart(layers, piece, backend, widths, used, 0)

    def embedding(self) -> Embedding:
        """Return the table of the model's own files."""
        return torch_embedding(self.config.model, same_model(
            self.setup.model, self.setup.fingerprint))


class LlamaLoader(PartLoader):
    """Loads a shard from the model's file, from the shard cache, or as rank 0 sends it."""

    def load(self, piece: str, layers: tuple[int, int]) -> LoadedPart:
        """Load and measure a part with llama.cpp, padded where it is on a GPU."""
        from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
        from pipeinfer.backends.llamacpp.padded import PaddedBackend

        config, setup, (start, stop) = self.config, self.setup, layers
        self.hooks.cached(lambda: cache_directory() / shard_name(
            setup.fingerprint, start, stop, piece))
        shard, received = stage_shard(config.cluster, self.port, structs.replace(
            setup, start=start, stop=stop, piece=piece), self.report)
        size = shard.total if isinstance(shard, ShardSource) else shard.stat().st_size
        self.report("loading", 0, size)
        whole = start == 0 and stop == setup.n_layers
        streams = setup.stream if config.model.gpu_layers and has_gpu() else 0
        backend = (PaddedBackend if streams else LlamaCppBackend).load(
            shard,
            layers=layers,
            n_layers_total=setup.n_layers,
            first=start == 0 and not piece,  # slices are given rows
            last=stop == setup.n_layers,
            n_ctx=streams * setup.n_seq_max or setup.n_ctx,
            n_seq_max=setup.n_seq_max,
            n_batch=setup.n_batch,
            n_threads=self.threads,
            options=llama_options(
                config.model,
                callbacks=not whole or config.speculation.policy != "iterative",
                gaps=setup.gaps, streams=streams > 0,
                text=setup.text, saves=not piece and not no_disk(config, gaps=setup.gaps),
            ),
            progress=lambda phase, share: self.report(phase, round(share * size), size),
        )
        widths, used = self._measured(backend, shard, llama_identity(), "llamacpp", piece)
        return LoadedPart(layers, piece, backend, widths, used, received)

    def embedding(self) -> Embedding:
        """Return the table, read from the model's file or received like a shard."""
        path, _ = stage_shard(self.config.cluster, self.port, structs.replace(
            self.setup, piece=EMBEDDING), self.report)
        assert isinstance(path, Path)
        return EmbeddingTable.open(open_model(path))


LOADERS: Mapping[str, type[PartLoader]] = {"torch": TorchLoader, "llamacpp": LlamaLoader}


def _measured(backend: Backend, shard: Path | ShardSource | None, setup: Setup,
              identity: tuple[object, ...], piece: str, threads: int, most: int | None,
              report: Report, pad: int = 0) -> tuple[Widths, int]:
    """Return the widths of a loaded shard and the threads that it uses for single rows.

    shard: its file, where llama.cpp loaded it. most: threads among which to choose; None: `threads`
    are fixed. pad: rows to which short decodes are padded on a device; 0: measured.
    """
    used, excerpt = threads, None
    with exact_width.alone(), contextlib.ExitStack() as stack:
        if setup.cores:  # all ranks of this host use the same ones
            stack.enter_context(turn(cache_directory() / "measuring", lambda: report(
                "waiting for other ranks' measurements", 0, 1)))
        if shard is not None:
            from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
            from pipeinfer.backends.llamacpp.excerpt import LoadedExcerpt
            from pipeinfer.backends.llamacpp.padded import PaddedBackend, known_padding

            assert isinstance(backend, LlamaCppBackend)
            if isinstance(backend, PaddedBackend) and backend.options.streams:
                return known_padding(
                    backend, (setup.fingerprint, piece, *identity), pad, EXACT_LIMIT,
                    lambda done, total: report("measuring", done, total)), threads
            excerpt = stack.enter_context(LoadedExcerpt.opened(shard, backend))
            # an exact limit of 1 may come from sums that are split by threads
            if most is not None and backend.any_threads:
                used = settle_threads(
                    backend if excerpt is None else excerpt.timed, most,
                    (setup.fingerprint, piece, backend.info.layers, *identity),
                    lambda: report("measuring", 0, 1))
                backend.use_threads(used)
        own = () if excerpt is not None else (setup.fingerprint, piece)
        widths = known_widths(
            backend, (*own, threads, *identity), limit=setup.exact or (
                EXACT_LIMIT if shard is not None else getattr(backend, "exact_limit", EXACT_LIMIT)),
            known_curve=setup.curve, excerpt=excerpt,
            progress=lambda done, total: report("measuring", done, total))
    return widths, used


def gpu_of(config: ModelConfig, kind: str) -> str:
    """Return llama.cpp's names of the devices that hold a stage's layers; "" if the CPU or torch
    computes. kind: of backend."""
    if kind != "llamacpp" or not config.gpu_layers:
        return ""
    return ", ".join(one.description for one in gpus())


def pieces_of(setup: Setup) -> tuple[str, ...]:
    """Return the names of the slices that a rank holds; "" alone for whole layers."""
    if not setup.cut:
        return ("",)
    return tuple(setup.cut[index] for index in setup.holders[setup.port.member])


def gaps_of(layers: tuple[int, int], held: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of `layers` that are not covered by `held` (ranges inside, disjoint)."""
    found, at = [], layers[0]
    for start, stop in sorted(held):
        if at < start:
            found.append((at, start))
        at = stop
    if at < layers[1]:
        found.append((at, layers[1]))
    return found


def joined(parts: list[LoadedPart]) -> tuple[Backend, Widths]:
    """Return all parts as one backend, with the worst of their widths."""
    if len(parts) == 1:
        return parts[0].backend, parts[0].widths
    return ChainBackend([part.backend for part in parts]), worst(parts)


def worst(parts: list[LoadedPart]) -> Widths:
    """Return the widths that hold for all parts: the smallest R and the highest costs."""
    curves = zip(*(part.widths.curve for part in parts), strict=True)
    return structs.replace(parts[0].widths, exact=min(p.widths.exact for p in parts),
                               curve=tuple(map(max, curves)),
                               padded=min(p.widths.padded for p in parts),
                               padding_cost=max(p.widths.padding_cost for p in parts))
