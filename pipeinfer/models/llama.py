"""The llama.cpp library: loading it once, and what it logged last."""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import llama_cpp

_NUMA = {"": 0, "distribute": 1, "isolate": 2, "numactl": 3}
_log_lines = threading.local()


def _log(level: int, text: bytes, _data: int | None) -> None:
    """Keep the last warnings and errors of this thread, for messages; print nothing."""
    if level in (3, 4):  # warn, error
        if not hasattr(_log_lines, "kept"):
            _log_lines.kept = deque(maxlen=6)
        _log_lines.kept.append((level, text.decode("utf-8", "replace").strip()))
_log_callback = llama_cpp.llama_log_callback(_log)  # referenced for ever: llama.cpp calls it
_init_lock = threading.Lock()
_initialised: list[str] = []


def ensure_llama(numa: str = "") -> None:
    """Initialise llama.cpp once per process and silence its log. `numa`: the first caller's."""
    with _init_lock:
        if _initialised:
            return
        llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        if numa:
            llama_cpp.llama_numa_init(_NUMA[numa])
        _initialised.append(numa)


def clear_log() -> None:
    """Forget what llama.cpp logged in this thread."""
    _log_lines.kept = deque(maxlen=6)


def last_log() -> str:
    """The last thing that llama.cpp complained about in this thread, in one line."""
    kept = list(getattr(_log_lines, "kept", ()))
    errors = [text for level, text in kept if level == 4] or [text for _, text in kept]
    # The last line often only says that loading failed; the first error says why.
    return " ".join(errors[0].split()) if errors else "llama.cpp gave no reason"


def llama_version() -> str:
    """The version of llama-cpp-python, or "absent"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "absent"
