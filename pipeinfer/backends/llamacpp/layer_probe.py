"""llama.cpp's evaluation callback: takes a shard's hidden rows out, and stops a decode inside.

Knows tensors by their names in llama.cpp's graphs (`l_out-<layer>`); no rows, no cache.
"""

from __future__ import annotations

from collections.abc import Callable

import llama_cpp

from pipeinfer.backends.llamacpp.context import get_name, tensor_get, tensor_nbytes
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError


class LayerProbe:
    """One context's callback; `arm` it before a decode and read the outcome afterwards.

    hidden_done: the rows were copied. stopped: `should_stop` said True. error: what it raised.
    llama.cpp calls it twice per tensor: `ask` - do you want it (the graph is cut there) - and,
    when wanted, once the tensor is computed; answering False then ends the graph.
    """

    def __init__(self, last_layer: int) -> None:
        self.last_name = b"l_out-%d" % last_layer
        self.should_stop: Callable[[], bool] | None = None
        self.hidden: FloatArray | None = None
        self.hidden_done = self.stopped = False
        self.error: BaseException | None = None
        self.callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._call)

    def arm(self, should_stop: Callable[[], bool] | None, hidden: FloatArray | None) -> None:
        """Prepare for one decode. hidden: float32[n, n_embd] to fill; None: norm and head run."""
        self.should_stop, self.hidden = should_stop, hidden
        self.hidden_done = self.stopped = False
        self.error = None

    def _call(self, tensor: int, ask: bool, _data: int | None) -> bool:
        try:
            if self.should_stop is None and self.hidden is None:
                return False
            if self.hidden_done or self.stopped or self.error is not None:
                # With offloaded layers the graph has several splits, and False ends only one:
                # ask for the first tensor of the next, and end that one, too.
                return ask
            name = get_name(tensor)
            if ask:
                if not name.startswith(b"l_out-"):
                    return False
                return self.should_stop is not None or name == self.last_name
            if name == self.last_name and self.hidden is not None:
                if tensor_nbytes(tensor) != self.hidden.nbytes:
                    raise BackendError(
                        f"{name.decode()} has {tensor_nbytes(tensor)} bytes, {self.hidden.nbytes} "
                        "expected"
                    )
                tensor_get(tensor, self.hidden.ctypes.data, 0, self.hidden.nbytes)
                self.hidden_done = True
                return False  # norm and head of a shard that is not the last never run
            if self.should_stop is not None and self.should_stop():
                self.stopped = True
                return False
        except BaseException as error:  # an exception cannot cross C: re-raised after the decode
            self.error = error
            return False
        return True
