"""What a decode takes on the prebuilt llama.cpp and on a compiled one, where both are installed.

    python -m benchmarks.kernels.libraries [--rounds 3]

One thread, two layers 2,048 wide, random weights; milliseconds, the least of rounds that alternate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.lab.random_model import RandomSpec, write_random_model
from pipeinfer.llama.library import llama_kernels, llama_version

ROWS = (1, 4, 16, 64)
TYPES = ("Q8_0", "Q4_K_M", "Q4_0", "F16")


def times(path: Path) -> dict[int, float]:
    """Rows -> least milliseconds of a decode, on this process's library."""
    backend = LlamaCppBackend.load(path, layers=(0, 2), n_layers_total=2, first=True, last=True,
                                   n_ctx=512, n_seq_max=2, n_batch=64, n_threads=1)
    found = {}
    for rows in ROWS:
        batch = make_rows([(7, i, (0,), i == rows - 1) for i in range(rows)])
        taken = []
        for _ in range(6):
            start = time.perf_counter()
            backend.decode(batch)
            taken.append(time.perf_counter() - start)
            backend.seq_rm(ALL_SEQS, 0, END)
        found[rows] = 1e3 * min(taken)
    return found


@click.command()
@click.option("--rounds", default=3)
@click.option("--one", type=click.Path(path_type=Path), hidden=True)
def main(rounds: int, one: Path | None) -> None:
    """Print a line per type of weights and library."""
    if one is not None:
        print(json.dumps({"library": f"{llama_version()} ({llama_kernels()})", "ms": times(one)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        for qtype in TYPES:
            path = write_random_model(Path(folder) / f"{qtype}.gguf", RandomSpec(
                n_layer=2, n_embd=2048, n_head=16, n_head_kv=4, n_ff=5632, qtype=qtype))
            best: dict[str, dict[str, float]] = {}
            for choice in ("prebuilt", "native") * rounds:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.kernels.libraries", "--one", str(path)],
                    env=os.environ | {"PIPEINFER_LLAMA": choice}, check=True,
                    stdout=subprocess.PIPE, text=True)
                answer = json.loads(done.stdout)
                least = best.setdefault(answer["library"], answer["ms"])
                least |= {rows: min(ms, least[rows]) for rows, ms in answer["ms"].items()}
            for library, least in best.items():
                figures = ", ".join(f"{rows} rows {ms:.1f}" for rows, ms in least.items())
                print(f"{qtype}: {figures}  {library}", flush=True)


if __name__ == "__main__":
    main()
