"""Products of a matrix with few rows, by kernels that share what unpacking its weights costs.

A guess is worth a row of a run if that row is cheap and gets the bits that it gets alone. llama.cpp
has one or the other: `short_runs.c` has both, for processors with AVX2. The dynamic linker hands
llama.cpp the functions there in place of its own, so that library has to be loaded before, for
everybody. What it does not take goes on to llama.cpp's. Single rows keep their bits, whether it is
there or not.

PIPEINFER_SHORT_RUNS=off leaves all products to llama.cpp. Knows no models.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeinfer.loading import c_part

SWITCH = "PIPEINFER_SHORT_RUNS"
MOST_ROWS = 16  #: as many as are tried for exactness; more are parts of prompts
#: llama.cpp's functions that are needed; without the last, threads get fixed parts of a product
FUNCTIONS = ("llamafile_sgemm", "ggml_compute_forward_mul_mat_tiled", "ggml_get_type_traits_cpu",
             "ggml_nrows", "ggml_threadpool_chunk_add")
#: ggml's numbers of the types that have a kernel
_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 8: "q8_0", 12: "q4_K", 13: "q5_K",
          14: "q6_K", 30: "bf16"}

_used: list[str] = []
_begin: list[Callable[[int], int]] = []  #: the C part with llama.cpp's functions, once it is loaded


def preload(library: Path) -> None:
    """Come before llama.cpp's library at this path, which is loaded next."""
    if os.environ.get(SWITCH, "") != "off" and not _plug_ins(library):
        _compiled()


def begin(functions: Mapping[str, Any]) -> None:
    """Take products from now on, of all types whose kernels give the bits of llama.cpp's own.

    functions: llama.cpp's by name, as far as it has them.
    """
    if _compiled.cache_info().currsize == 0 or (own := _compiled()) is None:
        return
    complete = all(name in functions for name in FUNCTIONS[:-1])
    if complete and "ggml_cpu_init" in functions:
        functions["ggml_cpu_init"]()  # fills tables that its kernels read
    else:
        complete = False
    pointers = [ctypes.cast(functions[name], ctypes.c_void_p) if name in functions else None
                for name in FUNCTIONS]
    every = sum(1 << kind for kind in _TYPES)
    _begin[:] = [lambda most: int(own(*pointers, most, every))]
    limit(MOST_ROWS if complete else 0)


def limit(most: int) -> None:
    """Take products of at most so many rows from now on; 0: none. Nothing may be computed
    meanwhile. Without effect where `begin` had nothing to begin with."""
    for begin_with in _begin:
        kernels = begin_with(most)
        _used[:] = [name for kind, name in _TYPES.items() if kernels >> kind & 1]


def used() -> tuple[str, ...]:
    """Types of weights whose products are made here. Empty before llama.cpp is loaded."""
    return tuple(_used)


@cache
def _compiled() -> Any | None:
    """The C part's function, None where it was not compiled or cannot be loaded."""
    path = c_part("_short_runs", Path(__file__).parent)
    if path is None:
        return None
    try:
        function = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL).pipeinfer_short_runs
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = [*[ctypes.c_void_p] * len(FUNCTIONS), ctypes.c_int, ctypes.c_uint32]
    return function


def _plug_ins(library: Path) -> bool:
    """Whether llama.cpp picks one of several libraries with kernels, whose functions nobody could
    call from here."""
    return any(library.parent.glob("libggml-cpu-*.so*"))
