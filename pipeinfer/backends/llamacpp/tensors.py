"""Access to the sources of tensors in llama.cpp's graphs, for which it has no function."""

from __future__ import annotations

import ctypes
from functools import cache

from pipeinfer.errors import BackendError
from pipeinfer.llama import binding


@cache
def source_offset() -> int:
    """Return the offset of the first source's address in a tensor, in bytes.

    Found by searching the memory of a product of two tensors, as no function returns it. Raises
    BackendError for an unknown layout.
    """
    room = 4 * binding.ggml_tensor_overhead() + 4096
    # zeroed: the search reads a little beyond the tensor, where old memory may have the addresses
    memory = ctypes.create_string_buffer(room)
    context = binding.ggml_init(binding.ggml_init_params(room, ctypes.addressof(memory), True))
    try:
        first, second = (binding.ggml_new_tensor_2d(context, 0, 8, 8) for _ in range(2))
        product = binding.ggml_mul_mat(context, first, second)
        words = binding.ggml_tensor_overhead() // 8
        values = list((ctypes.c_uint64 * words).from_address(product))
    finally:
        binding.ggml_free(context)
    found = [8 * i for i, value in enumerate(values) if value == first]
    if len(found) != 1 or values.count(second) != 1 or values.index(second) != found[0] // 8 + 1:
        raise BackendError("tensors of this llama.cpp are laid out in an unknown way, so it cannot "
                           "hold slices: install the version that constraints.txt names")
    return found[0]


def source_of(tensor: int, source: int, which: int) -> int:
    """Return a tensor's source number `which` (0 or 1), 0 for none; source: as from
    `source_offset`.
    """
    return ctypes.c_void_p.from_address(tensor + source + 8 * which).value or 0


def weight_of(tensor: int, source: int) -> bytes:
    """Return the name of the layer's weight that is a tensor's first source; empty for none."""
    first = source_of(tensor, source, 0)
    name: bytes = binding.ggml_get_name(first) if first else b""
    return name if name.startswith(b"blk.") else b""
