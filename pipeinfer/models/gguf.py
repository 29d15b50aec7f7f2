"""Reads GGUF model files: metadata, tensor table, content fingerprint. Nothing is loaded.

Every length, count and offset in a file is checked against the file's size before it is used. So a
damaged or hostile file gives a `ModelError` of one line, never a traceback, a read outside the file
or a huge allocation. Only the header is read; array values (a vocabulary has 100,000 strings) are
skipped and decoded at their first use.

Independent of shards, backends, and the meaning of tensors beyond `blk.<i>.` names.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import re
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

Value: TypeAlias = "int | float | bool | str | list[Value]"

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
#: struct code of each scalar metadata type
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_SAMPLE_BYTES = 1024
_CHUNK = 8 << 20
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
_BLOCK = re.compile(r"^blk\.(\d{1,9})\.")
_NAME = re.compile(r"^[a-zA-Z0-9_.-]{1,64}$")
_PLAIN = re.compile(r"^[^\x00-\x1f\x7f]+$")
MOST_LAYERS = 4096  #: more than any model has; bounds the length of lists


class TensorInfo(Struct, frozen=True):
    """One tensor.

    shape: in ggml's order (row length first)
    offset: in bytes from the start of part number `part`
    type: a ggml type number
    """

    name: str
    type: int
    shape: tuple[int, ...]
    nbytes: int
    part: int
    offset: int

    @property
    def layer(self) -> int | None:
        """The layer that the tensor belongs to; None for the embedding, the head and the like."""
        match = _BLOCK.match(self.name)
        return int(match[1]) if match else None

    @property
    def type_name(self) -> str:
        """The type as llama.cpp writes it, such as `Q8_0`."""
        return str(GGMLQuantizationType(self.type).name)


class MetaSpan(Struct, frozen=True):
    """The place of one metadata entry in the header: the whole entry, and its value."""

    start: int
    value: int
    end: int
    type: int


class _Cursor:
    """Reads little-endian fields from a buffer, never outside it."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data, self.path, self.pos, self.size = data, path, 0, len(data)

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}; the file is damaged, fetch it again")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            raise ModelError(
                f"{self.path}: ends inside {what}: the file is truncated, fetch it again"
            )

    def scalar(self, code: str, what: str) -> int:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.pos)
        self.pos += size
        return int(value)

    def string(self, what: str, limit: int = 65535) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        if length > limit:
            raise self.fail(f"{what} of {length} bytes")
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} that is not UTF-8") from None

    def skip_value(self, kind: int, what: str) -> None:
        """Skip one metadata value."""
        if kind == STRING:
            length = self.scalar("Q", what)
            self.need(length, what)
            self.pos += length
        elif kind == ARRAY:
            inner = self.scalar("I", what)
            count = self.scalar("Q", what)
            if inner in SCALARS:
                total = count * struct.calcsize("<" + SCALARS[inner])
                self.need(total, what)
                self.pos += total
            elif inner == STRING:
                self._skip_strings(count, what)
            else:
                raise self.fail(f"{what} is an array of type {inner}")
        elif kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            self.need(size, what)
            self.pos += size
        else:
            raise self.fail(f"{what} has the unknown type {kind}")

    def _skip_strings(self, count: int, what: str) -> None:
        """Skip strings. This is the one hot loop: a vocabulary with its merges is some 400,000
        strings.
        """
        self.need(count * 8, what)
        unpack, data, pos, last = struct.Struct("<Q").unpack_from, self.data, self.pos, self.size
        for _ in range(count):
            if pos + 8 > last:
                pos = last + 1
                break
            pos += 8 + unpack(data, pos)[0]
        if pos > last:
            raise ModelError(
                f"{self.path}: ends inside {what}: the file is truncated, fetch it again"
            )
        self.pos = pos


class _Part:
    """The parsed header of one file."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 24:
                    raise ModelError(
                        f"{path}: is not a GGUF file (only {self.size} bytes); fetch the "
                        "model again"
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._parse(_Cursor(data, path), number)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; check the path after -m or -md") from None
        except IsADirectoryError:
            raise ModelError(f"{path}: is a directory; give the .gguf file in it") from None
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None

    def _parse(self, cursor: _Cursor, number: int) -> None:
        if cursor.data[:4] != MAGIC:
            raise ModelError(f"{self.path}: is not a GGUF file (it does not begin with 'GGUF')")
        cursor.pos = 4
        version = cursor.scalar("I", "the header")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            why = "is big-endian" if swapped else f"has GGUF version {version}, not 2 or 3"
            raise ModelError(f"{self.path}: {why}; convert the model again")
        n_tensors = cursor.scalar("Q", "the header")
        n_meta = cursor.scalar("Q", "the header")
        # The smallest entries: key length, type, one byte; name length, dimensions, type, offset.
        if n_meta > (self.size - 24) // 13 or n_tensors > (self.size - 24) // 24:
            raise cursor.fail(
                f"claims {n_tensors} tensors and {n_meta} metadata entries, more than it can hold"
            )
        self.meta: dict[str, MetaSpan] = {}
        for _ in range(n_meta):
            start = cursor.pos
            key = cursor.string("a metadata key")
            kind = cursor.scalar("I", f"metadata {key!r}")
            value = cursor.pos
            cursor.skip_value(kind, f"metadata {key!r}")
            if not _PLAIN.match(key):
                raise cursor.fail(f"metadata key {key!r} is not a valid name")
            if key in self.meta:
                raise cursor.fail(f"metadata {key!r} appears twice")
            self.meta[key] = MetaSpan(start, value, cursor.pos, kind)
        table = [self._tensor_entry(cursor) for _ in range(n_tensors)]
        self.header = bytes(cursor.data[: cursor.pos])
        alignment = self.value("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise cursor.fail(f"alignment {alignment!r}, which is not a power of two of at least 8")
        data_start = -(-cursor.pos // alignment) * alignment
        self.tensors: list[TensorInfo] = []
        for name, kind, shape, nbytes, offset in table:
            if offset % alignment:
                raise cursor.fail(f"tensor {name!r} at offset {offset}, not a multiple of "
                                  f"{alignment}")
            if data_start + offset + nbytes > self.size:
                raise ModelError(
                    f"{self.path}: tensor {name!r} ends {data_start + offset + nbytes - self.size} "
                    "bytes past the end: the file is truncated, fetch it again"
                )
            self.tensors.append(TensorInfo(name, kind, shape, nbytes, number, data_start + offset))
        for one, other in itertools.pairwise(sorted(self.tensors, key=lambda t: t.offset)):
            if one.name != other.name and one.offset + one.nbytes > other.offset:
                raise cursor.fail(f"tensors {one.name!r} and {other.name!r} overlap")

    def _tensor_entry(self, cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int, int]:
        name = cursor.string("a tensor name", limit=255)
        if not _PLAIN.match(name):
            raise cursor.fail(f"{name!r} is not a valid tensor name")
        n_dims = cursor.scalar("I", f"tensor {name!r}")
        if not 1 <= n_dims <= 4:
            raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(cursor.scalar("Q", f"tensor {name!r}") for _ in range(n_dims))
        kind = cursor.scalar("I", f"tensor {name!r}")
        offset = cursor.scalar("Q", f"tensor {name!r}")
        try:
            block, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {kind}, which the installed gguf package "
                "does not know; update it, or quantise the model to another type"
            ) from None
        count = 1
        for dim in shape:
            count *= dim
        if count == 0 or shape[0] % block:
            raise cursor.fail(f"tensor {name!r} has the impossible shape {list(shape)}")
        return name, kind, shape, count // block * type_size, offset

    def value(self, key: str, default: Value | None = None) -> Value | None:
        """The decoded metadata value under `key`."""
        span = self.meta.get(key)
        if span is None:
            return default
        cursor = _Cursor(self.header, self.path)
        cursor.pos = span.value
        return self._decode(cursor, span.type, key)

    def array(self, key: str) -> tuple[int, int] | None:
        """Type and number of the values of an array; None for no array."""
        span = self.meta.get(key)
        if span is None or span.type != ARRAY:
            return None
        kind, count = struct.unpack_from("<IQ", self.header, span.value)
        return int(kind), int(count)

    def texts(self, key: str) -> list[bytes]:
        """The texts of an array of texts."""
        found = self.array(key)
        if found is None or found[0] != STRING:
            return []
        unpack, data, at = struct.Struct("<Q").unpack_from, self.header, self.meta[key].value + 12
        out = []
        for _ in range(found[1]):
            end = at + 8 + unpack(data, at)[0]
            out.append(data[at + 8 : end])
            at = end
        return out

    def _decode(self, cursor: _Cursor, kind: int, key: str) -> Value:
        if kind == STRING:
            length = cursor.scalar("Q", key)
            raw = cursor.data[cursor.pos : cursor.pos + length]
            cursor.pos += length
            return raw.decode("utf-8", "replace")
        if kind == ARRAY:
            inner = cursor.scalar("I", key)
            count = cursor.scalar("Q", key)
            if inner == STRING:
                return [self._decode(cursor, inner, key) for _ in range(count)]
            return list(struct.unpack_from(f"<{count}{SCALARS[inner]}", cursor.data, cursor.pos))
        (value,) = struct.unpack_from("<" + SCALARS[kind], cursor.data, cursor.pos)
        return value  # type: ignore[no-any-return]


class ModelFile:
    """One model on disk, in one file or several parts. Immutable; holds no open file.

    paths: the parts in order
    tensors: TensorInfo by name, over all parts
    n_layers: layers, without those for multi-token prediction (`n_layers_all`: with them)
    Sizes are in bytes. Raises ModelError for what is no GGUF file of a language model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        first = Path(path).absolute()
        self._parts = [_Part(first, 0)]
        head = self._parts[0]
        count = head.value("split.count", 0)
        if isinstance(count, int) and count > 1:
            self._parts += [_later_part(p, i) for i, p in
                            enumerate(_other_parts(first, head, count), 1)]
        self.paths: tuple[Path, ...] = tuple(part.path for part in self._parts)
        self.tensors: dict[str, TensorInfo] = {}
        for part in self._parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise ModelError(f"{part.path}: tensor {tensor.name!r} appears twice")
                self.tensors[tensor.name] = tensor
        total = head.value("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ModelError(
                f"{first}: {len(self.tensors)} tensors in {len(self.paths)} parts, {total} "
                "announced; a part belongs to another model, fetch them again"
            )
        architecture = self.get("general.architecture")
        if not isinstance(architecture, str) or not _NAME.match(architecture):
            raise ModelError(f"{first}: has no general.architecture; it is not a language model")
        self.architecture: str = architecture
        #: with those for multi-token prediction, which come after the others
        self.n_layers_all: int = self._count("block_count", MOST_LAYERS)
        self.n_layers: int = self.n_layers_all - self._guessing()
        self.n_embd: int = self._count("embedding_length")

    @property
    def path(self) -> Path:
        """The first part, whose name stands for the model."""
        return self.paths[0]

    @property
    def n_vocab(self) -> int:
        """The rows of the embedding matrix, or the declared vocabulary size without one."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) > 1:
            return embedding.shape[1]
        return self._count("vocab_size")

    @property
    def nbytes(self) -> int:
        """The bytes of all parts on disk."""
        return sum(part.size for part in self._parts)

    @property
    def name(self) -> str:
        """The model's name as its file states it, or the file's own."""
        name = self.get("general.name")
        return name if isinstance(name, str) and name else self.path.stem

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """Return the metadata value under `key`; bytes that are not UTF-8 are replaced."""
        return self._parts[0].value(key, default)

    def arch_get(self, key: str, default: Value | None = None) -> Value | None:
        """Return the metadata value under `<architecture>.key`."""
        return self.get(f"{self.architecture}.{key}", default)

    def meta_keys(self) -> tuple[str, ...]:
        """Return all metadata keys in file order."""
        return tuple(self._parts[0].meta)

    def is_array(self, key: str) -> bool:
        """Return whether the metadata value under `key` is an array."""
        span = self._parts[0].meta.get(key)
        return span is not None and span.type == ARRAY

    def array_type(self, key: str) -> int | None:
        """Return the type of the values of the array under `key`; None for no array."""
        found = self._parts[0].array(key)
        return None if found is None else found[0]

    def array_length(self, key: str) -> int:
        """Return the number of values of the array under `key`; 0 for no array."""
        found = self._parts[0].array(key)
        return 0 if found is None else found[1]

    def texts(self, key: str) -> list[bytes]:
        """Return the undecoded strings of the array under `key`; fast, for vocabularies."""
        return self._parts[0].texts(key)

    def raw_entry(self, key: str) -> bytes:
        """Return the bytes of one metadata entry (key, type, value) in the file."""
        span = self._parts[0].meta[key]
        return self._parts[0].header[span.start : span.end]

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """The bytes of the tensors of each layer."""
        sizes = [0] * self.n_layers
        for tensor in self.tensors.values():
            if tensor.layer is not None and tensor.layer < self.n_layers:
                sizes[tensor.layer] += tensor.nbytes
        return tuple(sizes)

    @cached_property
    def layer_reads(self) -> tuple[int, ...]:
        """The bytes of each layer that one row reads: of a mixture's experts those that it uses."""
        sizes, drawn = list(map(float, self.layer_bytes)), drawn_shares(self)
        for tensor in self.tensors.values():
            if "_exps." in tensor.name and tensor.layer is not None \
                    and tensor.layer < self.n_layers:
                sizes[tensor.layer] -= tensor.nbytes * (1 - drawn[tensor.layer])
        return tuple(map(round, sizes))

    def read_tensor(self, tensor: TensorInfo, chunk: int = _CHUNK) -> Iterator[bytes]:
        """Yield the tensor's bytes in pieces of at most `chunk`. Raises ModelError when the file
        shrank.
        """
        path = self.paths[tensor.part]
        try:
            with path.open("rb") as file:
                file.seek(tensor.offset)
                left = tensor.nbytes
                while left:
                    piece = file.read(min(chunk, left))
                    if not piece:
                        raise ModelError(f"{path}: was truncated while it was being read; fetch it "
                                         "again")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits that identify the content, cheap enough for a 100 GB file.

        A hash of each part's size, its whole header (all metadata, the vocabulary, the tensor
        table) and one kilobyte from the middle of every tensor. Two trainings differ in nearly
        every block, so this distinguishes models; it does not detect a few flipped bits.
        """
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(struct.pack("<QQ", part.size, len(part.header)))
            digest.update(part.header)
            try:
                with part.path.open("rb") as file:
                    for tensor in part.tensors:
                        middle = max(0, (tensor.nbytes - _SAMPLE_BYTES) // 2)
                        file.seek(tensor.offset + middle)
                        digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
            except OSError as error:
                raise ModelError(
                    f"{part.path}: cannot be read: {error.strerror or error}"
                ) from None
        return digest.hexdigest()

    def _guessing(self) -> int:
        """The number of layers after the others for multi-token prediction."""
        count = self.arch_get("nextn_predict_layers", 0)
        return count if isinstance(count, int) and 0 < count < self.n_layers_all else 0

    def _count(self, key: str, most: int = 2**31 - 1) -> int:
        value = self.arch_get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} is {repr(value)[:80]}, not a number from "
                f"1 to {most}; the file is damaged or not a language model"
            )
        return value


def per_layer(model: Any, key: str, default: int) -> list[int]:
    """Return a number of each layer: metadata has one for all, or a list. model: also a folder."""
    value = model.arch_get(key)
    values = value if isinstance(value, list) else [value or default] * model.n_layers
    return [int(one) for one in values]


def drawn_shares(model: Any) -> list[float]:
    """Return for each layer the share of its experts that a row uses; 1 without experts."""
    counts = zip(*(per_layer(model, f"expert_{kind}", 0) for kind in ("used_count", "count")),
                 strict=False)
    found = [drawn / count if 0 < drawn < count else 1.0 for drawn, count in counts]
    return found + [1.0] * (model.n_layers - len(found))


def _later_part(path: Path, number: int) -> _Part:
    """A part after the first, whose own metadata have this number."""
    part = _Part(path, number)
    if (says := part.value("split.no")) != number:
        raise ModelError(f"{path}: its split.no is {repr(says)[:80]}, not {number}, so it is not "
                         "the part that its name says; fetch it again")
    return part


def _other_parts(first: Path, head: _Part, count: int) -> list[Path]:
    """The paths of the parts after the first, by llama.cpp's naming rule. Checks that all exist."""
    match = _SPLIT_NAME.match(first.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{first}: is one of {count} parts, but is not named like "
            f"'model-00001-of-{count:05d}.gguf'; rename the parts"
        )
    if head.value("split.no", 0) != 0 or int(match["no"]) != 1:
        raise ModelError(
            f"{first}: is a later part of a split model; give the first one, "
            f"{match['stem']}-00001-of-{count:05d}.gguf"
        )
    paths = [first.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf")
             for i in range(2, count + 1)]
    if missing := [path.name for path in paths if not path.exists()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"{first}: is one of {count} parts, but {', '.join(missing[:3])}{more} "
                         f"{'is' if len(missing) == 1 else 'are'} not next to it; fetch the rest")
    return paths
