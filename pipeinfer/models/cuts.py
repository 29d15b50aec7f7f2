"""Metadata for ranges of layers, by architecture, with which llama.cpp computes as in the whole
model.

llama.cpp numbers layers from 0 and derives some things from a layer's number, or from the number of
layers. Where metadata can state the same explicitly, it is written: patterns of sliding windows and
of rotations become one value per layer, leading dense layers are counted from the stage's first,
and a factor on embeddings is removed from all stages but the first. Models for which no metadata
can do this are refused (`Cut.refuses`).

Uses metadata; writes no file and does not plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pipeinfer.errors import PlanError, UnsupportedArchitecture
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.architectures.declaration import by_layer, number, values_of
from pipeinfer.models.gguf import STRING, ModelFile
from pipeinfer.models.gguf_parts import entry
from pipeinfer.models.layers import LayerKind, layer_kinds, scales_embeddings, windows_of

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
    if cut.near_first or cut.period < 0:
        kinds = windows_of(model, cut.period)[start:stop]
        # so no part of a stage that a rank loads later, in addition to its own, has one kind only
        if kinds[0] is (cut.period < 0) or (cut.far and len(set(kinds)) < 2):
            first, other = ("without", "with") if cut.period < 0 else ("with", "without")
            raise PlanError(
                f"{model.path.name}: layers {start} to {stop - 1} of a {model.architecture} cannot "
                f"be a stage: llama.cpp needs one {first} a window first"
                f"{f', and one {other}' if cut.far else ''}; give other counts to --layers, or "
                "none")
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


def barred(model: ModelFile) -> tuple[frozenset[tuple[int, int]], str]:
    """Return the ranges of layers that cannot be a stage, and the reason for the first of them."""
    found: dict[tuple[int, int], str] = {}
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
    if number(model, keys.DEEPSTACK):  # rows of a stage would have to be as wide as those of images
        own[keys.DEEPSTACK] = 0
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
