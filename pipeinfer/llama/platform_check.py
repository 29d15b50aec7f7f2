"""Checks whether the prebuilt llama.cpp library can run here: platform, processor, system
libraries.

    python -I pipeinfer/llama/platform_check.py     prints why it cannot, and exits with 1

The launch scripts run this before anything is installed, so it uses the standard library alone. The
prebuilt library is that of the wheels of xllamacpp for Linux: x86-64 with AVX2, and aarch64.
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
#: for tests: replaces the processor's own features
FEATURES_VARIABLE = "PIPEINFER_TEST_CPU_FEATURES"
#: the features that the wheel was compiled for, by processor
_NEEDED = {"x86_64": ("avx", "avx2", "fma", "f16c", "bmi2"), "aarch64": ()}
#: the wheel takes these from the system
_LIBRARIES = {"libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6"}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features of the first processor; empty where Linux does not list them."""
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
    """Return why there is no prebuilt library for this Python here; empty if there is one."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _NEEDED:
        return f"there is no prebuilt llama.cpp for {sys.platform} on {machine}"
    if "musl" in str(sysconfig.get_config_var("SOABI") or ""):
        return "there is no prebuilt llama.cpp for musl (Alpine Linux)"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "there is no prebuilt llama.cpp for a free-threaded Python"
    return ""


def why_not_here() -> str:
    """Return why the prebuilt library cannot run here and what to do, in one line; or ""."""
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
