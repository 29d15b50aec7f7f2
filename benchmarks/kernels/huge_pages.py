"""What a token costs with weights mapped from the file and with weights in huge pages, in turn.

    python -m benchmarks.kernels.huge_pages MODEL.gguf [--rounds 9] [--threads 2]

Two backends of the file take turns at single rows. Medians, seconds of loading (the file is read
once before), and how much of this process lies in huge pages afterwards.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend, LlamaOptions
from pipeinfer.core.types import END, make_rows
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.gguf import ModelFile

_ROWS = 4  #: rows of a turn; the first finds the other's weights in the caches and is left out


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(model: Path, threads: int, rounds: int) -> None:
    """See above."""
    click.echo(llama_identity())
    with model.open("rb") as file:
        while file.read(1 << 24):
            pass
    opened, loading = {}, {}
    for way, huge in (("mapped", False), ("huge pages", True)):
        begin = time.perf_counter()
        opened[way] = _open(model, huge, threads)
        opened[way].decode(make_rows([(1, 0, (0,), True)]))  # what is mapped is read by now
        loading[way] = time.perf_counter() - begin
    seconds: dict[str, list[float]] = {way: [] for way in opened}
    for turn in range(rounds):
        for way in sorted(opened, reverse=bool(turn % 2)):
            backend = opened[way]
            for row in range(_ROWS):
                begin = time.perf_counter()
                backend.decode(make_rows([(2, 1 + row, (0,), True)]))
                if row:
                    seconds[way].append(time.perf_counter() - begin)
            backend.seq_rm(0, 1, END)
    for way, found in seconds.items():
        quarter = statistics.quantiles(found, n=4)
        click.echo(f"{way}: {1e3 * statistics.median(found):.2f} ms of a row ("
                   f"{1e3 * quarter[0]:.2f} to {1e3 * quarter[2]:.2f}), "
                   f"{loading[way]:.2f} s until the first row")
    click.echo(_memory())
    for backend in opened.values():
        backend.close()


def _memory() -> str:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    kinds = {line.split()[0][:-1]: int(line.split()[1]) >> 10 for line in lines[1:]}
    return ", ".join(f"{name} {kinds.get(name, 0)} MiB"
                     for name in ("Rss", "AnonHugePages", "FilePmdMapped"))


def _open(model: Path, huge: bool, threads: int) -> LlamaCppBackend:
    n = ModelFile(model).n_layers
    return LlamaCppBackend.load(
        model, layers=(0, n), n_layers_total=n, first=True, last=True, n_ctx=256, n_seq_max=2,
        n_batch=64, n_threads=threads, options=LlamaOptions(repack="off", huge_pages=huge))


if __name__ == "__main__":
    main()
