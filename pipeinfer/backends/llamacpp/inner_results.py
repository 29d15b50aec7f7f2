"""An excerpt whose results include what is computed inside its layers.

Quantisation of activations hides most rounding errors of a kernel from the layer's own output. So
rows are compared by every product of a weight and by attention's output as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from typing_extensions import override

from pipeinfer.backends.llamacpp import routers
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.layer_probe import LayerProbe
from pipeinfer.backends.llamacpp.routers import Routers
from pipeinfer.backends.llamacpp.tensors import source_of, weight_of
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.llama import binding

_ATTENTION = b"kqv_out-"
_DELTA_NET = b"attn_output-"  #: what a delta net gives; in layers with attention their product
#: weights of three dimensions, whose products have rows of a head together, not of a token
_BY_HEAD = (b".attn_k_b.weight", b".attn_v_b.weight", b".attn_output_a.weight")


class InnerProbe(LayerProbe):
    """Copies the products and the outputs of attention of each decode.

    wanted: whether they are copied; otherwise the decode ends after attention of the last layer,
        when the cache is complete.
    """

    def __init__(self, last_layer: int, first_layer: int = 0, entry: str = "",
                 output: str = "l_out-%d") -> None:
        super().__init__(last_layer, first_layer, entry, output)
        self._look_inside()
        self.callback, self.data = self._own, None  # the compiled filter passes none of them on
        self.wanted = True
        self._last_attention = _ATTENTION + b"%d" % last_layer
        self._parts: dict[bytes, list[FloatArray]] = {}

    @override
    def select_among(self, routers: Routers) -> None:
        # only the C part selects among the experts of all slices: what is compared here are those
        # of this slice, selected among themselves
        self.choose_experts_row_by_row()

    def rows(self, count: int) -> list[FloatArray]:
        """Return and forget what was copied: float32[count, n] for each tensor; several have the
        same name in some graphs."""
        parts, self._parts = self._parts, {}
        return [one.reshape(count, -1) for name in sorted(parts) for one in parts[name]]

    def _call(self, tensor: int, ask: bool, data: int | None) -> bool:
        if self.ended:
            return ask
        name: bytes = binding.ggml_get_name(tensor)
        if not (name.startswith((_ATTENTION, _DELTA_NET)) or self._is_product(tensor)):
            return super()._call(tensor, ask, data)
        if ask:
            return True
        if self._filter.row_by_row and routers.is_router(tensor, self._filter.source):
            super()._call(tensor, ask, data)
        try:
            if self.wanted:
                self._copy(name, tensor)
        except BaseException as error:  # an exception cannot cross C: raised after the decode
            self.error = error
            return self._end()
        if self.wanted or name != self._last_attention:
            return True
        self.hidden_done = True
        return self._end()

    def _is_product(self, tensor: int) -> bool:
        source = self._filter.source
        weight = weight_of(tensor, source)
        return bool(weight) and not weight.endswith(_BY_HEAD) and source_of(tensor, source, 1) != 0

    def _copy(self, name: bytes, tensor: int) -> None:
        found = np.empty(binding.ggml_nelements(tensor), np.float32)
        binding.ggml_backend_tensor_get(tensor, found.ctypes.data, 0, found.nbytes)
        self._parts.setdefault(name, []).append(found)


class InnerBackend(LlamaCppBackend):
    """An excerpt that returns float32[n, more than n_embd]: hidden rows, and what `InnerProbe`
    copied of each. Rows without outputs only fill the cache; their results have no meaning."""

    probe_type = InnerProbe
    _probe: InnerProbe

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        self._probe.wanted = bool(rows.outputs.any())
        result = super().decode(rows, hidden, should_stop)
        inside = self._probe.rows(len(rows))
        return result if result is None else np.concatenate([result, *inside], axis=1)
