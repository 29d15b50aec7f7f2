"""Cuts a range of layers out of a model into a GGUF file of its own, which llama.cpp runs as is.

A shard has the model's metadata with its own `block_count`, its tensors renamed to start at
`blk.0`, and every tensor's bytes as they were. Only the first and the last stage carry the
vocabulary's matrix; no shard carries the tokenizer (the head reads it from the model file).

Renaming layers silently changes a model whose graph depends on a layer's index, so only
architectures that a test has shown to split bit-equal are cut; the rest are refused by name.

Knows nothing about ranks or memory limits: `planner` decides who gets which layers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pipeinfer.errors import ModelError, PlanError, UnsupportedArchitecture
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import DEFAULT_ALIGNMENT, ModelFile, TensorInfo
from pipeinfer.models.shard_cache import cache_directory, is_sound, new_hash, seal

FORMAT_VERSION = 1  #: part of a cached shard's name; raise it when the bytes written change
#: what tests/backends/test_split_parity.py splits at every layer, bit-equal; Mistral and Mixtral
#: are "llama"
SPLITTABLE = ("llama", "qwen2", "qwen3")
#: metadata under which layers differ from each other, or a scale hits every stage's input
TRAPS = (
    "attention.scale",
    "attention.sliding_window",
    "attention.temperature_scale",
    "embedding_scale",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "logit_scale",
    "nextn_predict_layers",
    "residual_scale",
    "ssm.",
)
#: arrays in an architecture's metadata that are not one value per layer
_PLAIN_ARRAYS = ("rope.dimension_sections",)
_EVERYWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_EMBEDDING, _NORM, _OUTPUT = "token_embd.weight", "output_norm.weight", "output.weight"
_OUTPUT_BIAS = "output.bias"
_KNOWN_GLOBALS = {*_EVERYWHERE, _EMBEDDING, _NORM, _OUTPUT, _OUTPUT_BIAS}
_UINT32, _STRING, _F32 = 4, 8, 0
_UNLOCKED_SECONDS = 60.0  #: after which a temporary file that nobody has locked is stale
_STALE_SECONDS = 24 * 3600.0  #: after which one is where files cannot be locked

Progress: TypeAlias = Callable[[int, int], None]


def stage_layers(n_layers: int, n_stages: int) -> list[tuple[int, int]]:
    """`[start, stop)` of every stage when the layers are dealt out evenly.

    What does not divide goes to the earlier stages, one layer each: the last stage also has the
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
    """Raise UnsupportedArchitecture unless every split of `model` is known to be bit-equal."""
    architecture = model.architecture
    way_out = "run it whole in one process (-np 1), which works for every architecture"
    if architecture not in SPLITTABLE and not isinstance(model, GapModel):
        raise UnsupportedArchitecture(
            f"{model.path.name}: the layers of architecture {architecture!r} cannot be split "
            f"safely (known to be safe: {', '.join(SPLITTABLE)}); {way_out}"
        )
    prefix = architecture + "."
    for key in model.meta_keys():
        if not key.startswith(prefix):
            continue
        short = key[len(prefix) :]
        if short.startswith(TRAPS) and model.get(key) not in (0, False):
            raise UnsupportedArchitecture(
                f"{model.path.name}: {key} = {model.get(key)!r} makes layers depend on their "
                f"position in the model; {way_out}"
            )
        if model.is_array(key) and short not in _PLAIN_ARRAYS:
            raise UnsupportedArchitecture(
                f"{model.path.name}: {key} has a value per layer; {way_out}"
            )
    for tensor in model.tensors.values():
        layer = tensor.layer
        if (layer is None and tensor.name not in _KNOWN_GLOBALS) or (
            layer is not None and layer >= model.n_layers
        ):
            raise UnsupportedArchitecture(
                f"{model.path.name}: has the tensor {tensor.name!r}, which is unknown in "
                f"{architecture} models; {way_out}"
            )
    for name in (_EMBEDDING, _NORM, *(f"blk.{i}.attn_norm.weight" for i in range(model.n_layers))):
        if name not in model.tensors:
            raise ModelError(f"{model.path}: has no tensor {name!r}; the file is incomplete, fetch "
                             "it again")
    for name in (_EMBEDDING, _OUTPUT, _NORM):
        if name not in model.tensors:
            continue
        shape = model.tensors[name].shape
        if shape[0] != model.n_embd or (name != _NORM and len(shape) != 2):
            raise ModelError(f"{model.path}: tensor {name!r} has shape {list(shape)} in a model of "
                             f"{model.n_embd} elements; the file is damaged, fetch it again")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of a shard: its new name, and where its bytes come from (None: zeros)."""

    name: str
    type: int
    shape: tuple[int, ...]
    nbytes: int
    source: TensorInfo | None


def _pieces(model: ModelFile, start: int, stop: int) -> list[_Piece]:
    """The shard's tensors. `stop == n_layers` makes it a last stage, `start == 0` a first one.

    The loader ties the output head to the embedding where the file has no `output.weight`. So the
    last stage stores the head *as* `token_embd.weight`, once, whether or not the model ties them,
    and stages in the middle get one row of zeros that nobody reads.
    """
    tensors = model.tensors
    whole = start == 0 and stop == model.n_layers

    def keep(tensor: TensorInfo, name: str) -> _Piece:
        return _Piece(name, tensor.type, tensor.shape, tensor.nbytes, tensor)

    pieces = []
    if start == 0:
        pieces.append(keep(tensors[_EMBEDDING], _EMBEDDING))
    elif stop == model.n_layers:
        pieces.append(keep(tensors.get(_OUTPUT, tensors[_EMBEDDING]), _EMBEDDING))
    else:
        row = (model.n_embd, 1)
        pieces.append(_Piece(_EMBEDDING, _F32, row, model.n_embd * 4, None))
    if whole and _OUTPUT in tensors:
        pieces.append(keep(tensors[_OUTPUT], _OUTPUT))
    pieces.append(keep(tensors[_NORM], _NORM))
    if stop == model.n_layers and _OUTPUT_BIAS in tensors:
        pieces.append(keep(tensors[_OUTPUT_BIAS], _OUTPUT_BIAS))
    pieces += [keep(tensors[name], name) for name in _EVERYWHERE if name in tensors]
    for tensor in tensors.values():
        layer = tensor.layer
        if layer is not None and start <= layer < stop:
            rest = tensor.name.split(".", 2)[2]
            pieces.append(keep(tensor, f"blk.{layer - start}.{rest}"))
    return pieces


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _uint_entry(key: str, value: int) -> bytes:
    return _string(key) + struct.pack("<II", _UINT32, value)


def _text_entry(key: str, value: str) -> bytes:
    return _string(key) + struct.pack("<I", _STRING) + _string(value)


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _header(model: ModelFile, start: int, stop: int, pieces: list[_Piece]) -> bytes:
    """Everything before the tensor data. The same model and range give the same bytes."""
    arch = model.architecture
    first_or_last = start == 0 or stop == model.n_layers
    dropped = {"general.alignment", f"{arch}.block_count", f"{arch}.vocab_size"}
    entries = [
        model.raw_entry(key)
        for key in model.meta_keys()
        if key not in dropped and not key.startswith(("tokenizer.", "split.", "quantize."))
    ]
    entries += [
        _uint_entry("general.alignment", DEFAULT_ALIGNMENT),
        _uint_entry(f"{arch}.block_count", stop - start),
        _uint_entry(f"{arch}.vocab_size", model.n_vocab if first_or_last else 1),
        _text_entry("tokenizer.ggml.model", "none"),
        _text_entry("pipeinfer.fingerprint", model.fingerprint),
        _uint_entry("pipeinfer.layer_start", start),
        _uint_entry("pipeinfer.layer_stop", stop),
        _uint_entry("pipeinfer.layer_total", model.n_layers),
        _uint_entry("pipeinfer.vocab_size", model.n_vocab),
    ]
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(pieces), len(entries)), *entries]
    offset = 0
    for piece in pieces:
        out.append(_string(piece.name))
        out.append(struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *piece.shape))
        out.append(struct.pack("<IQ", piece.type, offset))
        offset += _aligned(piece.nbytes)
    header = b"".join(out)
    return header + bytes(_aligned(len(header)) - len(header))


class ShardSource:
    """The bytes of a shard as `extract_shard` would write them, piece by piece, stored nowhere.

    name: the file's name in a cache; total: its size in bytes; header: all that comes before the
    weights. A shard of all layers has every
    tensor under its own name, whatever the architecture.
    """

    def __init__(self, model: ModelFile, start: int, stop: int) -> None:
        _check_range(model, start, stop)
        if (start, stop) == (0, model.n_layers) and not isinstance(model, GapModel):
            pieces = [_Piece(t.name, t.type, t.shape, t.nbytes, t) for t in model.tensors.values()]
        else:
            check_splittable(model)
            pieces = _pieces(model, start, stop)
        self._model, self._pieces = model, pieces
        self.header = _header(model, start, stop, pieces)
        self.total = len(self.header) + sum(_aligned(piece.nbytes) for piece in pieces)
        self.name = shard_name(model.fingerprint, start, stop)

    def blocks(self) -> Iterator[bytes]:
        """The bytes in order. Raises ModelError when the model file cannot be read."""
        return _blocks(self._model, self.header, self._pieces)


def shard_name(fingerprint: str, start: int, stop: int, piece: str = "") -> str:
    """A cached shard's file name: never the same for other bytes. piece: which slice of each of
    its layers, empty for all of it."""
    part = f"-{piece}" if piece else ""
    return f"{fingerprint[:32]}-{start}-{stop}{part}-v{FORMAT_VERSION}.gguf"


def shard_bytes(model: ModelFile, start: int, stop: int) -> int:
    """Bytes of the weights that a stage with layers `[start, stop)` holds in memory."""
    _check_range(model, start, stop)
    return sum(piece.nbytes for piece in _pieces(model, start, stop))


def extract_shard(
    model: ModelFile,
    start: int,
    stop: int,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """A GGUF file with layers `[start, stop)` of `model`, from the cache or written now.

    All layers: the model's own path, nothing is copied. The file's name is made of the model's
    fingerprint, the range and the format, so a stale shard is never taken; one that is there
    counts when its header is what would be written and its bytes are those that were (`cache`);
    a damaged one is made again. Writing goes to a temporary
    file beside it that is renamed when it is safely on disk: several processes or hosts may
    extract the same shard at once, a reader sees a whole file or none.

    progress: called with (bytes done, bytes in all). Raises UnsupportedArchitecture, or ModelError
    when the disk is full or the model cannot be read; no temporary file stays behind.
    """
    _check_range(model, start, stop)
    if (start, stop) == (0, model.n_layers) and not isinstance(model, GapModel):
        return model.path
    check_splittable(model)
    pieces = _pieces(model, start, stop)
    header = _header(model, start, stop, pieces)
    total = len(header) + sum(_aligned(piece.nbytes) for piece in pieces)
    name = shard_name(model.fingerprint, start, stop)
    directory = cache_directory(cache_dir)
    target = directory / name
    _remove_stale(directory)
    if _is_complete(target, header, total) and is_sound(target):
        if progress:
            progress(total, total)
        return target
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=f"{name}.", dir=directory)
        done, digest = 0, new_hash()
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for block in _blocks(model, header, pieces):
                file.write(block)
                digest.update(block)
                done += len(block)
                if progress:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = ""
        seal(target, digest.digest())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else (error.strerror or str(error))
        raise ModelError(
            f"{directory}: cannot write a shard of {total / 1e6:.0f} MB ({why}); free some space, "
            "or set PIPEINFER_CACHE to another directory"
        ) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return target


def _blocks(model: ModelFile, header: bytes, pieces: list[_Piece]) -> Iterator[bytes]:
    """The shard's bytes in order."""
    yield header
    for piece in pieces:
        if piece.source is None:
            yield np.zeros(piece.nbytes, np.uint8).tobytes()
        else:
            yield from model.read_tensor(piece.source)
        padding = _aligned(piece.nbytes) - piece.nbytes
        if padding:
            yield bytes(padding)


def _check_range(model: ModelFile, start: int, stop: int) -> None:
    if not 0 <= start < stop <= model.n_layers:
        raise PlanError(
            f"layers {start} to {stop} are not a range within the {model.n_layers} layers of "
            f"{model.path.name}"
        )


def _is_complete(path: Path, header: bytes, total: int) -> bool:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == total and file.read(len(header)) == header
    except OSError:
        return False


def _remove_stale(directory: Path) -> None:
    """Delete temporary files of dead writers: a lock ends with its process, on every host."""
    now = time.time()
    for path in directory.glob("*.tmp"):
        try:
            age = now - path.stat().st_mtime
            if age > _UNLOCKED_SECONDS:
                with path.open("r+b") as file:
                    if age < _STALE_SECONDS:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
        except OSError:
            pass  # it is being written, another process was quicker, or it is not ours
