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
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
import numpy.typing as npt

from pipeinfer import host
from pipeinfer.backends.base import Backend, tap
from pipeinfer.backends.composed import SliceBackend, WideBackend
from pipeinfer.backends.exact_width import Widths
from pipeinfer.backends.factory import (
    backend_for,
    learn,
)
from pipeinfer.backends.team import PeerFailed, PeerSilent, Team
from pipeinfer.cluster.draft_ranks import DraftLoader
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.cluster.parts import (
    LOADERS,
    PATIENCE,
    LoadedPart,
    PartLoader,
    gaps_of,
    gpu_of,
    joined,
    pieces_of,
    sum_seconds,
    team_of,
    worst,
)
from pipeinfer.cluster.shutdown import end_job
from pipeinfer.cluster.sizing import cancel_path
from pipeinfer.cluster.stored_prompts import arithmetic_of, open_store
from pipeinfer.config import JobConfig
from pipeinfer.core import control
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Tag, WorkerFailed
from pipeinfer.core.types import ALL_SEQS, END
from pipeinfer.errors import ClusterError, PipeinferError, TransportTimeout
from pipeinfer.host import Place, host_name, threads_of
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import NodeSettings, settle
from pipeinfer.runtime.draft_rank import DraftRank
from pipeinfer.runtime.kv_peers import StorePeers
from pipeinfer.runtime.kv_store import KvStore, StagePieces
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.runtime.sliced_head import HeadMember, HeadSlices
from pipeinfer.runtime.stage import Stage
from pipeinfer.strategies import registry
from pipeinfer.transport.base import Dismissed, Port, Regrouped
from pipeinfer.transport.lent import LentLoop, Stuck

_OFTEN = 0.2  #: seconds between two reports of one phase to the head


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
        self._name = control.PortName(0)
        self._drafting: DraftRank | None = None
        self._head_slices = HeadSlices(place.rank, DraftLoader(config, place, self._hooks))
        self._head: HeadMember | None = None
        self._reported = "", 0.0  #: the phase that the head was sent last, and when
        self._borrows = False  #: whether it runs on cores of idle ranks, too
        self._own_cores: frozenset[int] = frozenset()
        self._store: KvStore | None = None
        self._peers: StorePeers | None = None

    def run(self) -> bool:
        """Serve until a Shutdown (True), or a failure that was reported to the head (False).

        Raises Dismissed when the job continues, or ends, without this rank.
        """
        # an epoch ends when stages are rearranged; this rank then gets other layers, or none
        while True:
            try:
                self._epoch()
                self._part_team()
                self._close(self._parts)
                if self._store is not None:
                    self._store.close()
                if self._peers is not None:
                    self._peers.close()
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
        if isinstance(setup, control.Receive):
            self._rehearse([msgspec.structs.replace(one, port=setup.port) for one in setup.setups])
            self._port.send(0, Tag.RESULT, control.Received(self._name, self._place.rank))
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
        # the head decides who is lost; it may need its own timeout to find that out
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
            self._pulse)
        # polls both duties of an idle rank; it sleeps in `wait` until a message comes
        while True:
            self._port.take(Tag.TRANSACTION)
            self._pulse.beat("waits")
            if isinstance(order := self._port.take_order(), control.Rehearse):
                self._rehearse(order.setups)
            if not drafting.step():
                self._port.wait(1.0, live=drafting.live)

    def _rehearse(self, setups: Sequence[control.Setup]) -> None:
        """Load the stages' shards once, so that they are in the page cache and measured."""
        report = functools.partial(self._report, ", ahead of time")
        for setup in setups:
            config = settle(self._config, self._place, NodeSettings(**setup.settings))
            threads = threads_of(config.model.threads, self._place)
            kind = backend_for(config.model.backend, Path(setup.model))
            loader = LOADERS[kind](config, setup, self._port, self._hooks, threads, report)
            try:
                for piece in pieces_of(setup):
                    loader.load(piece, (setup.start, setup.stop)).backend.close()
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
            self._port.send(0, Tag.RESULT, control.Progress(self._name, phase, done, total))

    def _tell(self, error: Exception) -> None:
        code = error.exit_code if isinstance(error, PipeinferError) else ClusterError.exit_code
        summary, trace = " ".join(str(error).split()) or type(error).__name__, ""
        if not isinstance(error, PipeinferError):
            summary, trace = f"{type(error).__name__}: {summary}", traceback.format_exc()
        with contextlib.suppress(Exception):
            self._port.send(0, Tag.ERROR, WorkerFailed(
                self._port.node, host_name(),
                -1 if self._stage is None else self._stage.current_run, summary, trace, code))

    def _await_setup(self) -> control.Setup | control.Receive:
        seconds = self._config.cluster.start_timeout
        deadline = time.monotonic() + seconds
        # messages of the epoch before may still arrive; what counts is the first setup
        while True:
            envelope = self._port.take(Tag.TRANSACTION)
            if envelope is not None and isinstance(
                    envelope.message, control.Setup | control.Receive):
                return envelope.message
            if time.monotonic() > deadline:
                raise TransportTimeout(rank=self._port.rank_of(self._port.node), peer=0,
                                       tag="Setup", run_id=None, seconds=seconds)
            self._pulse.beat("waits for its setup")
            self._port.wait(0.5)

    # --- loading ------------------------------------------------------------------------------

    def _prepare(self, setup: control.Setup) -> Stage:
        """Load what is missing, send Ready, and return the stage."""
        config = settle(self._config, self._place, NodeSettings(**setup.settings))
        report = self._hooks.progress(functools.partial(self._report, ""))
        kind = backend_for(config.model.backend, Path(setup.model))
        layers, slices = (setup.start, setup.stop), pieces_of(setup)
        threads = max(1, self._threads(config, setup) // len(slices))
        self._make_room(layers, slices, (setup, config, threads, kind))
        loader = LOADERS[kind](config, setup, self._port, self._hooks, threads, report)
        self._load_missing(loader, layers, slices)
        team = self._join_team(config, setup)
        backend, widths = joined(self._parts) if team is None else self._wide(
            loader, setup, team)
        backend.seq_rm(ALL_SEQS, 0, END)
        learned = 0
        if path := registry.adapter(config.speculation):
            adapter = load_bita(path)
            learned = adapter.n_masks
            backend = learn(backend, adapter, setup.prompt_id, loader.embedding)
        widths = self._hooks.widths(widths)
        backend = self._hooks.backend(backend, in_team=team is not None)
        report("starting", 1, 1)
        pieces = self._stored_pieces(config)
        self._port.send(0, Tag.RESULT, self._ready(
            setup, backend, widths, team, kind, config, pieces))
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
            drafting=self._head,
            pieces=pieces,
            peers=self._peers,
            extra_report=lambda: {
                "host": host_name(),
                "rank": self._place.rank,
                "exact_width": widths.exact,
                **({} if team is None else {"n_sums": team.count - begun}),
                **host.memory_parts(),
            },
        )

    def _load_missing(self, loader: PartLoader, layers: tuple[int, int], slices: tuple[str, ...]
                      ) -> None:
        for piece in slices:
            held = [part.layers for part in self._parts if part.piece == piece]
            for gap in gaps_of(layers, held):
                self._parts.append(loader.load(piece, gap))
        self._parts.sort(key=lambda part: (slices.index(part.piece), part.layers))

    def _ready(self, setup: control.Setup, backend: Backend, widths: Widths, team: Team | None,
               kind: str, config: JobConfig, pieces: StagePieces | None) -> control.Ready:
        info, parts = backend.info, self._parts
        return control.Ready(
            self._name, self._place.rank, host_name(), (setup.start, setup.stop), kind,
            widths.exact, widths.row_cost, tuple(widths.curve), info.weight_bytes,
            info.cache_bytes, max(part.threads for part in parts),
            sum(part.received for part in parts), tuple(part.layers for part in parts),
            setup.cut and pieces_of(setup),
            "" if team is None else "memory" if team.shares_memory else "messages",
            self._sum_seconds, gpu_of(config.model, kind), widths.padded, widths.padding_cost,
            arithmetic_of(kind), *((None, ()) if pieces is None or self._store is None else (
                self._store.listing(), () if self._peers is None else self._peers.addresses)))

    def _stored_pieces(self, config: JobConfig) -> StagePieces | None:
        """Return this stage's prompts on the disk; None if it keeps none."""
        found = [getattr(one.backend, "saver", None) for one in self._parts]
        savers = [one for one in found if one is not None]
        if not config.cluster.kv_disk or len(savers) != len(self._parts):
            return None
        try:
            if self._store is None:
                self._store = open_store(config.cluster)
                self._peers = None if host.on_one_host() else StorePeers(self._store)
        except (PipeinferError, OSError) as error:
            sys.stderr.write(f"pipeinfer: note: rank {self._place.rank} keeps no prompts on its "
                             f"disk: {error}\n")
            return None
        return StagePieces(self._store, savers)

    def _join_team(self, config: JobConfig, setup: control.Setup) -> Team | None:
        """Meet the other members of this stage; None for a stage of whole layers."""
        self._part_team()
        if not setup.cut:
            return None
        n_embd = self._parts[0].backend.info.n_embd
        team = self._team = team_of(config.cluster, setup, n_embd, self._port, self._pulse)
        self._sum_seconds = sum_seconds(team, n_embd)
        self._head = HeadMember(
            self._port, Grid(setup.widths).members(setup.port.stage), team, self._head_slices,
            PATIENCE * config.cluster.timeout, self._pulse)
        self._team = self._hooks.team(team, setup.stop - setup.start, n_embd)
        return self._team

    def _part_team(self) -> None:
        if self._head is not None:
            self._head.close()
        if self._whole is not None:
            self._whole.close()
        if self._team is not None:
            self._team.close()
        self._whole = self._team = self._head = None
        self._sum_seconds = 0.0

    def _wide(self, loader: PartLoader, setup: control.Setup, team: Team) -> tuple[Backend, Widths]:
        """Return the member's slices as one backend, with the worst of their widths."""
        chains = [[cast("SliceBackend", part.backend) for part in self._parts
                   if part.piece == piece] for piece in pieces_of(setup)]
        embedding = loader.embedding() if setup.start == 0 else None
        self._whole = WideBackend(chains, team, (setup.start, setup.stop), setup.n_layers,
                                  embedding)
        return self._whole, worst(self._parts)

    def _threads(self, config: JobConfig, setup: control.Setup) -> int:
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
                setup.stream, setup.text)
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

def _tapped(backend: Backend, setup: control.Setup) -> Callable[[], npt.NDArray[Any]] | None:
    """Return a function for the rows that a head reads of this stage; None without any."""
    last = setup.stop == setup.n_layers
    if not any(setup.start <= one < setup.stop or (last and one >= setup.stop)
               for one in setup.taps):
        return None
    rows: Callable[[], npt.NDArray[Any]] = tap(backend, setup.taps)
    most = float(np.finfo(np.float16).max)
    return (lambda: rows().clip(-most, most).astype(np.float16)) if setup.half_taps else rows
