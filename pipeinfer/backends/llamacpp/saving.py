"""Takes cells and states of single sequences out of llama.cpp's cache, and puts them back.

llama.cpp saves all cells of one id. A range goes through an id that holds nothing else: copying to
it moves no values. A restore takes the lowest free cells in the order of the blob, as a decode of
those rows does, so ranges have to be put back in order of position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.backends.base import ShardInfo
from pipeinfer.backends.llamacpp.cells import OccupiedCells
from pipeinfer.backends.llamacpp.context import LoadedModel
from pipeinfer.backends.llamacpp.saved_cells import CellLayout
from pipeinfer.core.types import make_rows
from pipeinfer.llama import binding
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.gguf import per_layer
from pipeinfer.models.layers import LayerKind, has_latent_cache, kv_heads, layer_kinds, windows_of
from pipeinfer.models.shard import ShardSource

_STATES_ONLY = 1  #: llama.cpp's LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_SEVERAL_POSITIONS = (8, 40)  #: llama.cpp's numbers of rotations by four positions
_Bytes = npt.NDArray[np.uint8]


def layout_of(source: Any, handle: Any, layers: tuple[int, int], *, windows: bool) -> CellLayout:
    """Return the layout of a loaded part.

    source: what it was loaded from, a ShardSource or a ModelFile of these layers alone
    handle: llama.cpp's model
    layers: `[start, stop)` of the whole model
    windows: whether layers with a sliding window have a cache of their own
    """
    sliced = isinstance(source, ShardSource)
    model, low = (source.model, layers[0]) if sliced else (source, 0)
    own = declared(model.architecture)
    every = range(low, low + layers[1] - layers[0])
    kinds, heads = layer_kinds(model), kv_heads(model)
    near = windows_of(model, own.cut.period) if windows else []
    at = layers[0] - low

    def of(wanted: Callable[[int], bool]) -> tuple[int, ...]:
        return tuple(at + i for i in every if wanted(i))

    stateful = bool(binding.llama_model_is_recurrent(handle))
    caches = () if stateful else (of(lambda i: heads[i] > 0 and not (windows and near[i])), *(
        [of(lambda i: heads[i] > 0 and near[i])] if windows else []))
    if model.arch_get(keys.INDEXER_WIDTH):
        chooses = per_layer(model, keys.INDEXERS, 1)
        caches = (*caches, of(lambda i: bool(chooses[i])))
    states = of(lambda i: kinds[i] in (LayerKind.STATE, LayerKind.BOTH)) \
        if stateful or binding.llama_model_is_hybrid(handle) else None
    return CellLayout(layers, caches, states,
                      binding.llama_model_rope_type(handle) in _SEVERAL_POSITIONS,
                      not has_latent_cache(model), own.copied_whole,
                      # libraries with this field are newer than the format with sizes
                      hasattr(binding.llama_context_params, "moe_cache_size"))


class CellSaver:
    """Saves and restores the cells of one context.

    cells: their order; None where it is not recorded
    scratch: an id that holds nothing; None where sequences are copied as a whole alone
    nothing: an id whose copy lets a state go; None without states
    """

    def __init__(self, context: Any, cells: OccupiedCells | None, layout: CellLayout,
                 scratch: int | None, nothing: int | None) -> None:
        self.layout = layout
        self._context, self._memory = context, binding.llama_get_memory(context)
        self._cells, self._scratch, self._nothing = cells, scratch, nothing

    @classmethod
    def of(cls, loaded: LoadedModel, cells: OccupiedCells | None, source: Any, info: ShardInfo,
           context: Any) -> CellSaver:
        """Return the saver of a loaded part, whose context has one id more where `has_ranges`."""
        layout = layout_of(source, loaded.handle, info.layers, windows=loaded.has_windows)
        scratch = info.n_seq_max + loaded.further_ids + 1 if loaded.has_ranges else None
        return cls(context, cells, layout, scratch, loaded.nothing(info.n_seq_max))

    @property
    def by_range(self) -> bool:
        """Whether ranges of a sequence can be saved, or whole sequences with their state alone."""
        return self._scratch is not None

    def save(self, seq_id: int, p0: int, p1: int) -> _Bytes:
        """Return the cells of `seq_id` in `[p0, p1)` as llama.cpp saves them, without a state."""
        scratch = self._scratch
        assert scratch is not None
        binding.llama_memory_seq_cp(self._memory, seq_id, scratch, p0, p1)
        try:
            if self._nothing is not None:
                binding.llama_memory_seq_cp(self._memory, self._nothing, scratch, 0, 0)
            return self._get(scratch, 0)
        finally:
            binding.llama_memory_seq_rm(self._memory, scratch, 0, -1)

    def put(self, seq_id: int, p0: int, p1: int, blob: bytes | memoryview) -> bool:
        """Put the cells of `[p0, p1)` back behind those that `seq_id` holds, which end at `p0`;
        return whether there was room and llama.cpp took them."""
        scratch = self._scratch
        assert scratch is not None
        rows = make_rows([(0, at, (seq_id,), False) for at in range(p0, p1)])
        try:
            if not (self._set(scratch, blob, 0) if self._cells is None else self._cells.restore(
                    lambda: self._set(scratch, blob, 0), rows)):
                return False
            binding.llama_memory_seq_cp(self._memory, scratch, seq_id, p0, p1)
            return True
        finally:
            binding.llama_memory_seq_rm(self._memory, scratch, 0, -1)

    def save_state(self, seq_id: int) -> _Bytes:
        """Return the present state of a sequence; with its cells where `by_range` is False."""
        return self._get(seq_id, _STATES_ONLY if self.by_range else 0)

    def put_state(self, seq_id: int, blob: bytes | memoryview) -> bool:
        """Give a sequence, whose cells are there already, its state; return whether llama.cpp took
        it."""
        return self._set(seq_id, blob, _STATES_ONLY if self.by_range else 0)

    def _get(self, seq_id: int, flags: int) -> _Bytes:
        size = binding.llama_state_seq_get_size_ext(self._context, seq_id, flags)
        out = np.empty(size, np.uint8)
        written = binding.llama_state_seq_get_data_ext(
            self._context, out.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), size, seq_id, flags)
        return out[:written]

    def _set(self, seq_id: int, blob: bytes | memoryview, flags: int) -> bool:
        data = np.frombuffer(blob, np.uint8)
        return bool(binding.llama_state_seq_set_data_ext(
            self._context, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(data), seq_id,
            flags))
