"""Cells of one sequence outside of llama.cpp's cache: by cache and layer, for any split of layers.

llama.cpp saves a sequence as one blob with the layers of its context. `CellLayout.parse` takes a
blob apart, `CellLayout.build` makes the blob of a context with other layers. The bytes of a layer
do not change, so a restored cell has the bits of the one that was saved. Layout of a blob:

    u32 magic, i32 id                                                        (ids are not read)
    a cache   u32 streams, u32 cells, and unless there are none:
              cells x (i32 position, u32 ids, [12 bytes: further positions], i32 id)
              u32 transposed, u32 layers, [u32 and u32: sizes of the rotation of keys and values]
              layers x (i32 type, u64 row, cells x row)                      keys
              layers x the same; transposed: (i32 type, u32 size, u32 n, cells x size x n)  values
    states    u32 cells, and unless there are none: i32 position, u32 ids,
              then u32 transposed, u32 layers, and twice for each layer with a state:
              (i32 type, u64 row, row)

A model has one cache; with sliding windows one of the other layers and one of those with a window;
with states these behind it, or nothing else. Where layers cannot be told apart (`whole`), or the
declaration and the blob differ in their number, a blob stays one piece for its own layers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from pipeinfer.errors import BackendError

_MAGIC = 0xAF143CD8
_HEAD = struct.pack("<Ii", _MAGIC, 0)
_Rows = tuple[int, int, int, memoryview]  #: type, bytes of a row or element, elements, data


class CacheCells(Struct, array_like=True):
    """Cells of one of llama.cpp's caches.

    positions: of the cells, in the order in which they lie
    further: their further positions, 12 bytes each, for models with several
    rotation: sizes of the rotation of keys and values; () where the library writes none
    transposed: whether values lie by element
    layers: rows of keys and, where the model has them, of values, by layer of the whole model
    """

    positions: list[int]
    further: bytes
    rotation: tuple[int, ...]
    transposed: int
    layers: dict[int, list[_Rows]]


class SavedCells(Struct, array_like=True):
    """What a part of the model keeps of a range of a text, or the state behind it.

    caches: see the module docstring
    states: the two rows of a layer's state, by layer
    end: the position before the state
    whole: a blob that stays one piece, by its layers
    """

    caches: list[CacheCells] = []
    states: dict[int, list[_Rows]] = {}
    end: int = -1
    whole: dict[str, memoryview] = {}

    @classmethod
    def joined(cls, pieces: Iterable[SavedCells]) -> SavedCells:
        """Return pieces of the same range with other layers as one. ValueError where they differ in
        more than their layers."""
        first, *others = pieces
        for one in others:
            if one.end != first.end or len(one.caches) != len(first.caches):
                raise ValueError("pieces of another range")
            for into, more in zip(first.caches, one.caches, strict=True):
                if more.positions != into.positions or more.further != into.further or (
                        into.layers and more.layers and (more.rotation, more.transposed)
                        != (into.rotation, into.transposed)):
                    raise ValueError("pieces of other cells")
                if more.layers:
                    into.rotation, into.transposed = more.rotation, more.transposed
                into.layers |= more.layers
            first.states |= one.states
            first.whole |= one.whole
        return first


class CellLayout(Struct, frozen=True):
    """Which layers of a loaded part are in which cache.

    layers: `[start, stop)` of the whole model
    caches: the layers in each of its caches
    states: those with a state; None: the model has none
    further: whether a cell has further positions
    values: whether a cache has values besides keys
    whole: whether its blobs stay one piece
    rotations: whether the library writes sizes of rotations
    """

    layers: tuple[int, int]
    caches: tuple[tuple[int, ...], ...]
    states: tuple[int, ...] | None = None
    further: bool = False
    values: bool = True
    whole: bool = False
    rotations: bool = True

    def parse(self, blob: Any, *, states_only: bool = False) -> SavedCells:
        """Take a blob apart, into views. states_only: it has no caches."""
        if not self.whole:
            try:
                reader = _Reader(memoryview(blob).cast("B"))
                reader.take(len(_HEAD))
                caches = [] if states_only else [self._cache(reader, own) for own in self.caches]
                end, states = (-1, {}) if self.states is None else self._states(reader, self.states)
                reader.finish()
                return SavedCells(caches, states, end)
            except ValueError:  # a kind of layers that the declaration does not describe
                pass
        return SavedCells(whole={self._own: memoryview(blob).cast("B")})

    def build(self, saved: SavedCells, *, states_only: bool = False) -> bytes | memoryview | None:
        """Return the blob of this layout; None where a layer is missing. states_only: without
        caches."""
        if (blob := saved.whole.get(self._own)) is not None:
            return blob
        out: list[bytes | memoryview] = [_HEAD]
        try:
            if not states_only:
                if len(saved.caches) != len(self.caches):
                    return None
                for cells, own in zip(saved.caches, self.caches, strict=True):
                    out += self._of_cache(cells, own)
            if self.states is not None:
                out += self._of_states(saved, self.states)
        except (KeyError, ValueError, struct.error):
            return None
        return b"".join(out)

    @property
    def _own(self) -> str:
        return "{}-{}".format(*self.layers)

    def _cache(self, reader: _Reader, own: Sequence[int]) -> CacheCells:
        streams, count = reader.unpack("<II")
        if streams != 1:
            raise ValueError("several streams")
        if not count:
            return CacheCells([], b"", (), 0, {})
        positions, further = [], []
        for _ in range(count):
            position, _ids = reader.unpack("<iI")
            positions.append(position)
            if self.further:  # two numbers, and a token (-1), which nothing reads there
                further.append(bytes(reader.take(8)) + b"\xff" * 4)
                reader.take(4)
            reader.take(4)
        transposed, n_layers, *rotation = reader.unpack("<II" + "II" * self.rotations)
        if n_layers != len(own):
            raise ValueError("other layers than declared")
        layers: dict[int, list[_Rows]] = {layer: [] for layer in own}
        for layer in own:
            kind, row = reader.unpack("<iQ")
            layers[layer].append((kind, row, 1, reader.take(row * count)))
        for layer in own if self.values else ():
            kind, size, n = reader.unpack("<iII") if transposed else (*reader.unpack("<iQ"), 1)
            layers[layer].append((kind, size, n, reader.take(size * n * count)))
        return CacheCells(positions, b"".join(further), tuple(rotation), transposed, layers)

    def _of_cache(self, cells: CacheCells, own: Sequence[int]) -> list[bytes | memoryview]:
        count = len(cells.positions)
        out: list[bytes | memoryview] = [struct.pack("<II", 1, count)]
        if not count:
            return out
        if len(cells.further) != 12 * count * self.further:
            raise ValueError("further positions")
        for i, position in enumerate(cells.positions):
            out += [struct.pack("<iI", position, 1), cells.further[12 * i : 12 * i + 12],
                    struct.pack("<i", 0)]
        rotation = cells.rotation if own else (0, 0) * self.rotations
        out.append(struct.pack("<II" + "II" * self.rotations, cells.transposed, len(own),
                               *rotation))
        for part in range(1 + self.values):
            for layer in own:
                kind, size, n, data = cells.layers[layer][part]
                if len(data) != size * n * count:
                    raise ValueError("a layer's rows are cut short")
                form = "<iII" if part and cells.transposed else "<iQ"
                out += [struct.pack(form, kind, size, *(n,) * (form == "<iII")), data]
        return out

    def _states(self, reader: _Reader, own: Sequence[int]) -> tuple[int, dict[int, list[_Rows]]]:
        count, = reader.unpack("<I")
        if count > 1:
            raise ValueError("states of several texts")
        end = reader.unpack("<iI")[0] if count else -1
        transposed, n_layers = reader.unpack("<II")
        if transposed or n_layers != self.layers[1] - self.layers[0]:
            raise ValueError("states of other layers")
        layers: dict[int, list[_Rows]] = {layer: [] for layer in own}
        for _ in range(2):
            for layer in own:
                kind, row = reader.unpack("<iQ")
                layers[layer].append((kind, row, 1, reader.take(row * count)))
        return end, layers

    def _of_states(self, saved: SavedCells, own: Sequence[int]) -> list[bytes | memoryview]:
        some = saved.end >= 0
        out: list[bytes | memoryview] = [struct.pack("<I", some)]
        if some:
            out.append(struct.pack("<iI", saved.end, 0))
        out.append(struct.pack("<II", 0, self.layers[1] - self.layers[0]))
        for part in range(2):
            for layer in own:
                kind, row, _, data = saved.states[layer][part]
                if len(data) != row * some:
                    raise ValueError("a layer's state is cut short")
                out += [struct.pack("<iQ", kind, row), data]
        return out


class _Reader:
    """Reads a blob in order, never past its end."""

    def __init__(self, blob: memoryview) -> None:
        self._blob, self._at = blob, 0

    def take(self, count: int) -> memoryview:
        part = self._blob[self._at : self._at + count]
        if len(part) != count:
            raise ValueError("the blob ends early")
        self._at += count
        return part

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def finish(self) -> None:
        if self._at != len(self._blob):
            raise ValueError("the blob goes on")


_decoder = msgspec.msgpack.Decoder(SavedCells)


def to_bytes(saved: SavedCells) -> bytes:
    """Return the bytes of saved cells."""
    return msgspec.msgpack.encode(saved)


def from_bytes(data: bytes | memoryview) -> SavedCells:
    """Return the saved cells in these bytes, as views. Raises BackendError for others."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BackendError(f"these are no saved cells: {error}") from error
