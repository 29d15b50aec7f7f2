"""Kernels that replace some of llama.cpp's, with the same bits: for few rows, and for long texts.

A speculative token pays if its row is cheap and gets the same bits as alone. llama.cpp's kernels
have one or the other. `short_runs.c` has both, for AVX2 and aarch64, by unpacking weights once for
several rows, and so has `repacked_runs.c` for Q4_0 that llama.cpp has repacked;
`repacked_prompts.c` has its prompts for VNNI on 512 bits and for AMX, and `repacked_experts.c`
multiplies the rows of an expert together. Types with blocks multiply
prompts, too, with the bits of single rows, and `wide_prompts.c` does it with VNNI on 512 bits:
faster than llama.cpp's of AVX2, and with VNNI faster than its of AVX-512.
`short_attention.c` unpacks the cache's values once for several rows; `huge_pages.c` is about
memory. The dynamic linker binds llama.cpp to these functions in place of its own, so this library
has to be loaded first, with global symbols. Calls that it does not handle are passed on to
llama.cpp's functions. Single rows have the same bits with and without it.

PIPEINFER_SHORT_RUNS=off leaves all products to llama.cpp. With `one-by-one` it is as on other
processors: the rows of a run are passed to llama.cpp one by one. Independent of models.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeinfer.llama.platform_check import cpu_flags
from pipeinfer.loading import c_part

KERNELS = Path(__file__).with_name("kernels")  #: the folder of the C parts
SWITCH = "PIPEINFER_SHORT_RUNS"
MOST_ROWS = 16  #: as many as are tried for exactness; longer runs are chunks of prompts
#: llama.cpp's functions, all but the last needed: without it threads get fixed parts of a product
FUNCTIONS = ("llamafile_sgemm", "ggml_compute_forward_mul_mat_tiled", "ggml_get_type_traits_cpu",
             "ggml_nrows", "ggml_threadpool_chunk_add")
#: ggml's numbers of the types that have a kernel
_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 8: "q8_0", 12: "q4_K", 13: "q5_K",
          14: "q6_K", 30: "bf16"}

#: Q4_0 that is repacked with eight rows side by side; types whose prompts are, if by tiles, experts
_REPACKED = ("q4_0_8x8", "q4_0_8x8-512", "iq4_nl_8x8-512", "mxfp4_8x8-512", "amx",
             "q4_0_8x8-experts", "iq4_nl_8x8-experts", "mxfp4_8x8-experts")
_METHOD = ("_ZN4ggml3cpu6repack13tensor_traitsI{}Ll8ELl8EL9ggml_type8EE"
           "15compute_forwardEP19ggml_compute_paramsP11ggml_tensor").format
#: functions for it, of which three are needed: without the rest two or three rows go one by one
REPACKED_FUNCTIONS = (
    "ggml_gemv_q4_0_8x8_q8_0", "ggml_gemm_q4_0_8x8_q8_0", "ggml_get_type_traits_cpu",
    _METHOD("10block_q4_0"), "ggml_nrows", "ggml_is_matrix", "ggml_is_contiguous", "ggml_op_desc",
    "ggml_gemm_iq4_nl_8x8_q8_0", "ggml_gemm_mxfp4_8x8_q8_0", "ggml_gemv_iq4_nl_8x8_q8_0",
    "ggml_gemv_mxfp4_8x8_q8_0", _METHOD("12block_iq4_nl"), _METHOD("11block_mxfp4"))
#: functions for attention over a cache of q8_0, all needed, most of them for a self-test
ATTENTION_FUNCTIONS = (
    "ggml_compute_forward_flash_attn_ext", "ggml_get_type_traits_cpu", "ggml_init", "ggml_free",
    "ggml_new_tensor_4d", "ggml_flash_attn_ext", "ggml_new_graph", "ggml_build_forward_expand",
    "ggml_graph_compute_with_ctx", "ggml_get_data")
_ATTENTION = ("attention", "attention-512")
ALLOCATOR = "ggml_aligned_malloc"  #: llama.cpp's, whose large buffers get huge pages
ALL_FUNCTIONS = {*FUNCTIONS, *REPACKED_FUNCTIONS, *ATTENTION_FUNCTIONS, ALLOCATOR}

_used: list[str] = []
#: the C part with llama.cpp's functions, once these are loaded: rows at most -> types taken
_begin: list[Callable[[int, bool], list[str]]] = []


def preload(library: Path) -> None:
    """Load the C part before llama.cpp's library at this path, which has to be loaded next."""
    if os.environ.get(SWITCH, "") != "off" and not _plug_ins(library):
        _compiled()


def begin(functions: Mapping[str, Any]) -> None:
    """Compute products from now on, of all types whose kernels give the bits of llama.cpp's own.

    functions: llama.cpp's by name, as far as it has them
    """
    if _compiled.cache_info().currsize == 0 or (own := _compiled()) is None:
        return
    if ALLOCATOR in functions:
        own.pipeinfer_huge_pages(ctypes.cast(functions[ALLOCATOR], ctypes.c_void_p))
    if ready := "ggml_cpu_init" in functions:
        functions["ggml_cpu_init"]()  # fills tables that its kernels read

    def pointers(names: tuple[str, ...]) -> list[ctypes.c_void_p | None]:
        return [ctypes.cast(functions[name], ctypes.c_void_p) if name in functions else None
                for name in names]

    def begun(function: Any, names: tuple[str, ...], needed: int, *more: Any) -> Any:
        complete, theirs = ready and all(pointers(names[:needed])), pointers(names)
        return lambda most, *now: function(*theirs, most if complete else 0, *more, *now)

    old, flags = not functions.get("ggml_cpu_has_avx512", bool)(), cpu_flags()
    # with AVX-512 llama.cpp is faster on prompts than kernels of AVX2, and with AMX than all
    slower = old or ("avx512_vnni" in flags and "amx_int8" not in flags)
    own_kernels = os.environ.get(SWITCH, "") != "one-by-one"
    every = sum(1 << kind for kind in _TYPES) if own_kernels else 0
    in_files = begun(own.pipeinfer_short_runs, FUNCTIONS, 4, every)
    laid_out_anew = begun(own.pipeinfer_repacked_runs, REPACKED_FUNCTIONS, 3)
    attends = own_kernels and ready and all(pointers(ATTENTION_FUNCTIONS))
    for_attention = (ctypes.c_void_p * len(ATTENTION_FUNCTIONS))(*pointers(ATTENTION_FUNCTIONS))

    def begin_with(most: int, prompts: bool) -> list[str]:
        kernels = in_files(most, prompts and slower, prompts and old)
        # faster than there, but for AVX-512 without VNNI, which was not tried
        repacked = laid_out_anew(own_kernels and most > 0,
                                 prompts and (old or "avx512_vnni" in flags))
        attention = own.pipeinfer_short_attention(for_attention, attends and most > 0)
        return [*(name for kind, name in _TYPES.items() if kernels >> kind & 1),
                *(f"{name}-512" for kind, name in _TYPES.items() if kernels >> 32 + kind & 1),
                *(name for kind, name in enumerate(_REPACKED) if repacked >> kind & 1),
                *(name for bit, name in enumerate(_ATTENTION) if attention >> bit & 1)]

    _begin[:] = [begin_with]
    limit(MOST_ROWS)


def limit(most: int, *, prompts: bool = True) -> None:
    """Compute products of at most `most` rows from now on; 0: none.

    prompts: whether also longer runs, where that is faster than llama.cpp's own kernels; their rows
    then have the bits of single rows, too
    Nothing may be computed during the call. No effect where `begin` found nothing to replace.
    """
    for begin_with in _begin:
        _used[:] = begin_with(most, prompts)


def used() -> tuple[str, ...]:
    """Return the types of weights whose products are computed here.

    "q4_0_8x8" is repacked Q4_0, "-512" prompts on registers of 512 bits, "-experts" rows of
    a mixture, "attention" attention over q8_0. Empty before llama.cpp is loaded.
    """
    return tuple(_used)


@cache
def _compiled() -> Any | None:
    """The C part; None where it was not compiled or cannot be loaded."""
    path = c_part("_short_runs", KERNELS)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        yes = ctypes.c_bool
        for name, result, pointers, more in (
                ("pipeinfer_short_runs", ctypes.c_uint64, FUNCTIONS,
                 (ctypes.c_int, ctypes.c_uint32, yes, yes)),
                ("pipeinfer_repacked_runs", ctypes.c_uint32, REPACKED_FUNCTIONS, (yes, yes))):
            function = getattr(library, name)
            function.restype = result
            function.argtypes = [*[ctypes.c_void_p] * len(pointers), *more]
        library.pipeinfer_short_attention.restype = ctypes.c_uint
        library.pipeinfer_short_attention.argtypes = [ctypes.POINTER(ctypes.c_void_p), yes]
        library.pipeinfer_huge_pages.restype = None
        library.pipeinfer_huge_pages.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


def _plug_ins(library: Path) -> bool:
    """Whether llama.cpp has its kernels in several libraries of which it loads one.

    Their functions cannot be called from here.
    """
    return any(library.parent.glob("libggml-cpu-*.so*"))
