"""The life of a rank that holds a stage, or stands by: set-up, loading, serving, the next epoch.

    place    the head assigns nodes to ranks (an order of the transport)
    Setup    ... and layers to this node; loaded shards that still fit stay loaded
    Ready    then runs are served until a Shutdown, a failure, or another epoch

A rank without a node keeps the shards of all stages in its page cache and waits. One that has no
model file is given a node while it receives them (`_rehearse`). This module uses backends and the
shard cache; it has no requests and no policies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.backends import measuring
from pipeinfer.backends.base import Backend, tap
from pipeinfer.backends.chain import ChainBackend
from pipeinfer.backends.exact_width import Widths, known_widths
from pipeinfer.backends.factory import (
    EXACT_LIMIT,
    backend_for,
    learn,
    llama_options,
    load_torch,
    torch_embedding,
)
from pipeinfer.backends.pytorch.options import torch_version
from pipeinfer.backends.team import PeerFailed, PeerSilent, Team
from pipeinfer.backends.thread_count import settle_threads
from pipeinfer.backends.wide import Embedding, SliceBackend, WideBackend
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.cluster.proposers import DraftLoader
from pipeinfer.cluster.shard_transfer import stage_shard
from pipeinfer.cluster.shutdown import end_job
from pipeinfer.cluster.sizing import cancel_path, exact_rows
from pipeinfer.cluster.wide_stage import sum_seconds, team_of
from pipeinfer.config import JobConfig, ModelConfig
from pipeinfer.core.control import (
    PortName,
    Progress,
    Ready,
    Receive,
    Received,
    Rehearse,
    Setup,
)
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Tag, WorkerFailed
from pipeinfer.core.types import ALL_SEQS, END
from pipeinfer.errors import ClusterError, PipeinferError, TransportTimeout
from pipeinfer.host import Place, threads_of
from pipeinfer.llama.library import gpus, has_gpu, llama_identity
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.models.embedding import PIECE as EMBEDDING
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.locate import open_model, same_model
from pipeinfer.models.shard import ShardSource, shard_name
from pipeinfer.models.shard_cache import cache_directory, turn
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import NodeSettings, settle
from pipeinfer.runtime.draft_rank import DraftRank
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.runtime.stage import Stage
from pipeinfer.strategies import registry
from pipeinfer.transport.base import Dismissed, Port, Regrouped
from pipeinfer.transport.lent import LentLoop, Stuck

Report = Callable[[str, int, int], None]
_OFTEN = 0.2  #: seconds between two reports of one phase to the head


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


class StageProcess:
    """Serves epoch after epoch on one port; see the module docstring.

    pulse: what the watchdog reads. lent: lets the head's thread run short turns of the stage.
    """

    def __init__(self, config: JobConfig, place: Place, port: Port, pulse: Pulse | None = None,
                 lent: LentLoop | None = None) -> None:
        self._config, self._place = config, place
        self._hooks = Hooks.of(config.cluster, place.rank)
        self._port = self._hooks.port(port)
        self._pulse = pulse or Pulse()
        self._lent = lent if self._port is port else None  # a paced port delays its messages
        self._parts: list[LoadedPart] = []
        self._team: Team | None = None
        self._sum_seconds = 0.0
        self._whole: WideBackend | None = None  #: all slices held here, while there is a team
        self._options: object = None  #: what else the parts depend on
        self._stage: Stage | None = None
        self._name = PortName(0)
        self._drafting: DraftRank | None = None
        self._reported = "", 0.0  #: the phase that the head was sent last, and when
        self._borrows = False  #: whether it runs on cores of idle ranks, too
        self._own_cores: frozenset[int] = frozenset()

    def run(self) -> bool:
        """Serve until a Shutdown (True), or a failure that was reported to the head (False).

        Raises Dismissed when the job continues, or ends, without this rank.
        """
        while True:
            try:
                self._epoch()
                self._part_team()
                self._close(self._parts)
                return True
            except Regrouped:
                self._hooks.recovering()
                self._port.adopt()
            except (PeerFailed, PeerSilent) as error:  # the head decides which rank is lost
                if isinstance(error, PeerSilent):
                    self._tell(error)
                if not self._regrouped():
                    self._tell(error)
                    return False
            except Dismissed:
                if self._drafting is not None:
                    self._drafting.close()
                raise
            except Stuck as error:  # it blocks the head's thread, so the head cannot handle it
                sys.stderr.write(f"pipeinfer: error: {error}\n")
                end_job(ClusterError.exit_code)
            except Exception as error:  # everything is reported, nothing may vanish in a thread
                self._tell(error)
                return False

    def _epoch(self) -> None:
        self._stage = None
        if self._port.node < 0:
            self._wait()
        setup = self._await_setup()
        self._name = setup.port
        if isinstance(setup, Receive):
            self._rehearse([msgspec.structs.replace(one, port=setup.port) for one in setup.setups])
            self._port.send(0, Tag.RESULT, Received(self._name, self._place.rank))
            self._wait()
        stage = self._prepare(setup)
        self._stage = stage
        self._pulse.settle()
        stage.serve(self._lent)

    def _regrouped(self) -> bool:
        """After the failure of another member: wait for the next epoch; False if none comes in
        time.

        Raises Dismissed.
        """
        deadline = time.monotonic() + self._config.cluster.timeout
        while time.monotonic() < deadline:
            try:
                self._port.take(Tag.TRANSACTION)
                self._pulse.beat("waits since another member of its stage has failed")
                self._port.wait(0.2, live=False)
            except Regrouped:
                self._hooks.recovering()
                self._port.adopt()
                return True
        return False

    def _wait(self) -> NoReturn:
        """Wait without layers of the target; the rank may hold the draft. Ends only by an
        exception."""
        drafting = self._drafting = self._drafting or DraftRank(
            self._port, self._place.rank, DraftLoader(self._config, self._place, self._hooks),
            self._config.cluster.timeout, self._pulse)
        while True:
            self._port.take(Tag.TRANSACTION)
            self._pulse.beat("waits")
            if isinstance(order := self._port.take_order(), Rehearse):
                self._rehearse(order.setups)
            if not drafting.turn():
                self._port.wait(1.0, live=drafting.live)

    def _rehearse(self, setups: Sequence[Setup]) -> None:
        """Load the stages' shards once, so that they are in the page cache and measured."""
        report = functools.partial(self._report, ", ahead of time")
        for setup in setups:
            config = settle(self._config, self._place, NodeSettings(**setup.settings))
            threads = threads_of(config.model.threads, self._place)
            kind = backend_for(config.model.backend, Path(setup.model))
            try:
                for piece in pieces_of(setup):
                    self._load(config, setup, piece, (setup.start, setup.stop), kind, threads,
                               report).backend.close()
            except PipeinferError as error:  # raised again if this rank ever gets the stage
                if 0 in self._port.gone:
                    raise
                sys.stderr.write(f"pipeinfer: note: spare rank {self._place.rank} cannot prepare: "
                                 f"{error}\n")
                return
        self._pulse.settle()

    def _report(self, when: str, phase: str, done: int, total: int) -> None:
        """Report the loading to the watchdog and, if this rank has a node, to the head."""
        self._pulse.beat(f"is {phase}{when}")
        self._port.take(Tag.ERROR)  # never sent to stages; raises if an epoch has begun meanwhile
        now = time.monotonic()
        if self._port.node > 0 and (phase != self._reported[0] or now - self._reported[1] > _OFTEN):
            self._reported = phase, now
            self._port.send(0, Tag.RESULT, Progress(self._name, phase, done, total))

    def _tell(self, error: Exception) -> None:
        code = error.exit_code if isinstance(error, PipeinferError) else ClusterError.exit_code
        summary, trace = " ".join(str(error).split()) or type(error).__name__, ""
        if not isinstance(error, PipeinferError):
            summary, trace = f"{type(error).__name__}: {summary}", traceback.format_exc()
        with contextlib.suppress(Exception):
            self._port.send(0, Tag.ERROR, WorkerFailed(
                self._port.node, socket.gethostname(),
                -1 if self._stage is None else self._stage.current_run, summary, trace, code))

    def _await_setup(self) -> Setup | Receive:
        seconds = self._config.cluster.start_timeout
        deadline = time.monotonic() + seconds
        while True:
            envelope = self._port.take(Tag.TRANSACTION)
            if envelope is not None and isinstance(envelope.message, Setup | Receive):
                return envelope.message
            if time.monotonic() > deadline:
                raise TransportTimeout(rank=self._port.rank_of(self._port.node), peer=0,
                                       tag="Setup", run_id=None, seconds=seconds)
            self._pulse.beat("waits for its setup")
            self._port.wait(0.5)

    # --- loading ------------------------------------------------------------------------------

    def _prepare(self, setup: Setup) -> Stage:
        """Load what is missing, send Ready, and return the stage."""
        config = settle(self._config, self._place, NodeSettings(**setup.settings))
        report = self._hooks.progress(functools.partial(self._report, ""))
        kind = backend_for(config.model.backend, Path(setup.model))
        layers, pieces = (setup.start, setup.stop), pieces_of(setup)
        threads = max(1, self._threads(config, setup) // len(pieces))
        self._make_room(layers, pieces, (setup, config, threads, kind))
        for piece in pieces:
            held = [part.layers for part in self._parts if part.piece == piece]
            for gap in gaps_of(layers, held):
                self._parts.append(self._load(config, setup, piece, gap, kind, threads, report))
        self._parts.sort(key=lambda part: (pieces.index(part.piece), part.layers))
        team = self._join_team(config, setup)
        backend, widths = joined(self._parts) if team is None else self._wide(
            config, setup, team, kind, report)
        backend.seq_rm(ALL_SEQS, 0, END)
        learned = 0
        if path := registry.adapter(config.speculation):
            adapter = load_bita(path)
            learned = adapter.n_masks
            backend = learn(backend, adapter, setup.prompt_id,
                            functools.partial(self._embedding, config, setup, kind, report))
        widths = self._hooks.widths(widths)
        backend = self._hooks.backend(backend, in_team=team is not None)
        report("starting", 1, 1)
        self._port.send(0, Tag.RESULT, self._ready(setup, backend, widths, team, kind, config))
        begun = 0 if team is None else team.count
        return Stage(
            self._port,
            Grid(setup.widths),
            backend,
            team=team,
            cancel_path=cancel_path(config),
            trace=bool(config.cluster.trace),
            timeout=config.cluster.timeout,
            pulse=self._pulse,
            vocabulary=Vocabulary.from_json(setup.vocabulary) if setup.vocabulary else None,
            learned=learned,
            tapped=_tapped(backend, setup),
            extra_report=lambda: {
                "host": socket.gethostname(),
                "rank": self._place.rank,
                "exact_width": widths.exact,
                **({} if team is None else {"n_sums": team.count - begun}),
                **host.memory_parts(),
            },
        )

    def _ready(self, setup: Setup, backend: Backend, widths: Widths, team: Team | None, kind: str,
               config: JobConfig) -> Ready:
        info, parts = backend.info, self._parts
        return Ready(
            self._name, self._place.rank, socket.gethostname(), (setup.start, setup.stop), kind,
            widths.exact, widths.row_cost, tuple(widths.curve), info.weight_bytes,
            info.cache_bytes, max(part.threads for part in parts),
            sum(part.received for part in parts), tuple(part.layers for part in parts),
            setup.cut and pieces_of(setup),
            "" if team is None else "memory" if team.shares_memory else "messages",
            self._sum_seconds, gpu_of(config.model, kind), widths.padded, widths.padding_cost)

    def _join_team(self, config: JobConfig, setup: Setup) -> Team | None:
        """Meet the other members of this stage; None for a stage of whole layers."""
        self._part_team()
        if not setup.cut:
            return None
        n_embd = self._parts[0].backend.info.n_embd
        team = self._team = team_of(config.cluster, setup, n_embd, self._port, self._pulse)
        self._sum_seconds = sum_seconds(team, n_embd)
        self._team = self._hooks.team(team, setup.stop - setup.start, n_embd)
        return self._team

    def _part_team(self) -> None:
        if self._whole is not None:
            self._whole.close()
        if self._team is not None:
            self._team.close()
        self._whole = self._team = None
        self._sum_seconds = 0.0

    def _wide(self, config: JobConfig, setup: Setup, team: Team, kind: str, report: Report
              ) -> tuple[Backend, Widths]:
        """Return the member's slices as one backend, with the worst of their widths."""
        chains = [[cast("SliceBackend", part.backend) for part in self._parts
                   if part.piece == piece] for piece in pieces_of(setup)]
        embedding = self._embedding(config, setup, kind, report) if setup.start == 0 else None
        self._whole = WideBackend(chains, team, (setup.start, setup.stop), setup.n_layers,
                                  embedding)
        return self._whole, worst(self._parts)

    def _embedding(self, config: JobConfig, setup: Setup, kind: str, report: Report
                   ) -> Embedding:
        """Return the embedding table, which is stored apart from the stage's slices."""
        if kind == "torch":
            return torch_embedding(config.model, same_model(
                setup.model, setup.fingerprint))
        path, _ = stage_shard(config.cluster, self._port, msgspec.structs.replace(
            setup, piece=EMBEDDING), report)
        assert isinstance(path, Path)
        return EmbeddingTable.open(open_model(path))

    def _threads(self, config: JobConfig, setup: Setup) -> int:
        """Return the threads of the stage; bind this rank to more cores if idle ranks lend it
        theirs."""
        own = threads_of(config.model.threads, self._place)
        if setup.cores > own or self._borrows:
            if not self._borrows:
                self._own_cores = frozenset(os.sched_getaffinity(0))
            self._borrows = setup.cores > own
            host.use_cores(max(setup.cores, own), self._own_cores)
        return max(setup.cores, own)

    def _make_room(self, layers: tuple[int, int], pieces: tuple[str, ...],
                   options: tuple[Any, ...]) -> None:
        """Close the loaded parts that the new setup does not use."""
        setup, config, threads, kind = options
        same = (kind, threads, setup.model, setup.n_ctx, setup.n_seq_max, setup.n_batch, setup.gaps,
                setup.stream)
        usable = (
            same == self._options and not registry.adapter(config.speculation)
        )  # learned prompts live in the cache
        start, stop = layers
        kept = [part for part in self._parts
                if usable and start <= part.layers[0] and part.layers[1] <= stop
                and part.piece in pieces]
        self._close([part for part in self._parts if part not in kept])
        self._parts, self._options = kept, same

    @staticmethod
    def _close(parts: list[LoadedPart]) -> None:
        for part in parts:
            part.backend.close()

    def _load(self, config: JobConfig, setup: Setup, piece: str, layers: tuple[int, int],
              kind: str, threads: int, report: Report) -> LoadedPart:
        (start, stop), received = layers, 0
        shard: Path | ShardSource | None = None
        backend: Backend
        if kind == "torch":
            path = same_model(setup.model, setup.fingerprint)
            report("loading", 0, 1)
            backend = load_torch(config.model, path, layers, {
                "n_ctx": setup.n_ctx, "n_seq_max": setup.n_seq_max, "n_batch": setup.n_batch},
                threads, piece, exact_rows(config))
            version = torch_version()
        else:
            from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
            from pipeinfer.backends.llamacpp.padded import PaddedBackend

            self._hooks.cached(lambda: cache_directory() / shard_name(
                setup.fingerprint, start, stop, piece))
            shard, received = stage_shard(config.cluster, self._port, msgspec.structs.replace(
                setup, start=start, stop=stop, piece=piece), report)
            size = shard.total if isinstance(shard, ShardSource) else shard.stat().st_size
            report("loading", 0, size)
            whole, version = start == 0 and stop == setup.n_layers, llama_identity()
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
                n_threads=threads,
                options=llama_options(
                    config.model,
                    callbacks=not whole or config.speculation.policy != "iterative",
                    gaps=setup.gaps, streams=streams > 0,
                ),
                progress=lambda phase, share: report(phase, round(share * size), size),
            )
        try:
            widths, used = _measured(backend, shard, setup, (
                version, *host.cpu_features(), gpu_of(config.model, kind)), piece, threads,
                None if config.model.threads else threads, report, config.model.pad)
        except BaseException:
            backend.close()
            raise
        return LoadedPart(layers, piece, backend, widths, used, received)


def _measured(backend: Backend, shard: Path | ShardSource | None, setup: Setup,
              identity: tuple[object, ...], piece: str, threads: int, most: int | None,
              report: Report, pad: int = 0) -> tuple[Widths, int]:
    """Return the widths of a loaded shard and the threads that it uses for single rows.

    shard: its file, where llama.cpp loaded it. most: threads among which to choose; None: `threads`
    are fixed. pad: rows to which short decodes are padded on a device; 0: measured.
    """
    used, excerpt = threads, None
    with measuring.alone(), contextlib.ExitStack() as stack:
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
                used = settle_threads(backend if excerpt is None else excerpt.timed, most,
                                      lambda: report("measuring", 0, 1))
                backend.use_threads(used)
        own = () if excerpt is not None else (setup.fingerprint, piece)
        widths = known_widths(
            backend, (*own, threads, *identity), limit=setup.exact or (
                EXACT_LIMIT if shard is not None else getattr(backend, "exact_limit", EXACT_LIMIT)),
            known_curve=setup.curve, excerpt=excerpt,
            progress=lambda done, total: report("measuring", done, total))
    return widths, used


def _tapped(backend: Backend, setup: Setup) -> Callable[[], npt.NDArray[Any]] | None:
    """Return a function for the rows that a head reads of this stage; None without any."""
    last = setup.stop == setup.n_layers
    if not any(setup.start <= one < setup.stop or (last and one >= setup.stop)
               for one in setup.taps):
        return None
    rows: Callable[[], npt.NDArray[Any]] = tap(backend, setup.taps)
    most = float(np.finfo(np.float16).max)
    return (lambda: rows().clip(-most, most).astype(np.float16)) if setup.half_taps else rows


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
