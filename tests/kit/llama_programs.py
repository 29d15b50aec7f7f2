"""Programs that stand in for llama.cpp's own, which are not installed where tests run: they take
the options, make the connections and write the form of the real ones."""

from __future__ import annotations

import sys
from pathlib import Path

_BENCH = """
import json, socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for end in filter(None, given.get("--rpc", "").split(",")):
    host, port = end.split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
rows = [(int(n), 0) for n in given["-p"].split(",")] + [(0, int(given["-n"]))]
print(json.dumps([{"n_prompt": n, "n_gen": k, "avg_ts": 10.0 + n, "build_commit": "0000000"}
                  for n, k in rows]))
"""
_WORKER = """
import socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with socket.create_server((given["-H"], int(given["-p"]))) as server:
    while True:
        server.accept()[0].close()
"""


def write(folder: Path, *, worker: bool = True) -> Path:
    """llama-bench and, with `worker`, ggml-rpc-server in `folder`, which is returned."""
    folder.mkdir()
    for name, text in (("llama-bench", _BENCH), ("ggml-rpc-server", _WORKER))[:1 + worker]:
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)
    return folder
