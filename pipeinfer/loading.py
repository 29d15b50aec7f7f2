"""Loading models into this process: parts of the target, or the draft.

Knows backends and options, no transport, no requests and no policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeinfer import host
from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact import Widths
from pipeinfer.backends.torch_options import require_torch, torch_options
from pipeinfer.config import Config
from pipeinfer.errors import UsageError
from pipeinfer.grammar import Vocabulary
from pipeinfer.host import Place
from pipeinfer.models.bita import BitaAdapter, load_bita
from pipeinfer.nodes import NodeSettings
from pipeinfer.planner import open_model
from pipeinfer.strategies.base import Proposer
from pipeinfer.strategies.worker import DraftWorker

EXACT_LIMIT = 16  #: widest decode that is tried for exactness
DRAFT_PATHS = 8  #: paths that a draft keeps in its cache


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
