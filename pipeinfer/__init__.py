"""Asynchronous pipelined speculation for large language models over MPI."""

import os

__version__ = "0.2.0"

#: How threads that compute together wait for one another, see docs/benchmarks.md#spin. By default
#: they do so in a loop for milliseconds, and where a neighbour has taken a core the others spin for
#: all that time. libgomp takes the bound; "active" keeps it from lowering the bound to a third when
#: draft and stage, each with threads of its own, share the cores. LLVM's library, which yields by
#: itself, is told to stay as it is. All of it is read once, with llama.cpp or torch.
WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300",
           "KMP_LIBRARY": "throughput", "KMP_BLOCKTIME": "200",
           "KMP_WARNINGS": "0"}  # else LLVM's says that it ignores the first

if "OMP_WAIT_POLICY" not in os.environ:  # else somebody has chosen
    for _name, _value in WAITING.items():
        os.environ.setdefault(_name, _value)
