"""Loading models into this process: a stage's shard, or the draft; and a stage's life around it.

Knows backends and the shard cache, no requests and no policies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeinfer import host
from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact import Widths
from pipeinfer.backends.torch_options import require_torch, torch_options, torch_version
from pipeinfer.config import Config
from pipeinfer.distribute import own_model, stage_shard
from pipeinfer.errors import ClusterError, PipeinferError, TransportTimeout, UsageError
from pipeinfer.grammar import Vocabulary
from pipeinfer.host import Place
from pipeinfer.models.bita import BitaAdapter, load_bita
from pipeinfer.nodes import NodeSettings
from pipeinfer.planner import backend_for, open_model
from pipeinfer.protocol import Notice, Tag, WorkerFailed
from pipeinfer.stage import CancelPath, Stage
from pipeinfer.strategies.base import Proposer
from pipeinfer.strategies.worker import DraftWorker
from pipeinfer.transport.base import Port

EXACT_LIMIT = 16  #: widest decode that is tried for exactness
DRAFT_PATHS = 8  #: paths that a draft keeps in its cache


def run_stage(config: Config, place: Place, port: Port, n_stages: int) -> bool:
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

    setup = _await_setup(config, port)
    config = settle(config, place, setup["settings"])

    def report(phase: str, done: int, total: int) -> None:
        port.send(0, Tag.RESULT, Notice("progress", port.node, {
            "phase": phase, "done": done, "total": total}))

    start, stop = setup["start"], setup["stop"]
    threads, received = threads_of(config.threads, place), 0
    kind = backend_for(config.backend, Path(setup["model"]))
    backend: Backend
    if kind == "torch":
        path = own_model(setup)
        report("loading", 0, 1)
        backend, version = load_torch(config, path, (start, stop), setup, threads), torch_version()
    else:
        from pipeinfer.backends.llamacpp import LlamaCppBackend

        shard, received = stage_shard(config, port, setup, report)
        report("loading", 0, 1)
        whole, version = start == 0 and stop == setup["n_layers"], llama_version()
        backend = LlamaCppBackend.load(
            shard, layers=(start, stop), n_layers_total=setup["n_layers"], first=start == 0,
            last=stop == setup["n_layers"], n_ctx=setup["n_ctx"], n_seq_max=setup["n_seq_max"],
            n_batch=setup["n_batch"], n_threads=threads,
            options=llama_options(config, callbacks=not whole or config.policy != "iterative",
                                  gaps=setup["gaps"]),
        )
    widths = known_widths(
        backend, (setup["fingerprint"], version, threads, *host.cpu_features()),
        limit=EXACT_LIMIT, progress=lambda done, total: report("measuring", done, total))
    if config.pace_ms:
        backend, widths = paced(backend, widths, config.pace_ms / 1e3, config.pace_row_ms / 1e3)
    if config.bita:
        learn(backend, load_bita(config.bita), setup["prompt_id"])
    report("loading", 1, 1)
    port.send(0, Tag.RESULT, Notice("ready", port.node, {
        "layers": [start, stop], "host": socket.gethostname(), "rank": place.rank,
        "backend": kind, "exact_width": widths.exact, "row_cost": widths.row_cost,
        "curve": widths.curve,
        "weight_bytes": backend.info.weight_bytes,
        "cache_bytes": backend.info.cache_bytes, "threads": threads, "received_bytes": received,
    }))
    last = port.node if stop == setup["n_layers"] else n_stages  # a replica is its own last stage
    stage = Stage(port, last, backend, cancel_path=CancelPath(config.cancel_path),
                  trace=bool(config.trace), timeout=config.timeout,
                  vocabulary=setup["vocabulary"] and Vocabulary.from_json(setup["vocabulary"]),
                  extra_report=lambda: {"host": socket.gethostname(), "rank": place.rank,
                                        "exact_width": widths.exact, **host.memory_parts()})
    return stage, backend


def check_bita(config: Config, model: Any, backends: Sequence[str]) -> None:
    """Whether a BiTA adapter fits. Raises UsageError and ModelError before anything loads."""
    if set(backends) != {"torch"}:
        raise UsageError("--bita needs tokens beyond the vocabulary and rows that look through "
                         "other sequences, which llama.cpp has not: add --backend torch (on every "
                         "stage)")
    load_bita(config.bita).check(model.n_layers, model.n_embd)


def learn(backend: Backend, adapter: BitaAdapter, prompt_id: int) -> None:
    """Give a stage its part of a BiTA adapter. Raises UsageError where the backend can not."""
    from pipeinfer.backends.pytorch import TorchBackend

    if not isinstance(backend, TorchBackend) or not backend.capabilities.separate_views:
        raise UsageError("--bita needs the torch backend (without validate)")
    adapter.check(backend.info.n_layers_total, backend.info.n_embd)
    if adapter.n_prompts:
        backend.preload(adapter.prefix(*backend.info.layers), (prompt_id,))
    if backend.info.first:
        backend.add_embeddings(adapter.masks)


def load_torch(
    config: Config, path: Path, layers: tuple[int, int], sizes: Mapping[str, Any], threads: int,
) -> Backend:
    """Layers of a model on the torch backend. Raises UsageError where torch is not installed."""
    require_torch()
    from pipeinfer.backends.pytorch import TorchBackend

    return TorchBackend.load(
        path, layers=layers, n_ctx=sizes["n_ctx"], n_seq_max=sizes["n_seq_max"],
        n_batch=sizes["n_batch"], n_threads=threads,
        options=torch_options(config.device, config.dtype, exact=config.exact == "on"))


def paced(backend: Backend, widths: Widths, first: float, further: float
          ) -> tuple[Backend, Widths]:
    """The backend at another machine's pace, and what rows cost there; seconds."""
    from pipeinfer.backends.exact import CURVE_ROWS
    from pipeinfer.backends.paced import PacedBackend

    def seconds(rows: int) -> float:
        return first + further * (rows - 1)

    curve = tuple(seconds(rows) / first for rows in CURVE_ROWS)
    return PacedBackend(backend, seconds), dataclasses.replace(widths, curve=curve)


def settle(config: Config, place: Place, settings: dict[str, Any]) -> Config:
    """Take what the nodes file says about this host: option values, its GPU, its NUMA node."""
    node = NodeSettings(**settings)
    host.choose_gpu(node.device)
    if not config.keep_binding:
        host.bind_numa(node.numa, place)
    return dataclasses.replace(config, **node.options(config.given))


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


def llama_version() -> str:
    """The version of llama-cpp-python, or "absent"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "absent"


def load_proposers(
    config: Config, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int,
    notify: Callable[[], None], vocabulary: Vocabulary | None = None,
) -> DraftWorker | None:
    """The thread that names guesses, by what `--proposer` says; None without work for one."""
    from pipeinfer.strategies.prompt_lookup import PromptLookup
    from pipeinfer.strategies.several import Several

    proposers: list[Proposer] = []
    for name in config.proposer or ("draft",):
        if name == "prompt-lookup":
            proposers.append(PromptLookup())
        elif name == "draft":
            proposers += [_draft(config, place, path, cells, n_vocab, vocabulary)
                          for path in drafts]
    if not proposers:
        return None
    return DraftWorker(proposers[0] if len(proposers) == 1 else Several(proposers), notify)


def _draft(config: Config, place: Place, path: Path, cells: int, n_vocab: int,
           vocabulary: Vocabulary | None) -> Proposer:
    from pipeinfer.strategies.draft_model import DraftModel

    threads = threads_of(config.threads_draft, place)
    n_layers = open_model(path).n_layers
    paths = DRAFT_PATHS + config.parallel - 1
    sizes = {"n_ctx": cells + 64 * paths, "n_seq_max": paths + config.branches, "n_batch": 256}
    backend: Backend
    if path.is_dir():
        backend = load_torch(dataclasses.replace(config, exact="off"), path, (0, n_layers), sizes,
                             threads)
    else:
        from pipeinfer.backends.llamacpp import LlamaCppBackend

        backend = LlamaCppBackend.load(
            path, layers=(0, n_layers), n_layers_total=n_layers, first=True, last=True,
            n_threads=threads, options=llama_options(config, draft=True), **sizes)
    return DraftModel(backend, n_vocab, paths=paths, vocabulary=vocabulary)


def threads_of(asked: int, place: Place) -> int:
    """Threads for a backend: what was asked for, never more than this rank's cores."""
    return min(asked or place.cores, place.cores)


def llama_options(config: Config, *, draft: bool = False, callbacks: bool = False,
                  gaps: bool = False) -> Any:
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
        use_mlock=config.mlock, layer_callbacks=callbacks, gaps=gaps, **values,
    )
