"""Routers of mixtures, computed so that a row's experts do not depend on other rows of the batch.

A mixture's router is a product of float32 matrices. For one row llama.cpp uses another kernel than
for several, which sums in another order. So where few rows are decoded together, each row's product
is computed once more, by the function for single rows.

Identifies tensors by their names; `layer_filter.c` does the same in C.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from pipeinfer.backends.llamacpp.tensors import source_of, weight_of
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.models.gguf import ModelFile

#: decodes of at most so many rows have their routers' products row by row; longer ones are chunks
#: of prompts, whose cuts do not depend on other requests
MOST_ROWS = 16
_FLOAT32 = 0  #: ggml's number of the type
_NAMES = (b".ffn_gate_inp.weight", b".ffn_gate_inp_shexp.weight")


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
        raise BackendError("this llama.cpp hands rows to routers in an unknown way: install the "
                           "version that constraints.txt names")
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
