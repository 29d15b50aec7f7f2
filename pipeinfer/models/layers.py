"""What a model's layers keep of a text, the bytes of that, and factor and pooling of its rows.

All follows from the architecture's declaration and the file's metadata. Reads headers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np

from pipeinfer.core.types import Pooling
from pipeinfer.errors import ModelError
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.architectures.declaration import number, values_of
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import ModelDir

_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  #: by llama.cpp's numbers


class LayerKind(StrEnum):
    """What a layer keeps of the text."""

    STATE = "state"
    CACHE = "cache"  #: keys and values, for attention
    BOTH = "both"
    NOTHING = "nothing"


def keeps_state(model: ModelFile | ModelDir) -> bool:
    """Return whether layers have a state of the text so far, of which no part can be taken back.

    Those of recurrent models and of hybrids have.
    """
    own = isinstance(model, ModelFile) and declared(model.architecture)
    return bool(own and own.whole) or _has_states(model)


def _has_states(model: ModelFile | ModelDir) -> bool:
    if not isinstance(model, ModelFile):
        return False
    arch = model.architecture
    return bool(declared(arch).cell_bytes) or any(
        key.startswith((f"{arch}.ssm.", f"{arch}.wkv.", f"{arch}.shortconv.", f"{arch}.kda."))
        for key in model.meta_keys())


def layer_kinds(model: ModelFile) -> list[LayerKind]:
    """Return what each layer keeps of the text."""
    n, arch = model.n_layers, model.architecture
    own = declared(arch)
    if not _has_states(model):
        return [LayerKind.CACHE] * n
    if own.both or own.cell_bytes:
        return [LayerKind.BOTH] * n
    if model.is_array(f"{arch}.{keys.RECURRENT}"):
        states = [bool(value) for value in values_of(model, keys.RECURRENT)][:n]
    elif model.is_array(f"{arch}.{keys.KV_HEADS}"):
        heads, wide = values_of(model, keys.KV_HEADS), [0] * n
        if own.parted and model.is_array(f"{arch}.{keys.FF}"):
            wide = values_of(model, keys.FF)
        return [LayerKind.NOTHING if wide[i] else LayerKind.CACHE if heads[i] else LayerKind.STATE
                for i in range(n)]
    else:
        interval = number(model, keys.INTERVAL, own.interval)
        states = [not interval or (layer + 1) % interval > 0 for layer in range(n)]
    return [LayerKind.STATE if one else LayerKind.CACHE for one in states]


def has_windows(model: ModelFile) -> bool:
    """Return whether llama.cpp has a cache of its own for layers with a sliding window."""
    own = declared(model.architecture)
    given = isinstance(model, ModelFile) and bool(number(model, keys.WINDOW))
    return bool(own.cut.period) and (given or not own.cut.plain) if own.splits else given


def windows_of(model: ModelFile, period: int) -> list[bool]:
    """Return for each layer whether it has a sliding window; period: as in `Cut`."""
    if model.is_array(f"{model.architecture}.{keys.PATTERN}"):
        return [bool(value) for value in values_of(model, keys.PATTERN)][:model.n_layers]
    period = number(model, keys.PATTERN, abs(period)) * (-1 if period < 0 else 1)
    return [i % period != (0 if period < 0 else period - 1) if period else True
            for i in range(model.n_layers)]


def row_width(model: Any) -> int:
    """Return the floats that cross a cut for each token."""
    own = declared(model.architecture)
    return int(model.n_embd) * own.row_parts(model.arch_get)


# --- sizes ------------------------------------------------------------------------------------


def cache_bytes(model: Any, n_cells: int, item_bytes: int = 2, n_ids: int = 1) -> list[float]:
    """Return the bytes of each layer's KV cache; two per element on llama.cpp (quantised caches
    need less).

    Layers with a state have one for each of `n_ids` sequences in its place, or in addition; those
    that read the cache of others have none.
    """
    heads = per_layer(model, "attention.head_count", 1)
    kv_heads = per_layer(model, keys.KV_HEADS, 0)
    near, own = per_layer(model, keys.PATTERN, 0), declared(model.architecture)
    found: list[float] = []
    for i, layer_keeps in enumerate(layer_kinds(model)):
        if i >= model.n_layers - number(model, keys.SHARED):
            found.append(0.0)
            continue
        if own.cell_bytes:
            found.append(n_ids * own.cell_bytes(model, i, n_cells, item_bytes))
            continue
        state = layer_keeps in (LayerKind.STATE, LayerKind.BOTH)
        found.append(n_ids * own.state_bytes(model) if state else 0.0)
        if layer_keeps not in (LayerKind.CACHE, LayerKind.BOTH):
            continue
        size, width = model.n_embd // heads[i], 0
        for kind in ("key",) if has_latent_cache(model) else ("key", "value"):
            wide = model.arch_get(f"attention.{kind}_length_swa") if near[i] else None
            width += int(wide or model.arch_get(f"attention.{kind}_length", size) or size)
        found[i] += n_cells * (kv_heads[i] or heads[i]) * width * item_bytes
    return found


def has_latent_cache(model: Any) -> bool:
    """Return whether all heads read one compressed cache, in which values are part of the keys."""
    return model.arch_get("attention.key_length_mla") is not None


def per_layer(model: Any, key: str, default: int) -> list[int]:
    """Return a number of each layer: metadata has one for all, or a list."""
    value = model.arch_get(key)
    values = value if isinstance(value, list) else [value or default] * model.n_layers
    return [int(one) for one in values]


def positive(model: ModelFile | ModelDir, key: str, default: int | None = None) -> int:
    """Return a number that has to be at least 1. Raises ModelError."""
    value = model.arch_get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{model.path}: {model.architecture}.{key} is {str(value)[:40]!r}, not a "
                         "number of at least 1; the file is damaged, fetch it again")
    return value


# --- rows before and behind the layers --------------------------------------------------------


def embedding_factor(model: ModelFile) -> float:
    """Return the float32 by which llama.cpp multiplies a token's embedding row before the first
    layer.
    """
    own = declared(model.architecture)
    if own.scaled:
        return float(np.sqrt(np.float32(model.n_embd)))
    if scales_embeddings(model):
        value = model.arch_get(keys.EMBEDDING_SCALE, own.embedding_scale)
        return float(value) if isinstance(value, int | float) and value else 1.0
    return 1.0


def scales_embeddings(model: ModelFile) -> bool:
    """Return whether llama.cpp multiplies tokens' embedding rows by a factor of the metadata."""
    own = declared(model.architecture)
    return bool(own.embedding_scale) or model.arch_get(keys.EMBEDDING_SCALE) is not None


def no_embeddings(model: ModelFile) -> str:
    """Return why a model's prompts cannot be embedded, "" if they can."""
    kind = model.arch_get("pooling_type")
    if not isinstance(kind, int) or kind <= 0:
        return ("the file of this model names no pooling of rows, so it is made to generate text: "
                "serve an embedding model, such as Qwen3-Embedding")
    if kind not in _POOLINGS:
        return (f"the pooling of this model has the number {kind}, as of models that rank texts: "
                "the mean, the first token and the last one work here")
    if model.arch_get("attention.causal", default=True) is False:
        return "tokens of this model attend to later ones, which prompts in chunks cannot"
    return ""


def pooling_of(model: ModelFile) -> Pooling:
    """Return which rows of a prompt are its embedding, by the model's file."""
    kind = model.arch_get("pooling_type")
    return _POOLINGS.get(kind, "last") if isinstance(kind, int) else "last"
