"""What happens in a long wait; and how compute threads wait for one another, see
benchmarks/records/HISTORY.md#spin.

By default threads spin for milliseconds, and if another process has taken a core the other threads
spin all that time. A bound that is too short is no better: a sleeping thread needs some 50 us to
wake. libgomp counts the bound in loop iterations (*looks*), whose duration differs tenfold between
processors; here it is a time. llama.cpp and torch read all this once from the environment.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from pipeinfer.loading import c_part

#: "active" keeps libgomp from lowering the bound when draft and stage, each with threads of its
#: own, share the cores. LLVM's library yields by itself: it keeps its defaults
_SETTINGS = {"OMP_WAIT_POLICY": "active", "KMP_LIBRARY": "throughput", "KMP_BLOCKTIME": "200",
             "KMP_WARNINGS": "0"}  # else LLVM's library warns that it ignores the first
_LOOKS = "GOMP_SPINCOUNT"
_OURS = "PIPEINFER_SPINCOUNT"  #: the measured value, perhaps of the host that started this one
_BOUND_NS = 15_000.0  #: less: threads sleep within a decode; more: other processes cost more time
_FEWEST, _MOST = 100, 100_000
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_UNMEASURED = 1_000  #: without the C part: 4 to 45 us


@contextmanager
def unless_within(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in a thread if this context takes longer."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bound_waiting(environment: MutableMapping[str, str]) -> None:
    """Set the variables that are not set yet. Does nothing if the user has set OMP_WAIT_POLICY."""
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
    """Return the bound in looks.

    each_ns: duration of one look in nanoseconds; None: unknown.
    """
    if not each_ns:
        return _UNMEASURED
    return max(_FEWEST, min(_MOST, round(_BOUND_NS / each_ns)))


def look_ns() -> float | None:
    """Measure one look of libgomp's loop on this processor, in nanoseconds; None without the C
    part."""
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
    """Limit OpenBLAS, which is loaded in this context with numpy, to one thread.

    It would start a thread per core, each of which searches for work for 2^26 cycles before it
    sleeps (THREAD_TIMEOUT); nothing here multiplies matrices with it. Other libraries and child
    processes do not see the setting.
    """
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
