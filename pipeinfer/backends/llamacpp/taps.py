"""Rows of a shard that a head of the target reads: inputs of layers, and of the output matrix.

llama.cpp copies them out for heads of its own (MTP, EAGLE-3), with functions of C++ that it
exports. Asking for them changes no bit of the other results, and the rows are those of every row of
a decode, whether its logits are wanted or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from pipeinfer.backends.base import ShardInfo
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.models.architectures import declared


def refusal(architecture: str, layers: tuple[int, ...], n_layers: int) -> str:
    """Return why rows of a model cannot be tapped; "" if they can. Arguments as for `Taps`.

    Raises BackendError without a library.
    """
    if not binding.has_heads():
        return "this llama.cpp library does not give the rows that a head reads"
    own = declared(architecture)
    for given, wanted, what in (
            (own.layer_inputs, any(one < n_layers for one in layers), "inputs of its layers"),
            (own.final_rows, n_layers in layers, "rows of its last norm")):
        if wanted and not given:
            return f"llama.cpp does not give the {what} in a {architecture}"
    return ""


class Taps(Struct, frozen=True):
    """What is read of one context after each decode.

    sources: for each tapped layer of the shard, the function that returns llama.cpp's rows; None:
        the rows that the shard was given
    n_embd: elements of a row
    """

    sources: tuple[Callable[[], Any] | None, ...]
    n_embd: int

    @classmethod
    def of(cls, context: Any, info: ShardInfo, layers: tuple[int, ...]) -> Taps:
        """Ask a context for rows. Raises BackendError where llama.cpp does not give them.

        layers: of the whole model, in order; those of other shards are ignored. The number of
            layers stands for what the output matrix reads
        """
        start, stop = info.layers
        own = tuple(one for one in layers if start <= one < stop or (
            info.last and one == info.n_layers_total))
        if why := refusal(info.architecture, own, info.n_layers_total):
            raise BackendError(why)
        return cls(tuple(_source(context, info, one) for one in own), info.n_embd)

    def read(self, count: int, given: FloatArray | None) -> FloatArray:
        """Return float32[count, layers * n_embd] of the decode that has just ended.

        count: its rows
        given: the hidden rows that the shard got
        """
        found = [np.empty((count, 0), np.float32)]
        for source in self.sources:
            own = given if source is None else self._copied(source(), count)
            assert own is not None  # a shard that is not the first was given rows
            found.append(own)
        return np.concatenate(found, axis=1)

    def _copied(self, rows: Any, count: int) -> FloatArray:
        if not rows:
            raise BackendError("llama.cpp gave no rows for the head")
        return np.ctypeslib.as_array(rows, (count * self.n_embd,)).reshape(count, -1)


def _source(context: Any, info: ShardInfo, layer: int) -> Callable[[], Any] | None:
    if layer == info.n_layers_total:
        binding.want_final_rows(context, True, False)
        return lambda: binding.get_final_rows(context)
    local = layer - info.layers[0]
    if local == 0 and not info.first:
        return None
    binding.want_layer_input(context, local, True)
    return lambda: binding.get_layer_input(context, local)
