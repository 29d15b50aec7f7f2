"""Cuts a range of layers out of a model into a GGUF file of its own, which llama.cpp runs as is.

A shard has the model's metadata with its own `block_count`, its tensors renamed to start at
`blk.0`, and every tensor's bytes unchanged. Only the first and the last stage have the vocabulary's
matrix; no shard has the tokenizer (the head reads it from the model file). A shard may be one slice
of its layers (`slices`): then it has that slice of each matrix.

Renaming layers silently changes a model whose graph depends on a layer's index. So only
architectures that a test has shown to split bit-equal are cut; the rest are refused by name.

Independent of ranks and memory limits: the planner decides which rank gets which layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from pipeinfer.errors import ModelError, PlanError, UnsupportedArchitecture
from pipeinfer.models import slice_parts
from pipeinfer.models.architectures import TABLE, declared, keys
from pipeinfer.models.architectures.declaration import number
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import DEFAULT_ALIGNMENT, ModelFile
from pipeinfer.models.gguf_parts import (
    ComposedFile,
    TensorPart,
    all_of,
    blocks_of,
    entry,
    header_of,
    part_of,
    renamed_entry,
    rows_of,
    total_bytes,
    zeros,
)
from pipeinfer.models.layers import check_range, entries, unused
from pipeinfer.models.shard_cache import Progress, cache_directory, make_room, store
from pipeinfer.models.slice_parts import routers_of

if TYPE_CHECKING:
    from pipeinfer.models.slice_parts import Slice

FORMAT_VERSION = 1  #: part of a cached shard's name; raise it when the bytes written change
#: what tests/backends/test_split_parity.py splits at every layer, bit-equal
SPLITTABLE = tuple(sorted(name for name, one in TABLE.items() if one.splits))
_EVERYWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight",
               "output_hc_base.weight", "output_hc_fn.weight", "output_hc_scale.weight",
               "per_layer_proj_norm.weight")
#: of which each layer has columns, or rows
_TABLE, _PROJECTION = "per_layer_token_embd.weight", "per_layer_model_proj.weight"
_EMBEDDING, _NORM, _OUTPUT = "token_embd.weight", "output_norm.weight", "output.weight"
_OUTPUT_BIAS, _NORM_BIAS = "output.bias", "output_norm.bias"
_KNOWN_GLOBALS = {*_EVERYWHERE, _TABLE, _PROJECTION, _EMBEDDING, _NORM, _NORM_BIAS, _OUTPUT,
                  _OUTPUT_BIAS}


def stage_layers(n_layers: int, n_stages: int) -> list[tuple[int, int]]:
    """Return `[start, stop)` of every stage for an even distribution of the layers.

    A remainder goes to the earlier stages, one layer each, because the last stage also has the
    output head. Raises PlanError when there are more stages than layers.
    """
    if n_stages < 1:
        raise PlanError(f"{n_stages} stages cannot hold a model; start at least one stage")
    if n_stages > n_layers:
        raise PlanError(
            f"{n_stages} stages, but the model has {n_layers} layers; use at most {n_layers} "
            "stages"
        )
    size, extra = divmod(n_layers, n_stages)
    bounds = [0]
    for i in range(n_stages):
        bounds.append(bounds[-1] + size + (i < extra))
    return list(pairwise(bounds))


def check_splittable(model: ModelFile) -> None:
    """Raise UnsupportedArchitecture unless every split of `model` is known to be bit-equal.

    Raises ModelError for a file that lacks tensors, or has some of the wrong shape.
    """
    architecture = model.architecture
    way_out = "run it whole in one process (-np 1), which works for every architecture"
    if architecture not in SPLITTABLE and not isinstance(model, GapModel):
        why = declared(architecture).unsplit or f"known to be safe: {', '.join(SPLITTABLE)}"
        raise UnsupportedArchitecture(
            f"{model.path.name}: the layers of architecture {architecture!r} cannot be split "
            f"safely ({why}); {way_out}")
    own = declared(architecture)
    cut = own.cut
    if why := cut.refuses(model):
        raise UnsupportedArchitecture(f"{model.path.name}: cannot be split: {why}; {way_out}")
    for key, harmless, known in (
            (keys.WINDOW, 0, cut.period or cut.no_windows), (keys.INTERVAL, 0, own.interval),
            (keys.MOE_STEP, 1, cut.step > 1)):
        if (value := model.arch_get(key)) not in (None, 0, harmless) and not known:
            raise UnsupportedArchitecture(
                f"{model.path.name}: it is not known which of its layers differ by {architecture}."
                f"{key} = {value!r}; {way_out}")
    norm = f"{cut.norm}.weight"
    for tensor in model.tensors.values():
        layer = tensor.layer
        if (layer is None and tensor.name not in {*_KNOWN_GLOBALS, norm}) or (
                layer is not None and layer >= model.n_layers_all):
            raise UnsupportedArchitecture(
                f"{model.path.name}: has the tensor {tensor.name!r}, which is unknown in "
                f"{architecture} models; {way_out}")
    for name in (_EMBEDDING, norm,
                 *(f"blk.{i}.{cut.always}.weight" for i in range(model.n_layers))):
        if name not in model.tensors:
            raise ModelError(f"{model.path}: has no tensor {name!r}; the file is incomplete, fetch "
                             "it again")
    for name in (_EMBEDDING, _OUTPUT, norm):
        if name not in model.tensors:
            continue
        shape = model.tensors[name].shape
        if shape[0] != model.n_embd or (name != norm and len(shape) != 2):
            raise ModelError(f"{model.path}: tensor {name!r} has shape {list(shape)} in a model of "
                             f"{model.n_embd} elements; the file is damaged, fetch it again")


def _parts(model: ModelFile, start: int, stop: int, piece: Slice | None) -> list[TensorPart]:
    """The shard's tensors. With `stop == n_layers` it is a last stage, with `start == 0` a first
    one.
    """
    tensors = model.tensors
    last = stop == model.n_layers
    parts = _vocabulary(model, piece, first=start == 0 and piece is None, last=last)
    norm = declared(model.architecture).cut.norm
    parts += [all_of(tensors[name], name) for name in (f"{norm}.weight", _NORM_BIAS)
              if name in tensors]
    if last and _OUTPUT_BIAS in tensors:
        bias = tensors[_OUTPUT_BIAS]
        parts.append(all_of(bias, _OUTPUT_BIAS) if piece is None
                     else part_of(bias, _OUTPUT_BIAS, (piece.vocab,)))
    elif _OUTPUT_BIAS in tensors and declared(model.architecture).cut.head:
        parts.append(zeros(_OUTPUT_BIAS, (model.n_vocab if start == 0 else 1,)))
    skipped = unused(model, start, stop)
    parts += [all_of(tensors[name], name) for name in _EVERYWHERE
              if name in tensors and name not in skipped]
    each = number(model, keys.PER_LAYER)
    own = ((each * start, each * stop),)
    parts += [part_of(tensors[name], name, *dims) for name, dims in (
        (_TABLE, (own,)), (_PROJECTION, (None, own))) if name in tensors]
    sizes = slice_parts.sizes_of(model) if piece is not None else None
    for tensor in tensors.values():
        layer = tensor.layer
        if layer is not None and start <= layer < stop:
            block, rest = f"blk.{layer - start}", tensor.name.split(".", 2)[2]
            parts.append(all_of(tensor, f"{block}.{rest}") if piece is None or sizes is None
                         else slice_parts.slice_of(tensor, block, piece, sizes))
    return parts


def _vocabulary(model: ModelFile, piece: Slice | None, *, first: bool, last: bool
                ) -> list[TensorPart]:
    """Embedding and output matrix of a shard.

    The loader ties the output head to the embedding where the file has no `output.weight`. So the
    last stage stores the head *as* `token_embd.weight`, once, whether or not the model ties them,
    and stages in the middle get one row of zeros that is never read. Slices never have the
    embedding: they receive its rows, because the loader expects as many rows there as in the head.
    Where the loader requires an `output.weight`, zeros in the smallest type replace what is never
    read.
    """
    tensors, width = model.tensors, model.n_embd
    head = tensors.get(_OUTPUT, tensors[_EMBEDDING])
    own = all_of(head, _EMBEDDING) if piece is None else rows_of(head, _EMBEDDING, piece.vocab)
    if declared(model.architecture).cut.head:
        rows = own.shape[-1] if first or last else 1
        return [all_of(tensors[_EMBEDDING], _EMBEDDING) if first
                else zeros(_EMBEDDING, (width, rows)),
                structs.replace(own, name=_OUTPUT) if last else zeros(_OUTPUT, (width, rows))]
    if not first:
        return [own] if last else [zeros(_EMBEDDING, (width, _n_tokens(model)))]
    parts = [all_of(tensors[_EMBEDDING], _EMBEDDING)]
    if last and _OUTPUT in tensors:
        parts.append(all_of(tensors[_OUTPUT], _OUTPUT))
    return parts


def _n_tokens(model: ModelFile) -> int:
    """How many tokens a stage in the middle has, whose embeddings are never read."""
    return model.n_vocab if _TABLE in model.tensors else 1


def _header(model: ModelFile, start: int, stop: int, parts: list[TensorPart],
            piece: Slice | None) -> bytes:
    """Everything before the tensor data. The same model, range and piece give the same bytes."""
    old, last = model.architecture, stop == model.n_layers
    if piece is not None:
        arch = slice_parts.architecture_of(model)
        own = slice_parts.entries_of(model, piece, start, stop)
        n_vocab = piece.vocab[1] - piece.vocab[0] if last else 1
    elif _is_whole(model, start, stop):
        arch, own, n_vocab = old, {}, model.n_vocab
    else:
        arch, own = old, entries(model, start, stop)
        n_vocab = model.n_vocab if start == 0 or last else _n_tokens(model)
    names = {key: arch + key[len(old):] if key.startswith(old + ".") else key
             for key in model.meta_keys()}
    count = f"{arch}.block_count"
    layers = own.pop(count, entry(count, model.n_layers_all if last and start == 0
                                  else stop - start))
    dropped = {"general.alignment", count, f"{arch}.vocab_size", *own}
    found = [
        renamed_entry(model, key, name)
        for key, name in names.items()
        if name not in dropped and not key.startswith(("tokenizer.", "split.", "quantize."))
    ]
    notes = {"layer_start": start, "layer_stop": stop, "layer_total": model.n_layers,
             "vocab_size": model.n_vocab}
    found += [
        entry("general.alignment", DEFAULT_ALIGNMENT),
        layers,
        entry(f"{arch}.vocab_size", n_vocab),
        entry("tokenizer.ggml.model", "none"),
        entry("pipeinfer.fingerprint", model.fingerprint),
        *(entry(f"pipeinfer.{key}", number) for key, number in notes.items()),
        *filter(None, own.values()),
    ]
    return header_of(found, parts)


class ShardSource:
    """The bytes of a shard as `extract_shard` would write them, part by part, stored nowhere.

    model: the file that they come from
    layers: `[start, stop)`
    piece: the slice of each of its layers; None: whole layers
    name: the file's name in a cache
    total: its size in bytes
    header: the bytes before the weights
    A shard of all layers, whole, has every tensor under its own name, whatever the architecture.
    """

    def __init__(self, model: ModelFile, start: int, stop: int, piece: Slice | None = None) -> None:
        _check_range(model, start, stop)
        if piece is None and _is_whole(model, start, stop):
            parts = [all_of(tensor, tensor.name) for tensor in model.tensors.values()]
        else:
            check_splittable(model)
            check_range(model, start, stop)
            if piece is not None:
                slice_parts.check_fits(model, piece)
            parts = _parts(model, start, stop, piece)
        self.model, self.layers = model, (start, stop)
        self.header = _header(model, start, stop, parts, piece)
        if piece is not None and piece.among is not None:
            parts += routers_of(model, start, stop)  # behind what the header names
        self._parts = parts
        self.total = total_bytes(self.header, parts)
        self.name = name_of(model, start, stop, piece.name if piece else "")

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes in order. Raises ModelError when the model file cannot be read."""
        return blocks_of(self.model, self.header, self._parts)

    def opened(self) -> ComposedFile:
        """Return random access to the bytes, without writing them. For whole layers only."""
        return ComposedFile(self.model, self.header, self._parts)


def shard_name(fingerprint: str, start: int, stop: int, piece: str = "") -> str:
    """Return a cached shard's file name, which is unique for its bytes.

    piece: name of the slice of each of its layers; empty for whole layers
    """
    part = f"-{piece}" if piece else ""
    return f"{fingerprint[:32]}-{start}-{stop}{part}-v{FORMAT_VERSION}.gguf"


def name_of(model: ModelFile, start: int, stop: int, piece: str = "") -> str:
    """Return the file name of a model's shard. Those whose layers add parts of pictures' rows have
    another than before they did."""
    deep = "-deep" if start == 0 and number(model, keys.DEEPSTACK) else ""
    return shard_name(model.fingerprint, start, stop, f"{piece}{deep}".removeprefix("-"))


def shard_bytes(model: ModelFile, start: int, stop: int, piece: Slice | None = None) -> int:
    """Return the bytes of weights of a stage with layers `[start, stop)`, or of a slice of them."""
    _check_range(model, start, stop)
    if piece is not None:
        slice_parts.check_fits(model, piece)
    return sum(part.nbytes for part in _parts(model, start, stop, piece))


def by_layer_bytes(model: ModelFile) -> float:
    """Return the bytes that each layer has of tensors outside of layers."""
    return sum(model.tensors[name].nbytes for name in (_TABLE, _PROJECTION)
               if name in model.tensors) / model.n_layers


def extract_shard(
    model: ModelFile,
    start: int,
    stop: int,
    *,
    piece: Slice | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return a GGUF file with layers `[start, stop)` of `model`, from the cache or written now.

    piece: the slice of each of these layers; None: whole layers
    cache_dir: of the shard cache; None: the default
    progress: called with (bytes done, bytes in all)
    For all layers, whole, it is the model's own path, and nothing is copied. The file's name
    contains the model's fingerprint, the range, the slice and the format, so an outdated shard is
    never used; see `shard_cache.store` for how it is written and checked.

    Raises UnsupportedArchitecture, PlanError for a slice that this model does not have, or
    ModelError when the disk is full or the model cannot be read; no temporary file stays behind.
    """
    if piece is None and _is_whole(model, start, stop):
        return model.path
    path = store(ShardSource(model, start, stop, piece), cache_directory(cache_dir), progress)
    make_room(path, model.nbytes)
    return path


def _is_whole(model: ModelFile, start: int, stop: int) -> bool:
    """Whether the layers are the whole model, unchanged."""
    return (start, stop) == (0, model.n_layers) and not isinstance(model, GapModel)


def _check_range(model: ModelFile, start: int, stop: int) -> None:
    if not 0 <= start < stop <= model.n_layers:
        raise PlanError(
            f"layers {start} to {stop} are not a range within the {model.n_layers} layers of "
            f"{model.path.name}"
        )
