"""The devices that llama.cpp sees: python -m benchmarks.gpu.device_list; a JSON object each."""

from __future__ import annotations

import ctypes
import json

from pipeinfer.llama import binding
from pipeinfer.llama.library import ensure_llama

_KINDS = {0: "processor", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}


def main() -> None:
    """Print name, description, kind and bytes of memory of each."""
    ensure_llama()
    print(json.dumps({"offloads": bool(binding.llama_supports_gpu_offload()),
                      "system": binding.llama_print_system_info().decode()}))
    for i in range(binding.ggml_backend_dev_count()):
        device = binding.ggml_backend_dev_get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        binding.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        print(json.dumps({
            "name": binding.ggml_backend_dev_name(device).decode(),
            "description": binding.ggml_backend_dev_description(device).decode(),
            "kind": _KINDS.get(binding.ggml_backend_dev_type(device), "unknown"),
            "free": free.value, "total": total.value}))


if __name__ == "__main__":
    main()
