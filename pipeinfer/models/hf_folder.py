"""Reads a model folder in Hugging Face's layout: config.json and the headers of its safetensors.

Nothing is loaded, and neither torch nor transformers is needed: plans and the head need only
headers. Every length and offset in a file is checked against its size before it is used. The
meaning of a layer's tensors is defined in `backends.pytorch.weights`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import MOST_LAYERS

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
              "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
FLOATS = ("F64", "F32", "F16", "BF16")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_MOST_HEADER = 100 << 20
_MOST_DIMENSIONS = 8
_SAMPLE_BYTES = 1024
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  #: llama.cpp's numbers
#: GGUF's names of the values that plans need -> their names in config.json
_KEYS = {
    "context_length": ("max_position_embeddings",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
}


class StoredTensor(Struct, frozen=True):
    """One tensor: its file, type, shape (rows first), and where its bytes are in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def layer(self) -> int | None:
        """The layer that the tensor belongs to; None for the embedding, the head and the norm."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None


class ModelDir:
    """One model folder. Immutable; holds no open file.

    config: config.json
    tensors: StoredTensor by name, over all files
    architecture: the model type, such as "llama"
    Raises ModelError for a folder that is no model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = _read_json(self.path / "config.json", "is not a Hugging Face model folder")
        kind = self.config.get("model_type")
        if not isinstance(kind, str) or not kind:
            raise ModelError(f"{self.path}: config.json has no model_type; fetch the model again")
        self.architecture: str = kind
        self.n_layers = self._count("num_hidden_layers", MOST_LAYERS)
        self.n_embd = self._count("hidden_size")
        self.n_vocab = self._count("vocab_size")
        self.tensors: dict[str, StoredTensor] = {}
        self.files = _files(self.path)
        for file in self.files:
            for tensor in _read_header(file):
                if tensor.name in self.tensors:
                    raise ModelError(f"{file}: tensor {tensor.name!r} appears twice")
                self.tensors[tensor.name] = tensor
        found = {tensor.layer for tensor in self.tensors.values()} - {None}
        if found and len(found) < self.n_layers:
            raise ModelError(f"{self.path}: config.json says {self.n_layers} layers and the files "
                             f"have {len(found)}; fetch the model again")

    @property
    def name(self) -> str:
        """Name of the folder, without its parents."""
        return self.path.name

    @property
    def nbytes(self) -> int:
        """Size of all tensors together, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the tensors of each layer, as stored."""
        sizes = [0] * self.n_layers
        for tensor in self.tensors.values():
            if tensor.layer is not None and tensor.layer < self.n_layers:
                sizes[tensor.layer] += tensor.nbytes
        return tuple(sizes)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of GGUF's `key`, for the keys that plans need."""
        if key == "general.file_type" and self.tensors:
            largest = max(self.tensors.values(), key=lambda tensor: tensor.nbytes)
            return _FILE_TYPES.get(largest.dtype, default)
        return default

    def arch_get(self, key: str, default: Any = None) -> Any:
        """Return the value of GGUF's `<architecture>.key`, for the keys that plans need."""
        for name in _KEYS.get(key, ()):
            if self.config.get(name) is not None:
                return self.config[name]
        return default

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over config, headers and a kilobyte of every tensor; see `gguf`."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
            try:
                with tensor.file.open("rb") as file:
                    file.seek(tensor.start + max(0, (tensor.nbytes - _SAMPLE_BYTES) // 2))
                    digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
            except OSError as error:
                raise ModelError(
                    f"{tensor.file}: cannot be read: {error.strerror or error}") from None
        return digest.hexdigest()

    def _count(self, key: str, most: int = 2**31 - 1) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise ModelError(f"{self.path}: {key} in config.json is {repr(value)[:80]}, not a "
                             f"number from 1 to {most}; give a folder with a language model")
        return value


def torch_parts(model: Any, item_bytes: int) -> tuple[list[int], int, int]:
    """Return the bytes that torch holds: of each layer, the embedding and the head.

    model: a ModelDir or a ModelFile
    item_bytes: of one weight; 0: count the bytes in the file
    """
    layers = [0] * model.n_layers
    others: dict[str, int] = {}
    for tensor in model.tensors.values():
        size = item_bytes * math.prod(tensor.shape) if item_bytes else tensor.nbytes
        if tensor.layer is None:
            others[tensor.name] = size
        elif tensor.layer < model.n_layers:
            layers[tensor.layer] += size
    embedding = others.get("model.embed_tokens.weight", others.get("token_embd.weight", 0))
    return layers, embedding, others.get("lm_head.weight", others.get("output.weight", embedding))


def _files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder."""
    index = folder / _INDEX
    if index.exists():
        weights = _read_json(index, "is damaged").get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise ModelError(f"{index}: has no weight_map; fetch it again")
        names = sorted(set(map(str, weights.values())))
        if any(Path(name).name != name or not name.isprintable() or len(name) > 200
               or not name.endswith(".safetensors") for name in names):
            raise ModelError(f"{index}: names a file outside its folder, or no weight file at all; "
                             "fetch it again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder}: has no {missing[0]}, which its index names; fetch the "
                             "model again")
        return tuple(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return (others[0],)
    raise ModelError(f"{folder}: has no {_SINGLE} and no {_INDEX}; convert the weights to "
                     "safetensors")


def _read_header(path: Path) -> list[StoredTensor]:
    """The tensor table of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER):
                raise ModelError(f"{path}: is not a safetensors file, or is truncated; fetch it "
                                 "again")
            header = json.loads(file.read(length), object_pairs_hook=_once)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: its header is damaged; fetch it again") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its header is damaged; fetch it again")
    found = [_entry(path, name, entry, 8 + length, size)
             for name, entry in header.items() if name != "__metadata__"]
    for one, other in itertools.pairwise(sorted(found, key=lambda t: (t.start, t.nbytes))):
        if one.start + one.nbytes > other.start:
            raise ModelError(f"{path}: tensors {one.name!r} and {other.name!r} overlap; the file "
                             "is damaged, fetch it again")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(path: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ModelError(f"{path}: tensor {name[:80]!r} is damaged; fetch the file again")
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        raise ModelError(f"{path}: tensor {name!r} has type {str(dtype)[:80]!r}, which is not "
                         "supported")
    if min(shape, default=0) < 0 or start < 0 or stop - start != item * math.prod(shape):
        raise ModelError(f"{path}: tensor {name!r} of shape {list(shape)} has {stop - start} "
                         "bytes; the file is damaged, fetch it again")
    if data + stop > size:
        raise ModelError(f"{path}: tensor {name!r} ends past the end: the file is truncated, fetch "
                         "it again")
    return StoredTensor(name, path, dtype, tuple(shape), data + start, stop - start)


def _read_json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: {otherwise} (it has no {path.name})") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: is not valid JSON; fetch it again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object; fetch it again")
    return data
