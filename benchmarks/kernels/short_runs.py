"""What runs of few rows cost by `short_runs.c` and by llama.cpp's own kernels, in one process.

    python -m benchmarks.kernels.short_runs MODEL.gguf [--widths 1,2,4,8,16] [--context 1024]

Two contexts take turns: pipeinfer's choice, and weights repacked as llama.cpp does by default with
all products left to it. Medians, and R of both.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import numpy as np

from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend, LlamaOptions
from pipeinfer.core.types import END, make_rows
from pipeinfer.llama import short_runs
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.repacking import may_repack

_PIECE = 64  #: tokens of the prompt that are decoded at a time


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--widths", default="1,2,3,4,6,8,16", show_default=True, help="Rows of a run.")
@click.option("--context", default=96, show_default=True, help="Tokens before the rows.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(model: Path, widths: str, context: int, threads: int, rounds: int) -> None:
    """See above."""
    counts = [int(width) for width in widths.split(",")]
    click.echo(llama_identity())
    ways = {"ours": short_runs.MOST_ROWS, "llama.cpp's": 0}
    opened = {way: _open(model, way == "ours", context, threads) for way in ways}
    seconds: dict[tuple[str, int], list[float]] = {
        (way, count): [] for way in ways for count in counts}
    rng = np.random.default_rng(1)
    vocabulary = opened["ours"].info.n_vocab
    exact: dict[str, int] = {}
    prompts: dict[str, float] = {}
    for way, backend in opened.items():
        short_runs.limit(ways[way])
        exact[way] = exact_width(backend)
        prompt = [(int(t), i, (0,), False) for i, t in enumerate(
            rng.integers(0, vocabulary, context))]
        begin = time.perf_counter()
        for i in range(0, context, _PIECE):
            backend.decode(make_rows(prompt[i : i + _PIECE]))
        prompts[way] = context / (time.perf_counter() - begin)
    for turn in range(rounds):
        for count in counts:
            for way in sorted(ways, reverse=bool(turn % 2)):
                short_runs.limit(ways[way])
                for again in range(2):  # the first finds other weights in the caches
                    rows = make_rows([(int(rng.integers(vocabulary)), context + i, (0,), True)
                                      for i in range(count)])
                    begin = time.perf_counter()
                    opened[way].decode(rows)
                    if again:
                        seconds[way, count].append(time.perf_counter() - begin)
                    opened[way].seq_rm(0, context, END)
    for way, backend in opened.items():
        shown = ", ".join(f"{count}: {1e3 * statistics.median(seconds[way, count]):.1f}"
                          for count in counts)
        click.echo(f"{way}: R {exact[way]}, ms of a run by rows {shown}; "
                   f"{prompts[way]:.0f} tokens/s of the prompt")
        backend.close()


def _open(model: Path, ours: bool, context: int, threads: int) -> LlamaCppBackend:
    file = ModelFile(model)
    n, repack = file.n_layers, "on" if not ours or may_repack(file) else "off"
    return LlamaCppBackend.load(
        model, layers=(0, n), n_layers_total=n, first=True, last=True, n_ctx=context + 160,
        n_seq_max=2, n_batch=_PIECE, n_threads=threads, options=LlamaOptions(repack=repack))


if __name__ == "__main__":
    main()
