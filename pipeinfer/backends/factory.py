"""The factory of backends: loads parts of the target, or the draft, into this process.

Uses backends and options; independent of transports, requests and policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeinfer.backends.base import Backend
from pipeinfer.backends.composed import Embedding, LearnedRows
from pipeinfer.backends.pytorch.options import require_torch, torch_options
from pipeinfer.config import UNQUANTISED, JobConfig, ModelConfig
from pipeinfer.errors import UsageError
from pipeinfer.loading import uncollected
from pipeinfer.models.bita_adapter import BitaAdapter
from pipeinfer.models.slice_parts import Slice
from pipeinfer.nodes import RankInfo

EXACT_LIMIT = 16  #: widest decode that is tried for exactness where nothing needs a wider one


def learn(backend: Backend, adapter: BitaAdapter, prompt_id: int,
          embedding: Callable[[], Embedding]) -> Backend:
    """Add the stage's part of a BiTA adapter to a backend; return the backend to use.

    backend: of the stage
    adapter: learned masks and prompts
    prompt_id: sequence id of the learned prompts
    embedding: opens the vocabulary's embedding, where rows have to be looked up outside the backend
    Raises UsageError where the backend does not support the adapter.
    """
    adapter.check(backend.info.n_layers_total, backend.info.n_embd)
    if adapter.n_prompts:
        preload = getattr(backend, "preload", None)
        if preload is None or not backend.capabilities.separate_views:
            raise UsageError("learned prompts need the torch backend: add --backend torch, or tune "
                             "an adapter without prompts (train bita --prompting none)")
        preload(adapter.prefix(*backend.info.layers), (prompt_id,))
    if not backend.info.first:
        return backend
    if add := getattr(backend, "add_embeddings", None):
        add(adapter.masks)
        return backend
    return LearnedRows(backend, embedding(), adapter.masks)


def load_torch(
    config: ModelConfig,
    path: Path,
    layers: tuple[int, int],
    sizes: Mapping[str, Any],
    threads: int,
    piece: str = "",
    rows: int = EXACT_LIMIT,
) -> Backend:
    """Load layers `[start, stop)` of a model, or the slice of them named `piece`, with torch.

    sizes: n_ctx, n_seq_max and n_batch
    threads: that torch computes with
    rows: as in `TorchOptions`
    Raises UsageError where torch is not installed, and what `TorchBackend.load` raises.
    """
    require_torch()
    with uncollected():
        from pipeinfer.backends.pytorch.backend import TorchBackend

    return TorchBackend.load(
        path, layers=layers, n_ctx=sizes["n_ctx"], n_seq_max=sizes["n_seq_max"],
        n_batch=sizes["n_batch"], n_threads=threads,
        options=torch_options(config.device, config.dtype, exact=config.exact == "on", rows=rows),
        piece=Slice.parse(piece) if piece else None)


def torch_embedding(config: ModelConfig, path: Path) -> Embedding:
    """Open the embedding from which a first torch stage made of slices gets its rows."""
    require_torch()
    import torch

    from pipeinfer.backends.pytorch.embedding import open_embedding

    options = torch_options(config.device, config.dtype, exact=False)
    return open_embedding(path, options.resolved(torch.cuda.is_available()).dtype)


def llama_options(config: ModelConfig, *, draft: bool = False, callbacks: bool = False,
                  gaps: bool = False, streams: bool = False, saves: bool = False,
                  text: int = 0, head: Literal["", "mtp", "eagle3", "dflash"] = "") -> Any:
    """Return the options of llama.cpp for a config.

    draft: whether they are for the draft
    callbacks: whether a decode can be stopped inside
    gaps: whether positions may leave gaps
    streams: whether each sequence has a part of the cache for itself
    saves: whether cells can be saved and put back
    text: most positions of a text; 0: as many as the cache has cells
    head: kind of a head of the target, which counts as a draft; "" for other files
    """
    from pipeinfer.backends.llamacpp.context import LlamaOptions

    values: dict[str, Any] = {
        "flash_attn": config.flash_attn, "numa": "" if config.numa == "off" else config.numa,
        "type_k": config.cache_type_k, "type_v": config.cache_type_v, "repack": config.repack,
    }
    gpu_layers = config.gpu_layers_draft if draft else config.gpu_layers
    if draft:  # types that are named are the target's, as with llama.cpp
        values |= {"type_k": "auto", "type_v": "auto"}
    elif config.like_llama_cpp:
        values |= {"type_k": "f16", "type_v": "f16", "own_prompts": False}
    if draft or config.exact == "off":
        # Exact decodes are slower in long contexts, and a draft need not be exact.
        # On GPUs flash attention is the faster choice.
        fast = {"type_k": "f16", "type_v": "f16"}
        # quantised values need it
        if not gpu_layers and values["type_v"] in ("auto", *UNQUANTISED):
            fast["flash_attn"] = "off"
        values |= {name: value for name, value in fast.items() if values[name] == "auto"}
        values["keep_order"] = False
    return LlamaOptions(
        n_gpu_layers=gpu_layers,
        use_mmap=config.mmap,
        use_mlock=config.mlock, huge_pages=config.huge_pages and not head, head=head,
        layer_callbacks=callbacks, gaps=gaps, streams=streams, saves=saves, text=text,
        lend=True, **values,
    )


def backend_for(asked: str, path: Path) -> str:
    """Return the name of the backend for a model: llamacpp or torch.

    asked: one of these, or auto. Raises UsageError when that backend cannot load the model.
    """
    if not path.is_dir():
        return "llamacpp" if asked == "auto" else asked
    if asked == "llamacpp":
        raise UsageError(f"{path} is a folder, which llama.cpp cannot load: drop --backend "
                         "llamacpp, or give a GGUF file")
    return "torch"


def backends_of(config: JobConfig, model: Any, hosts: Sequence[RankInfo]
                ) -> tuple[str, ...]:
    """Return the backend of each rank that may hold a stage of `model`.

    hosts: what the ranks reported about themselves
    Raises UsageError and UnsupportedArchitecture for what would certainly fail at loading.
    """
    from pipeinfer.backends.pytorch.options import check_device, check_family, require_torch

    stages = hosts if config.cluster.head_stage or len(hosts) == 1 else hosts[1:]
    kinds = [backend_for(rank.asked_backend, model.path)
             for rank in stages]
    for rank, kind in zip(stages, kinds, strict=True):
        if kind == "torch":
            require_torch(list(rank.torch_missing), f"rank {rank.rank} on {rank.host}: ")
    if "torch" in kinds:
        if config.cluster.distribute:
            raise UsageError("--distribute works with llama.cpp only; for the torch backend copy "
                             "the model to every host, or share its directory")
        check_device(config.model.device)
        check_family(model.architecture, str(model.path), gguf=not model.path.is_dir())
    return tuple(kinds)


def check_teams(model: Any, teams: Sequence[Sequence[int]], hosts: Sequence[RankInfo],
                members: Sequence[int]) -> None:
    """Raise UsageError where ranks of one stage have different backends.

    Their residual rows would not have the same bits. teams: ranks of each stage; hosts: of all
    ranks; members: ranks that may become members. Those of a mixture must have one build of
    llama.cpp, as each selects a row's experts itself.
    """
    builds = {hosts[rank].kernels: hosts[rank] for rank in members if not hosts[rank].dead}
    if len(builds) > 1 and model.arch_get("expert_count"):
        first, second = [*builds.values()][:2]
        raise UsageError(
            f"rank {first.rank} on {first.host} runs llama.cpp with kernels for "
            f"{first.kernels or '?'}, rank {second.rank} on {second.host} for "
            f"{second.kernels or '?'}: members of a stage "
            "select experts themselves and must do so alike; use one build on every host, or a "
            "plain pipeline without --grid")
    for number, ranks in enumerate(teams, 1):
        kinds = [backend_for(hosts[rank].asked_backend, model.path) for rank in ranks]
        if len(set(kinds)) > 1:
            other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
            raise UsageError(
                f"stage {number} would have rank {ranks[0]} on {kinds[0]} and rank {ranks[other]} "
                f"on {kinds[other]}: give all ranks of a wide stage one --backend")
