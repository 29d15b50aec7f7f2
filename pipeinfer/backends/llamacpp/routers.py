"""Routers of mixtures, computed so that a row's experts do not depend on other rows of the batch.

A mixture's router is a product of float32 matrices. For one row llama.cpp uses another kernel than
for several, which sums in another order. So where few rows are decoded together, each row's product
is computed once more, by the function for single rows.

Identifies tensors by their names; `layer_filter.c` does the same in C.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from pipeinfer.backends.llamacpp.tensors import source_of, weight_of
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.llama import binding
from pipeinfer.models import slice_parts
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile

#: decodes of at most so many rows have their routers' products row by row; longer ones are chunks
#: of prompts, whose cuts do not depend on other requests
MOST_ROWS = 16
MOST_EXPERTS = 512  #: of a layer; llama.cpp's own limit
UNKNOWN = ("this llama.cpp hands rows to routers in an unknown way: install the version that "
           "constraints.txt names")
_FLOAT32 = 0  #: ggml's number of the type
_NAMES = (b".ffn_gate_inp.weight", b".ffn_gate_inp_shexp.weight")


class _Router(ctypes.Structure):
    """The router of a layer: struct router of `layer_filter.c`."""

    _fields_ = (("weights", ctypes.c_void_p), ("biases", ctypes.c_void_p))


class Routers:
    """The routers of a slice that has whole experts: with the rows of all slices' experts.

    count: experts of a layer
    drawn: experts of a row
    own: the first expert of the slice, and how many it has
    weights: beginning of the name of the tensor with the weights of the drawn experts
    Raises ModelError for a damaged file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        model = ModelFile(path)
        self.count, first, own, self.drawn = (
            value if isinstance(value, int) else -1 for value in (
                model.get("pipeinfer.experts"), model.get("pipeinfer.first_expert"),
                model.arch_get("expert_count"), model.arch_get("expert_used_count")))
        if first < 0 or not (
                0 < self.drawn <= own <= self.count - first <= self.count <= MOST_EXPERTS):
            raise ModelError(f"{path}: has {own} of {self.count} experts from {first} on, of which "
                             f"a row draws {self.drawn}; remove the file, it is then made again")
        self.own = first, own
        self._arrays = slice_parts.read_routers(model)
        self.weights = f"ffn_moe_weights_{declared(model.architecture).drawn}-".encode()
        self._table = (_Router * model.n_layers)(*(
            _Router(weights.ctypes.data, None if biases is None else biases.ctypes.data)
            for weights, biases in self._arrays))
        self.address = ctypes.addressof(self._table)


@cache
def single_row_dot() -> Any | None:
    """Return ggml's product of float32 vectors for single rows: (n, to, 0, x, 0, y, 0, 1).

    None where the library's kernels are plug-ins, which do not export it.
    """
    binding.loaded()
    traits = getattr(binding, "ggml_get_type_traits_cpu", None)
    return None if traits is None else traits(_FLOAT32).contents.vec_dot


def is_router(tensor: int, source: int) -> bool:
    """Return whether a tensor is a router's product; source: as from `tensors.source_offset`."""
    return weight_of(tensor, source).endswith(_NAMES)


def by_rows(tensor: int, source: int) -> None:
    """Overwrite a router's product with the products of single rows.

    tensor, source: as for `is_router`
    Raises BackendError for rows that are not contiguous.
    """
    weights, inputs = (source_of(tensor, source, which) for which in (0, 1))
    if binding.ggml_nbytes(inputs) != 4 * binding.ggml_nelements(inputs):
        raise BackendError(UNKNOWN)
    dot = single_row_dot()
    assert dot is not None
    count = binding.ggml_nrows(weights)
    length = binding.ggml_nelements(weights) // count
    to, weight, row = map(binding.ggml_get_data, (tensor, weights, inputs))
    for k in range(binding.ggml_nrows(inputs)):
        for i in range(count):
            dot(length, to + 4 * (k * count + i), 0, weight + 4 * i * length, 0,
                row + 4 * k * length, 0, 1)


def of_floats(path: str | os.PathLike[str]) -> bool:
    """Return whether all routers of the file at `path` are float32. Raises ModelError."""
    tensors = ModelFile(path).tensors
    return all(tensor.type == _FLOAT32 for name, tensor in tensors.items()
               if name.encode().endswith(_NAMES))
