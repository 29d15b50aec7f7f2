"""The llama.cpp library: starting it once, which one it is, and what it logged last."""

from __future__ import annotations

import ctypes
import threading
from collections import deque

from msgspec import Struct

from pipeinfer.errors import BackendError
from pipeinfer.models import llama_c, short_runs
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.llama_loader import find_library
from pipeinfer.models.quant_types import GGMLQuantizationType

NO_LIBRARY = "none: "  #: begins what `llama_version` says where no library can run
#: llama.cpp's numbers for files of Q4_K_S and Q4_K_M; what each part of a split file still says
_MOSTLY_Q4_K = (14, 15)
_GPUS = (1, 2)  #: ggml's numbers of devices with memory of their own, and of those without
_NUMA = {"": 0, "distribute": 1, "isolate": 2, "numactl": 3}
_log_lines = threading.local()


def _log(level: int, text: bytes, _data: int | None) -> None:
    """Keep the last warnings and errors of this thread, for messages; print nothing."""
    if level in (3, 4):  # warn, error
        if not hasattr(_log_lines, "kept"):
            _log_lines.kept = deque(maxlen=6)
        _log_lines.kept.append((level, text.decode("utf-8", "replace").strip()))
_log_callback = llama_c.llama_log_callback(_log)  # referenced for ever: llama.cpp calls it
_init_lock = threading.Lock()
_initialised: list[str] = []


def ensure_llama(numa: str = "") -> None:
    """Initialise llama.cpp once per process and silence its log. `numa`: the first caller's.

    Raises BackendError, in one line, without a library that can run here.
    """
    with _init_lock:
        if _initialised:
            return
        llama_c.llama_log_set(_log_callback, ctypes.c_void_p(0))
        llama_c.llama_backend_init()
        if numa:
            llama_c.llama_numa_init(_NUMA[numa])
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
    """Which library runs here, as "llama-cpp-python 0.3.36"; or NO_LIBRARY and why. Loads none."""
    try:
        return find_library().name
    except BackendError as error:
        return f"{NO_LIBRARY}{error}"


def llama_kernels() -> str:
    """The processor's features that the library was compiled for, and "short-runs" where few rows
    are multiplied by `short_runs.c`; empty without a library.

    Looks for no GPU: at the start of a job the rank has not been given its own yet.
    """
    try:
        return " ".join((*llama_c.kernels(), *(["short-runs"] if short_runs.used() else [])))
    except BackendError:
        return ""


def llama_identity() -> str:
    """Everything about the library that bits and times depend on: part of remembered figures'
    names. Two builds of one version differ in their kernels, those for GPUs among them."""
    try:
        library = llama_c.loaded()
        name = f"{library.name}, built {library.stamp}" if library.stamp else library.name
        own = f"; short runs of {' '.join(kinds)}" if (kinds := short_runs.used()) else ""
        return f"{name}; {llama_c.llama_print_system_info().decode()}{own}"
    except BackendError as error:
        return f"{NO_LIBRARY}{error}"


class Gpu(Struct, frozen=True):
    """A device beside the processor that llama.cpp can put layers on. free, total: bytes."""

    name: str
    description: str
    free: int
    total: int


def gpus() -> tuple[Gpu, ...]:
    """The devices that this process sees; empty with a library for processors alone, or without
    one. Opens a context on each."""
    try:
        if not llama_c.llama_supports_gpu_offload():
            return ()
        count = llama_c.ggml_backend_dev_count()
    except BackendError:
        return ()
    found = []
    for i in range(count):
        device = llama_c.ggml_backend_dev_get(i)
        if llama_c.ggml_backend_dev_type(device) not in _GPUS:
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        llama_c.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(Gpu(llama_c.ggml_backend_dev_name(device).decode(),
                         llama_c.ggml_backend_dev_description(device).decode(),
                         free.value, total.value))
    return tuple(found)


def may_repack(model: ModelFile) -> bool:
    """Whether the file's weights are to be laid out anew for this processor's kernels when they
    are loaded.

    Compiled for AMX, llama.cpp crashes on repacked weights at two rows or more (its issue 20824).
    Of Q4_K its kernels for repacked weights take each number of rows in another order, while those
    of `short_runs` take them in the file's layout, all alike. Raises BackendError without a
    library.
    """
    if b"AMX_INT8 = 1" in llama_c.llama_print_system_info():
        return False
    if "q4_K" not in short_runs.used():
        return True
    kind = model.get("general.file_type")
    return not (_mostly_q4_k(model) if kind is None else kind in _MOSTLY_Q4_K)


def _mostly_q4_k(model: ModelFile) -> bool:
    """For files that do not say what they are: whether more of it is Q4_K than Q4_0, the other type
    whose layout changes."""
    sizes = {GGMLQuantizationType.Q4_0: 0, GGMLQuantizationType.Q4_K: 0}
    for tensor in model.tensors.values():
        if tensor.type in sizes:
            sizes[GGMLQuantizationType(tensor.type)] += tensor.nbytes
    return sizes[GGMLQuantizationType.Q4_K] > sizes[GGMLQuantizationType.Q4_0]
