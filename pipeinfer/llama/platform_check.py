"""Whether the prebuilt llama.cpp library can run here: platform, processor, system libraries.

    python -I pipeinfer/llama/platform_check.py     prints why it cannot, and exits with 1

The launch scripts ask this before anything is installed, so it takes the standard library alone.
The prebuilt library is that of the wheels of xllamacpp for Linux: x86-64 with AVX2, and aarch64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import sysconfig
from pathlib import Path

COMPILE = ("`./launch/demo --native`, or without a checkout `pip install 'pipeinfer[native]'`, "
           "compiles llama.cpp (this needs a C++ compiler)")
#: for tests: stands in for the processor's own features
FEATURES_VARIABLE = "PIPEINFER_TEST_CPU_FEATURES"
#: what the compiler of the wheel took for granted, by processor
_NEEDED = {"x86_64": ("avx", "avx2", "fma", "f16c", "bmi2"), "aarch64": ()}
#: the wheel takes these from the system
_LIBRARIES = {"libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6"}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Everything that the first processor is said to have; empty where Linux does not say."""
    if (told := os.environ.get(FEATURES_VARIABLE)) is not None:
        return frozenset(told.split())
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next((frozenset(rest.split()) for name, _, rest in lines
                 if name.strip() in ("flags", "Features")), frozenset())


def why_no_wheel() -> str:
    """Why there is no prebuilt library for this Python on this platform; empty where there is."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _NEEDED:
        return f"there is no prebuilt llama.cpp for {sys.platform} on {machine}"
    if "musl" in str(sysconfig.get_config_var("SOABI") or ""):
        return "there is no prebuilt llama.cpp for musl (Alpine Linux)"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "there is no prebuilt llama.cpp for a free-threaded Python"
    return ""


def why_not_here() -> str:
    """Why the prebuilt library cannot run here and what to do, in one line; empty if it can."""
    if reason := why_no_wheel():
        return f"{reason}: {COMPILE}"
    flags = cpu_flags()
    missing = [name for name in _NEEDED[platform.machine()] if flags and name not in flags]
    if missing:
        return (f"the prebuilt llama.cpp needs a processor with {', '.join(missing)}, which this "
                f"one lacks: {COMPILE}")
    for name, package in _LIBRARIES.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            return (f"the prebuilt llama.cpp needs {name}, which this system lacks (Debian and "
                    f"Ubuntu: apt install {package})")
    return ""


if __name__ == "__main__":
    reason = why_not_here()
    if reason:
        print(reason)
    raise SystemExit(bool(reason))
