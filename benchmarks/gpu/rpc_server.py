"""An RPC server of ggml on this host's processor:

    python rpc_server.py FOLDER PORT THREADS [MEMORY]
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_GetMemory = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t),
                              ctypes.POINTER(ctypes.c_size_t))


def main(folder: str, port: str, threads: str, memory: str = "0") -> None:
    """Serve until the process is killed.

    folder: with libggml.so and libggml-rpc.so. memory: bytes that the device reports as its own; 0:
        the host's.
    """
    ggml = ctypes.CDLL(str(Path(folder) / "libggml.so"))
    rpc = ctypes.CDLL(str(Path(folder) / "libggml-rpc.so"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))

    @_GetMemory
    def limited(_device: int, free: ctypes._Pointer[ctypes.c_size_t],
                total: ctypes._Pointer[ctypes.c_size_t]) -> None:
        free[0] = total[0] = int(memory)

    if int(memory):  # the third function of a ggml_backend_device
        functions = ctypes.cast(devices[0], ctypes.POINTER(ctypes.c_void_p))
        functions[2] = ctypes.cast(limited, ctypes.c_void_p)
    serve = rpc.ggml_backend_rpc_start_server
    serve.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t,
                      ctypes.c_void_p]
    serve(f"127.0.0.1:{port}".encode(), None, int(threads), 1, devices)


if __name__ == "__main__":
    main(*sys.argv[1:])
