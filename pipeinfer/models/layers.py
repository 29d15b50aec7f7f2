"""What a model's layers keep of a text, the bytes of that, factor and pooling of its rows, and the
metadata with which llama.cpp computes a range of layers as in the whole model.

llama.cpp numbers layers from 0 and derives some things from a layer's number, or from the number of
layers. Where metadata can state the same explicitly, it is written: patterns of sliding windows and
of rotations become one value per layer, leading dense layers are counted from the stage's first,
and a factor on embeddings is removed from all stages but the first. Models for which no metadata
can do this are refused (`Cut.refuses`).

All follows from the architecture's declaration and the file's metadata. Reads headers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from pipeinfer.core.types import Pooling
from pipeinfer.errors import ModelError, PlanError, UnsupportedArchitecture
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.architectures.declaration import by_layer, number, values_of
from pipeinfer.models.gguf import STRING, ModelFile, per_layer
from pipeinfer.models.gguf_parts import entry
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
    return bool(own and own.copied_whole) or _has_states(model)


def _has_states(model: ModelFile | ModelDir) -> bool:
    if not isinstance(model, ModelFile):
        return False
    arch = model.architecture
    return bool(declared(arch).cell_bytes) or any(
        key.startswith((f"{arch}.ssm.", f"{arch}.wkv.", f"{arch}.shortconv.", f"{arch}.kda."))
        for key in model.meta_keys())


def has_two_rotations(model: ModelFile | ModelDir) -> bool:
    """Return whether a model has rotation factors for short texts and others for long ones."""
    return isinstance(model, ModelFile) and any(
        name.endswith("rope_factors_long.weight") for name in model.tensors)


def original_context(model: ModelFile) -> int:
    """Return the positions of a text from which on it is long for a model's rotation."""
    return number(model, keys.ORIGINAL_CONTEXT) or number(model, "context_length")


def has_ranges(model: ModelFile | ModelDir) -> bool:
    """Return whether a part of a sequence has cells of its own: all but pure states have, and
    models whose sequences llama.cpp copies as a whole alone."""
    if not isinstance(model, ModelFile) or declared(model.architecture).copied_whole:
        return False
    return any(one is not LayerKind.STATE for one in layer_kinds(model))


def layer_kinds(model: ModelFile) -> list[LayerKind]:
    """Return what each layer keeps of the text."""
    n, arch = model.n_layers, model.architecture
    own = declared(arch)
    if not _has_states(model):
        return [LayerKind.CACHE] * n
    if own.state_and_cache or own.cell_bytes:
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
    heads, kv = per_layer(model, "attention.head_count", 1), kv_heads(model)
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
        if not kv[i]:
            continue
        size, width = model.n_embd // heads[i], 0
        for kind in ("key",) if has_latent_cache(model) else ("key", "value"):
            wide = model.arch_get(f"attention.{kind}_length_swa") if near[i] else None
            width += int(wide or model.arch_get(f"attention.{kind}_length", size) or size)
        found[i] += n_cells * kv[i] * width * item_bytes
    return found


def kv_heads(model: Any) -> list[int]:
    """Return the KV heads of each layer; 0 for one that stores no keys and values of its own."""
    heads, given = per_layer(model, keys.HEADS, 1), per_layer(model, keys.KV_HEADS, 0)
    last = model.n_layers - number(model, keys.SHARED)
    return [(given[i] or heads[i]) * (
        layer_keeps in (LayerKind.CACHE, LayerKind.BOTH) and i < last)
        for i, layer_keeps in enumerate(layer_kinds(model))]


def has_latent_cache(model: Any) -> bool:
    """Return whether all heads read one compressed cache, in which values are part of the keys."""
    return model.arch_get("attention.key_length_mla") is not None


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


#: that are not cut by layers, or are written as a whole
_OTHER_ARRAYS = ("rope.dimension_sections", keys.PATTERN, keys.RECURRENT)


def step_of(model: ModelFile) -> int:
    """Return the number of layers at whose multiples stages of the model begin."""
    step = declared(model.architecture).cut.step
    return 1 if step == 1 else math.lcm(step, max(1, number(model, keys.MOE_STEP)))


def check_range(model: ModelFile, start: int, stop: int) -> None:
    """Raise PlanError or UnsupportedArchitecture if layers `[start, stop)` cannot be a stage."""
    step = step_of(model)
    if start % step:
        raise PlanError(
            f"{model.path.name}: a stage cannot begin at layer {start}: every {step}th layer of a "
            f"{model.architecture} is of another kind, so stages begin at multiples of {step}; "
            "give such counts to --layers, or none")
    cut = declared(model.architecture).cut
    reader = next((i for i, kind in enumerate(layer_kinds(model))
                   if i >= start and kind is not LayerKind.STATE), start)
    if cut.begins and by_layer(model, cut.begins) and not values_of(model, cut.begins)[reader]:
        raise PlanError(
            f"{model.path.name}: a stage cannot begin at layer {start}, which reads the positions "
            "that a layer before it has chosen; give other counts to --layers, or none")
    if cut.window_first or cut.period < 0:
        kinds = windows_of(model, cut.period)[start:stop]
        # so no part of a stage that a rank loads later, in addition to its own, has one kind only
        if kinds[0] is (cut.period < 0) or (cut.both_kinds and len(set(kinds)) < 2):
            first, other = ("without", "with") if cut.period < 0 else ("with", "without")
            raise PlanError(
                f"{model.path.name}: layers {start} to {stop - 1} of a {model.architecture} cannot "
                f"be a stage: llama.cpp needs one {first} a window first"
                f"{f', and one {other}' if cut.both_kinds else ''}; give other counts to "
                "--layers, or none")
    key, value = cut.ends
    ends = values_of(model, key) if key else []
    if ends and (value not in ends[start:stop] or (start and ends[start - 1] != value)):
        raise PlanError(
            f"{model.path.name}: layers {start} to {stop - 1} of a {model.architecture} cannot be "
            f"a stage: each needs a layer with {key} {value}, and begins behind one; give other "
            "counts to --layers, or none")
    if 0 < start < number(model, keys.HASH):
        raise PlanError(
            f"{model.path.name}: a stage cannot begin at layer {start}, because the first "
            f"{number(model, keys.HASH)} read tokens; give other counts to --layers, or none")
    shared, least = number(model, keys.SHARED), model.n_layers - number(model, keys.SHARED) - 2
    if shared and start > least:
        raise PlanError(
            f"{model.path.name}: a stage cannot begin at layer {start}, because the last {shared} "
            f"layers read the caches of layers {least} and {least + 1}; give other counts to "
            "--layers, or none")
    _check_kinds(model, start, stop)
    if cut.mistaken(model, stop - start):
        raise UnsupportedArchitecture(
            f"{model.path.name}: a stage of {stop - start} layers of a {model.architecture} would "
            "be taken for a model of another kind; give other counts to --layers")


def _check_kinds(model: ModelFile, start: int, stop: int) -> None:
    """Raise PlanError where a stage would have layers with a state only, or with attention only,
    though the model has both: llama.cpp would end the process.

    Stages begin behind a layer with attention, so that whatever lies between two beginnings has
    both: a rank may load a part of a stage in addition to its own layers.
    """
    kinds = layer_kinds(model)
    if len(set(kinds) - {LayerKind.NOTHING}) == 1:
        return
    begins = [i for i in range(1, len(kinds)) if kinds[i - 1] is LayerKind.CACHE
              and len(set(kinds[i:]) - {LayerKind.NOTHING}) == 2]
    if (start and start not in begins) or len(set(kinds[start:stop]) - {LayerKind.NOTHING}) < 2:
        raise PlanError(
            f"{model.path.name}: layers {start} to {stop - 1} of a {model.architecture} cannot be "
            "a stage: each needs layers with a state and with attention, so stages begin at layers "
            f"0, {', '.join(map(str, begins))}; give such counts to --layers, or none")


def barred(model: ModelFile, *, pictures: bool = False
           ) -> tuple[frozenset[tuple[int, int]], str]:
    """Return the ranges of layers that cannot be a stage, and the reason for the first of them.

    pictures: whether the first stage reads their rows
    """
    deep = number(model, keys.DEEPSTACK) if pictures else 0
    found = {(0, stop): f"{model.path.name}: the first stage needs more than the {deep} layers "
             "that add parts of pictures; give other counts to --layers, or --mmproj none"
             for stop in range(1, deep + 1)}
    if isinstance(model, ModelFile) and declared(model.architecture).splits:
        for start, stop in itertools.combinations(range(model.n_layers + 1), 2):
            if (start, stop) == (0, model.n_layers):
                continue
            try:
                check_range(model, start, stop)
            except (PlanError, UnsupportedArchitecture) as error:
                found[start, stop] = str(error)
    return frozenset(found), next(iter(found.values()), "")


def smallest_stage(model: ModelFile, last: int) -> tuple[int, int]:
    """Return the fewest layers that can be a stage and end with layer `last`.

    Where no such stage ends there, it contains that layer. Used to measure a model by a part of it.
    """
    n, (bars, _) = model.n_layers, barred(model)
    for stop in range(last + 1, n + 1):
        for start in range(last, -1, -1):
            if (start, stop) not in bars:
                return start, stop
    return 0, n


def entries(model: ModelFile, start: int, stop: int, *, takes_tokens: bool | None = None,
            given: Mapping[str, Sequence[int]] | None = None) -> dict[str, bytes]:
    """Return the metadata in which a shard's header differs from the model's.

    start, stop: the layers `[start, stop)` of the shard
    takes_tokens: whether the shard looks tokens up itself; None: if it has the first layer
    given: values of all layers in place of the model's, by key
    Returns entries by key; an empty entry removes the key. The number of layers is among them.
    Where no layer has a sliding window although llama.cpp requires one, or there are too few layers
    for it, one more layer is announced as one for multi-token prediction, which needs no weights
    and no cache.
    """
    prefix, cut = model.architecture + ".", declared(model.architecture).cut
    own: dict[str, int | float | Sequence[float] | None] = {}  # None: removed
    windows = None
    if cut.period and (number(model, keys.WINDOW) or not cut.plain):
        windows = windows_of(model, cut.period)[start:stop]
    ghost = (windows is not None and not any(windows)) or stop - start < cut.least
    own["block_count"] = stop - start + ghost
    own[keys.NEXTN] = 1 if ghost else None
    if windows is not None:
        own[keys.PATTERN] = [*windows, True] if ghost else windows
    for key in arrays_of(model):
        values = [*((given or {}).get(key) or values_of(model, key))][start:stop]
        own[key] = [*values, values[-1]] if ghost else values
    if dense := number(model, keys.DENSE):
        own[keys.DENSE] = max(0, dense - start)
    if number(model, keys.SHARED) and stop < model.n_layers:
        own[keys.SHARED] = 0
    if model.arch_get(keys.HASH):
        own[keys.HASH] = max(0, number(model, keys.HASH) - start)
    looks_up = start == 0 if takes_tokens is None else takes_tokens
    if scales_embeddings(model) and not looks_up:
        own[keys.EMBEDDING_SCALE] = 0.0
    if deep := number(model, keys.DEEPSTACK):  # layers that add parts of a picture's rows
        own[keys.DEEPSTACK] = deep if start == 0 and stop > deep else 0
    own.update(cut.writes(model))
    if declared(model.architecture).interval:
        own[keys.RECURRENT] = [kind is LayerKind.STATE for kind in layer_kinds(model)[start:stop]]
        own[keys.INTERVAL] = None
    names = {key: key if model.is_array(key) else prefix + key for key in own}
    return {names[key]: b"" if value is None else entry(names[key], value)
            for key, value in own.items()}


def arrays_of(model: ModelFile) -> list[str]:
    """Return the keys of metadata with a number for each layer, without the architecture's name."""
    prefix = model.architecture + "."
    return [short for key in model.meta_keys()
            if model.array_type(key) not in (None, STRING) and not key.startswith("tokenizer.")
            and (short := key.removeprefix(prefix)) not in _OTHER_ARRAYS
            and model.array_length(key) >= model.n_layers]


def kind_of_place(model: ModelFile, layer: int) -> list[int]:
    """Return what a layer computes because of its place in the model: equal lists, equal ways."""
    cut = declared(model.architecture).cut
    found = [layer % step_of(model)]
    if cut.period and (number(model, keys.WINDOW) or not cut.plain):
        found.append(windows_of(model, cut.period)[layer])
    values = [values_of(model, key)[layer] for key in arrays_of(model)]
    return found + [value for value in values if not isinstance(value, float)]


def unused(model: ModelFile, start: int, stop: int) -> tuple[str, ...]:
    """Return tensors outside layers that these layers do not read; llama.cpp refuses such."""
    found = declared(model.architecture).cut.far_only
    return found if found and all(windows_of(model, 0)[start:stop]) else ()
