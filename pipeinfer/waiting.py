"""How threads that compute together wait for one another, see docs/benchmarks.md#spin.

By default they do so in a loop for milliseconds, and where a neighbour has taken a core the others
spin for all that time. A bound that is too short is no better: whoever has gone to sleep needs some
50 us to wake. libgomp takes the bound in looks, whose length differs by tenfold between processors;
here it is a time. All of it is read once, with llama.cpp or torch, from the environment.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from pipeinfer.loading import c_part

#: "active" keeps libgomp from lowering the bound when draft and stage, each with threads of its
#: own, share the cores. LLVM's library, which yields by itself, is told to stay as it is
_SETTINGS = {"OMP_WAIT_POLICY": "active", "KMP_LIBRARY": "throughput", "KMP_BLOCKTIME": "200",
             "KMP_WARNINGS": "0"}  # else LLVM's says that it ignores the first
_LOOKS = "GOMP_SPINCOUNT"
_OURS = "PIPEINFER_SPINCOUNT"  #: what was measured here, perhaps on the host that started this one
_BOUND_NS = 15_000.0  #: less: threads sleep within a decode; more: dearer neighbours
_FEWEST, _MOST = 100, 100_000
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_UNMEASURED = 1_000  #: without the C part: 4 to 45 us


def bound_waiting(environment: MutableMapping[str, str]) -> None:
    """Set what is not set there yet. Nothing where somebody has chosen OMP_WAIT_POLICY."""
    inherited = environment.get(_OURS, "")
    if "OMP_WAIT_POLICY" in environment and not inherited:
        return
    if inherited and environment.get(_LOOKS) == inherited:
        del environment[_LOOKS]
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
    if _LOOKS not in environment:
        environment[_LOOKS] = environment[_OURS] = str(looks(look_ns()))


def looks(each_ns: float | None) -> int:
    """How many looks of `each_ns` the bound has; None: nobody knows how long one takes."""
    if not each_ns:
        return _UNMEASURED
    return max(_FEWEST, min(_MOST, round(_BOUND_NS / each_ns)))


def look_ns() -> float | None:
    """Nanoseconds of one look of libgomp's loop on this processor, None without the C part."""
    path = c_part("_layer_filter", Path(__file__).parent / "llama" / "kernels")
    if path is None:
        return None
    try:
        function = ctypes.CDLL(path).pipeinfer_look_ns
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_double
    return float(function())


@contextmanager
def one_blas_thread(environment: MutableMapping[str, str]) -> Iterator[None]:
    """OpenBLAS is loaded here, with numpy. It starts a thread per core, each of which looks for
    work for 2^26 cycles before it sleeps (THREAD_TIMEOUT); nothing here multiplies matrices with
    it. Other libraries, and programs that are started from here, are not told."""
    if _BLAS_THREADS in environment:
        yield
        return
    environment[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del environment[_BLAS_THREADS]


bound_waiting(os.environ)
with one_blas_thread(os.environ):
    import numpy as numpy
