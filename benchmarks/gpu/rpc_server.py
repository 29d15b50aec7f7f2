"""An RPC server of ggml on this host's processor: python rpc_server.py FOLDER PORT THREADS."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def main(folder: str, port: str, threads: str) -> None:
    """Serve until the process is killed. folder: with libggml.so and libggml-rpc.so."""
    ggml = ctypes.CDLL(str(Path(folder) / "libggml.so"))
    rpc = ctypes.CDLL(str(Path(folder) / "libggml-rpc.so"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))
    serve = rpc.ggml_backend_rpc_start_server
    serve.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t,
                      ctypes.c_void_p]
    serve(f"127.0.0.1:{port}".encode(), None, int(threads), 1, devices)


if __name__ == "__main__":
    main(*sys.argv[1:])
