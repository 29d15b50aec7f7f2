"""Composes a GGUF file from parts of the tensors of another: its header, then its bytes.

A part is a whole tensor, some of its rows, some columns of each row, or zeros. Bytes are read when
they are needed and not converted, so columns begin and end at quantisation blocks. The same entries
and parts give the same bytes. Independent of layers, shards and the cache.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct, structs

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import DEFAULT_ALIGNMENT, ModelFile, TensorInfo
from pipeinfer.models.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_CHUNK = 8 << 20
Range = tuple[int, int]  #: `[a, b)`
Bands = tuple[Range, ...]
Dim = tuple[int, Bands | None]  #: a dimension's size, 0 for any; and what is taken, None for all


class FileWindow(Struct, frozen=True):
    """The part of a tensor that is taken.

    row_bytes: bytes of a row
    bands: rows `[a, b)`, in bands one after the other
    spans: bytes `[c, d)` of each row, one after the other
    """

    row_bytes: int
    bands: Bands
    spans: Bands


class TensorPart(Struct, frozen=True):
    """A tensor of the new file.

    name: in the new file
    shape: in ggml's order
    source: the tensor that its bytes come from; None: zeros
    window: the part of the source; None: all of it
    """

    name: str
    type: int
    shape: tuple[int, ...]
    nbytes: int
    source: TensorInfo | None
    window: FileWindow | None = None


def block_size(tensor: TensorInfo) -> int:
    """Return the elements of a quantisation block (1 for floats), where columns can be cut."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)][0])


def all_of(tensor: TensorInfo, name: str) -> TensorPart:
    """Take the whole tensor, under `name`."""
    return TensorPart(name, tensor.type, tensor.shape, tensor.nbytes, tensor)


def part_of(tensor: TensorInfo, name: str, *dims: Bands | None) -> TensorPart:
    """Take a part of a tensor of up to three dimensions.

    dims: for each of the first dimensions the ranges `[a, b)` to take, one after the other; None:
        all of it. Those of the first begin and end at blocks or with the row
    """
    columns, rows, stack = (own or ((0, size),) for own, size in itertools.zip_longest(
        dims, (*tensor.shape, 1, 1)[:3]))
    count, bands = math.prod(tensor.shape[1:]), list[Range]()
    each, row_bytes, block = (*tensor.shape, 1)[1], tensor.nbytes // count, block_size(tensor)
    assert not any(end % block for own in columns for end in own), (tensor.name, columns, block)
    for i in itertools.chain(*itertools.starmap(range, stack)):
        for low, high in rows:
            joins = bands and bands[-1][1] == each * i + low
            bands.append((bands.pop()[0] if joins else each * i + low, each * i + high))
    spans = tuple((low * row_bytes // tensor.shape[0], high * row_bytes // tensor.shape[0])
                  for low, high in columns)
    shape = tuple(sum(high - low for low, high in own) for own in (columns, rows, stack))
    return structs.replace(
        all_of(tensor, name), shape=shape[:len(tensor.shape)],
        nbytes=sum(b - a for a, b in spans) * sum(b - a for a, b in bands),
        window=FileWindow(row_bytes, tuple(bands), spans))


def rows_of(tensor: TensorInfo, name: str, *bands: Range) -> TensorPart:
    """Take rows `[a, b)` of a matrix; of several such ranges one after the other."""
    return part_of(tensor, name, None, bands)


def without_values(part: TensorPart) -> TensorPart:
    """Return zeros of the same type and shape."""
    return structs.replace(part, source=None, window=None)


def zeros(name: str, shape: tuple[int, ...], *, floats: bool = False) -> TensorPart:
    """Make a matrix of zeros, in the smallest type that its rows can have.

    floats: in float32, as vectors and single rows are
    """
    kinds, count = GGMLQuantizationType, math.prod(shape[1:])
    for kind in (kinds.F32,) if floats or count == 1 else (kinds.IQ1_S, kinds.Q4_0, kinds.F16):
        block, size = GGML_QUANT_SIZES[kind]
        if shape[0] % block == 0:
            break
    return TensorPart(name, int(kind), shape, shape[0] // block * size * count, None)


def aligned(size: int) -> int:
    """Return `size` rounded up to the offset where the next tensor may begin."""
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def entry(key: str, value: str | int | float | Sequence[float]) -> bytes:
    """Return a metadata entry with a text, a float32, an unsigned 32-bit integer, or a list of
    booleans, of float32 or of signed 32-bit integers.
    """
    name = _string(key)
    if isinstance(value, str):
        return name + struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, float):
        return name + struct.pack("<If", _FLOAT32, value)
    if isinstance(value, int):
        return name + struct.pack("<II", _UINT32, value)
    kind, code = (_BOOL, "?") if isinstance(value[0], bool) else \
        (_FLOAT32, "f") if isinstance(value[0], float) else (_INT32, "i")
    return name + struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, kind, len(value), *value)


def renamed_entry(model: ModelFile, old: str, new: str) -> bytes:
    """Return the model's metadata entry `old` under the key `new`."""
    return _string(new) + model.raw_entry(old)[len(_string(old)):]


def header_of(entries: Sequence[bytes], parts: Sequence[TensorPart]) -> bytes:
    """Return everything before the tensors' bytes, padded to the alignment."""
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(parts), len(entries)), *entries]
    offset = 0
    for part in parts:
        out.append(_string(part.name))
        out.append(struct.pack(f"<I{len(part.shape)}Q", len(part.shape), *part.shape))
        out.append(struct.pack("<IQ", part.type, offset))
        offset += aligned(part.nbytes)
    header = b"".join(out)
    return header + bytes(aligned(len(header)) - len(header))


def total_bytes(header: bytes, parts: Sequence[TensorPart]) -> int:
    """Return the size of the file in bytes."""
    return len(header) + sum(aligned(part.nbytes) for part in parts)


def blocks_of(model: ModelFile, header: bytes, parts: Sequence[TensorPart]) -> Iterator[bytes]:
    """Yield the file's bytes in order. Raises ModelError when the model cannot be read."""
    yield header
    for part in parts:
        if part.source is None:
            for done in range(0, part.nbytes, _CHUNK):
                yield bytes(min(_CHUNK, part.nbytes - done))
        elif part.window is None:
            yield from model.read_tensor(part.source)
        else:
            yield from _read_window(model, part.source, part.window)
        padding = aligned(part.nbytes) - part.nbytes
        if padding:
            yield bytes(padding)


class ComposedFile:
    """Random access to the bytes of a file that is stored nowhere, of whole tensors, of rows and of
    neighbouring columns.

    total: its size in bytes
    Close it after use. Raises ModelError if a file of the model cannot be opened.
    """

    def __init__(self, model: ModelFile, header: bytes, parts: Sequence[TensorPart]) -> None:
        self.total = total_bytes(header, parts)
        self._header, self._parts, self._paths = header, list(parts), model.paths
        self._starts = [0]
        at = len(header)
        for part in parts:
            assert part.window is None or len(part.window.spans) == 1, part.name
            self._starts.append(at)
            at += aligned(part.nbytes)
        self._files: dict[int, int] = {}

    def read_into(self, at: int, into: memoryview) -> int:
        """Fill the beginning of `into` with the bytes from `at` on; return how many.

        Raises ModelError when a file of the model cannot be read or became shorter.
        """
        index = bisect.bisect_right(self._starts, at) - 1
        inside, part = at - self._starts[index], self._parts[index - 1] if index else None
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else self.total
        have = len(self._header) if part is None else part.nbytes
        if inside < have and (part is None or part.source is not None):
            count = min(len(into), have - inside)
            if part is None or part.source is None:
                into[:count] = self._header[inside:inside + count]
                return count
            return self._pread(part.source, *_where(part, inside, into[:count]))
        count = min(len(into), (have if inside < have else stop - self._starts[index]) - inside)
        into[:count] = bytes(count)
        return count

    def close(self) -> None:
        """Close the model's files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _pread(self, tensor: TensorInfo, inside: int, into: memoryview) -> int:
        path = self._paths[tensor.part]
        try:
            if tensor.part not in self._files:
                self._files[tensor.part] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            count = os.preadv(self._files[tensor.part], [into], tensor.offset + inside)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        if not count:
            raise ModelError(f"{path}: was truncated while it was being read; fetch it again")
        return count


def _where(part: TensorPart, inside: int, into: memoryview) -> tuple[int, memoryview]:
    """Where in its source the bytes of a part from `inside` on are, as many as lie together."""
    if part.window is None:
        return inside, into
    ((low, high),), size = part.window.spans, part.window.row_bytes
    for first, stop in part.window.bands:
        if inside < (stop - first) * (high - low):
            break
        inside -= (stop - first) * (high - low)
    if high - low == size:
        return first * size + inside, into[:(stop - first) * size - inside]
    row, inside = divmod(inside, high - low)
    return (first + row) * size + low + inside, into[:high - low - inside]


def _read_window(model: ModelFile, tensor: TensorInfo, window: FileWindow) -> Iterator[bytes]:
    """Yield a window's bytes. Rows are read whole even for a few columns, as files are read by
    pages.
    """
    path, size = model.paths[tensor.part], window.row_bytes
    whole = window.spans == ((0, size),)
    try:
        with path.open("rb") as file:
            for at, stop in window.bands:
                file.seek(tensor.offset + at * size)
                for done in range(at, stop, max(1, _CHUNK // size)):
                    count = min(stop - done, max(1, _CHUNK // size))
                    data = file.read(count * size)
                    if len(data) < count * size:
                        raise ModelError(f"{path}: was truncated while it was being read; fetch "
                                         "it again")
                    if not whole:
                        cells = np.frombuffer(data, np.uint8).reshape(count, size)
                        data = np.concatenate(
                            [cells[:, low:high] for low, high in window.spans], axis=1).tobytes()
                    yield data
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
