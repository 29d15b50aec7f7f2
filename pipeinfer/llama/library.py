"""The llama.cpp library: initialisation, version, identity, last log messages and GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from typing import Any

from msgspec import Struct

from pipeinfer.errors import BackendError
from pipeinfer.llama import binding, short_runs
from pipeinfer.llama.loader import find_library

NO_LIBRARY = "none: "  #: begins the result of `llama_version` where no library can run
_GPUS = (1, 2)  #: ggml's numbers of devices with memory of their own, and of those without
_NUMA = {"": 0, "off": 0, "distribute": 1, "isolate": 2, "numactl": 3}
_log_lines = threading.local()


def _log(level: int, text: bytes, _data: int | None) -> None:
    """Store the last warnings and errors of this thread, for messages; print nothing."""
    if level in (3, 4):  # warn, error
        if not hasattr(_log_lines, "kept"):
            _log_lines.kept = deque(maxlen=6)
        _log_lines.kept.append((level, text.decode("utf-8", "replace").strip()))


def _aborts(message: bytes) -> None:
    """Write why llama.cpp is about to end this process, in place of its own lines and backtrace."""
    where, reason = message.decode("utf-8", "replace"), last_log()
    text = f"{reason} ({where})" if getattr(_log_lines, "kept", ()) else where
    os.write(2, f"pipeinfer: error: llama.cpp ends this process: {' '.join(text.split())}; if a "
                "GPU is full, lower -c or -ngl\n".encode())


log_callback = binding.llama_log_callback(_log)  # referenced for ever: llama.cpp calls it
_abort_callback = binding.ggml_abort_callback(_aborts)
_init_lock = threading.Lock()
_initialised: list[str] = []


def ensure_llama(numa: str = "", *, own_prompts: bool = True) -> None:
    """Initialise llama.cpp once per process and silence its log.

    numa: llama.cpp's --numa; only the first call's counts
    own_prompts: whether our kernels may multiply long runs; once not, then not in this process
    Raises BackendError, in one line, without a library that can run here.
    """
    binding.loaded()
    if not own_prompts:
        short_runs.limit(short_runs.MOST_ROWS, prompts=False)
    with _init_lock:
        if _initialised:
            return
        binding.llama_log_set(log_callback, ctypes.c_void_p(0))
        with contextlib.suppress(BackendError):  # of libraries without it
            binding.ggml_set_abort_callback(_abort_callback)
        binding.llama_backend_init()
        if numa:
            binding.llama_numa_init(_NUMA[numa])
        _initialised.append(numa)


def clear_log() -> None:
    """Delete the stored log messages of this thread."""
    _log_lines.kept = deque(maxlen=6)


def last_log() -> str:
    """Return the first stored error of this thread, else the first warning, in one line."""
    kept = list(getattr(_log_lines, "kept", ()))
    errors = [text for level, text in kept if level == 4] or [text for _, text in kept]
    # The last line often only says that loading failed; the first error says why.
    return " ".join(errors[0].split()) if errors else "llama.cpp gave no reason"


def llama_version() -> str:
    """Return the name of the library, as "llama-cpp-python 0.3.36"; or NO_LIBRARY and the reason.

    Does not load the library.
    """
    try:
        return find_library().name
    except BackendError as error:
        return f"{NO_LIBRARY}{error}"


def llama_kernels() -> str:
    """Return the processor's features that the library was compiled for.

    Includes "short-runs" where few rows are multiplied by `short_runs.c`; empty without a library.
    Does not search for GPUs: at the start of a job a rank has none assigned yet.
    """
    try:
        return " ".join((*binding.kernels(), *(["short-runs"] if short_runs.used() else [])))
    except BackendError:
        return ""


def llama_identity() -> str:
    """Return everything about the library that bits and times depend on.

    It is part of the names of stored measurements. Two builds of one version differ in their
    kernels, those for GPUs among them.
    """
    try:
        library = binding.loaded()
        name = f"{library.name}, built {library.stamp}" if library.stamp else library.name
        own = f"; short runs of {' '.join(kinds)}" if (kinds := short_runs.used()) else ""
        return f"{name}; {binding.llama_print_system_info().decode()}{own}"
    except BackendError as error:
        return f"{NO_LIBRARY}{error}"


def model_params(n_gpu_layers: int = 0) -> Any:
    """Return llama.cpp's parameters of a model; none of its devices if no layer is on one."""
    params = binding.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    if n_gpu_layers == 0:
        params.devices = ctypes.addressof(binding.NO_DEVICES)
    return params


class Gpu(Struct, frozen=True):
    """A device besides the processor that llama.cpp can put layers on. free, total: in bytes."""

    name: str
    description: str
    free: int
    total: int


def has_gpu() -> bool:
    """Return whether there is a device besides the processor: a build for some may find none."""
    return bool(_gpu_devices())


def _gpu_devices() -> list[Any]:
    try:
        if not binding.llama_supports_gpu_offload():
            return []
        every = map(binding.ggml_backend_dev_get, range(binding.ggml_backend_dev_count()))
        return [one for one in every if binding.ggml_backend_dev_type(one) in _GPUS]
    except BackendError:
        return []


def gpus() -> tuple[Gpu, ...]:
    """Return the devices that this process can use; opens a context on each.

    Empty without a library, or with one for processors alone.
    """
    found = []
    for device in _gpu_devices():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        binding.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(Gpu(binding.ggml_backend_dev_name(device).decode(),
                         binding.ggml_backend_dev_description(device).decode(),
                         free.value, total.value))
    return tuple(found)
