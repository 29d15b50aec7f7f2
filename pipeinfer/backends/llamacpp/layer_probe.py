"""llama.cpp's evaluation callback: takes a shard's hidden rows out, and stops a decode inside.

llama.cpp calls it for every node of a graph, thousands of times per token on a deep model. Where
`layer_filter.c` was compiled, it answers those that are not a layer's output; else Python does, at
1 to 2 us each. Knows tensors by their names in llama.cpp's graphs (`l_out-<layer>`); no rows, no
cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError
from pipeinfer.models import llama_c

_NOTHING, _LAST, _SOME, _ENDED = range(4)
#: how often a decode is cut to ask whether to stop: threads start anew after each cut, which takes
#: about a tenth of a millisecond
_CUTS = 8


class Filter(ctypes.Structure):
    """What `layer_filter.c` knows: struct filter."""

    _fields_ = (("name_of", ctypes.c_void_p), ("reached", ctypes.c_void_p),
                ("last", ctypes.c_char_p), ("wants", ctypes.c_int),
                ("stride", ctypes.c_int))


class LayerProbe:
    """One context's callback; `arm` it before a decode and read the outcome afterwards.

    callback, data: for llama.cpp. hidden_done: the rows were copied. stopped: `should_stop` said
    True. error: what it raised.
    llama.cpp calls it twice per tensor: `ask` - do you want it (the graph is cut there) - and,
    when wanted, once the tensor is computed; answering False then ends the graph.
    """

    def __init__(self, last_layer: int) -> None:
        self.last_name = b"l_out-%d" % last_layer
        self.should_stop: Callable[[], bool] | None = None
        self.hidden: FloatArray | None = None
        self.hidden_done = self.stopped = False
        self.error: BaseException | None = None
        kind = llama_c.ggml_backend_sched_eval_callback
        self._own = kind(self._call)
        self._filter = Filter(_address(llama_c.ggml_get_name), _address(self._own),
                              self.last_name, _NOTHING, max(1, (last_layer + 1) // _CUTS))
        function = compiled_filter()
        if function is None:
            self.callback, self.data = self._own, None
        else:
            self.callback, self.data = kind(_address(function)), ctypes.addressof(self._filter)

    def arm(self, should_stop: Callable[[], bool] | None, hidden: FloatArray | None) -> None:
        """Prepare for one decode. hidden: float32[n, n_embd] to fill; None: norm and head run."""
        self.should_stop, self.hidden = should_stop, hidden
        self.hidden_done = self.stopped = False
        self.error = None
        self._filter.wants = _SOME if should_stop is not None else \
            _NOTHING if hidden is None else _LAST

    def _call(self, tensor: int, ask: bool, _data: int | None) -> bool:
        """With the compiled filter: never asked, only told of tensors that were wanted."""
        try:
            if self._filter.wants == _NOTHING:
                return False
            if self._filter.wants == _ENDED:
                # With offloaded layers the graph has several splits, and False ends only one:
                # ask for the first tensor of the next, and end that one, too.
                return ask
            name = llama_c.ggml_get_name(tensor)
            if ask:
                if not name.startswith(b"l_out-"):
                    return False
                return name == self.last_name or (
                    self.should_stop is not None
                    and (int(name[6:]) + 1) % self._filter.stride == 0)
            if name == self.last_name and self.hidden is not None:
                n_bytes = llama_c.ggml_nbytes(tensor)
                if n_bytes != self.hidden.nbytes:
                    raise BackendError(
                        f"{name.decode()} has {n_bytes} bytes, {self.hidden.nbytes} expected"
                    )
                llama_c.ggml_backend_tensor_get(tensor, self.hidden.ctypes.data, 0, n_bytes)
                self.hidden_done = True
                return self._end()  # norm and head of a shard that is not the last never run
            if self.should_stop is not None and self.should_stop():
                self.stopped = True
                return self._end()
        except BaseException as error:  # an exception cannot cross C: re-raised after the decode
            self.error = error
            return self._end()
        return True

    def _end(self) -> bool:
        self._filter.wants = _ENDED
        return False


@cache
def compiled_filter() -> Any | None:
    """The function of `layer_filter.c`, None where it was not compiled or cannot be loaded."""
    spec = PathFinder.find_spec("_layer_filter", [str(Path(__file__).parent)])
    if spec is None or spec.origin is None:
        return None
    try:
        return ctypes.CDLL(spec.origin).pipeinfer_layer_filter
    except (OSError, AttributeError):
        return None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
