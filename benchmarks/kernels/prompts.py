"""Speed of a prompt in chunks, behind a text, and a hash of its last row's logits.

    python -m benchmarks.kernels.prompts MODEL.gguf [--tokens 512] [--behind 0] [--threads 2]

Run it by two checkouts in turn: equal hashes are equal bits.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import click
import numpy as np

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend, LlamaOptions
from pipeinfer.core.types import END, make_rows
from pipeinfer.models.gguf import ModelFile


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--tokens", default=512, show_default=True)
@click.option("--behind", default=0, show_default=True, help="Tokens before the prompt.")
@click.option("--chunk", default=64, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="The fastest one counts.")
def main(model: Path, tokens: int, behind: int, chunk: int, threads: int, rounds: int) -> None:
    """See above."""
    file, end = ModelFile(model), behind + tokens
    backend = LlamaCppBackend.load(
        model, layers=(0, file.n_layers), n_layers_total=file.n_layers, first=True, last=True,
        n_ctx=end + 64, n_seq_max=1, n_batch=chunk, n_threads=threads, options=LlamaOptions())
    text = [int(token) for token in np.random.default_rng(1).integers(0, backend.info.n_vocab, end)]

    def read(first: int, until: int) -> bytes:
        for at in range(first, until, chunk):
            out = backend.decode(make_rows([
                (text[i], i, (0,), i == end - 1) for i in range(at, min(at + chunk, until))]))
        return np.ascontiguousarray(out).tobytes()

    if behind:
        read(0, behind)
    found = []
    for _ in range(rounds):
        backend.seq_rm(0, behind, END)
        processor, wall = time.process_time(), time.perf_counter()
        logits = read(behind, end)
        found.append((time.perf_counter() - wall, time.process_time() - processor))
    click.echo(f"{tokens / min(found)[0]:.1f} tokens/s, {tokens / min(found)[1]:.1f} a second of "
               f"the processor; logits {hashlib.sha256(logits).hexdigest()[:12]}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.kernels.prompts")
