"""What a decode of several rows costs, by width and threads.

    python -m benchmarks.kernels.rows MODEL.gguf [--threads 1,2] [--cached 64]
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import END, make_rows
from pipeinfer.models.gguf import ModelFile


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--threads", default="1,2")
@click.option("--cached", default=64, help="Tokens in the cache before.")
@click.option("--rounds", default=7)
def main(model: Path, threads: str, cached: int, rounds: int) -> None:
    """Print milliseconds per decode, and relative to one row."""
    n = ModelFile(model).n_layers
    for count in map(int, threads.split(",")):
        backend = LlamaCppBackend.load(model, layers=(0, n), n_layers_total=n, first=True,
                                       last=True, n_ctx=cached + 256, n_seq_max=2, n_batch=64,
                                       n_threads=count)
        for start in range(0, cached, 32):
            backend.decode(make_rows([(5 + i, i, (0,), False)
                                      for i in range(start, min(start + 32, cached))]))
        one = 0.0
        for width in (1, 2, 3, 4, 6, 8, 16):
            times = []
            for _ in range(rounds):
                begin = time.perf_counter()
                backend.decode(make_rows([(7, cached + i, (0,), True) for i in range(width)]))
                times.append(time.perf_counter() - begin)
                backend.seq_rm(0, cached, END)
            cost = statistics.median(times[1:])
            one = one or cost
            print(f"{count} threads, {width:2d} rows: {1e3 * cost:7.2f} ms, x{cost / one:.2f}",
                  flush=True)
        backend.close()


if __name__ == "__main__":
    main()
