"""What lies between two decodes of one rank that guesses nothing, and what a decode takes.

    python -m benchmarks.kernels.between MODEL.gguf [--tokens 200] [--rounds 4] [--threads 2]

From the end of one `llama_decode` of a single row to the beginning of the next: logits, the choice,
the scheduler, the text, the next row. Milliseconds per token: median, and the mean.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click

from pipeinfer.backends.llamacpp import backend
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.config import JobConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.llama.library import llama_identity

_PROMPT = "def fibonacci(n):\n"
_N_CTX = 1024


class Clock:
    """`llama_decode` with a clock: seconds of decodes of one row, and from one to the next."""

    def __init__(self) -> None:
        self.decodes: list[float] = []
        self.gaps: list[float] = []
        self._decode = backend.binding.llama_decode
        self._ended = 0.0

    def __call__(self, context: Any, batch: Any) -> int:
        """As the function itself."""
        start = time.perf_counter()
        status = int(self._decode(context, batch))
        end = time.perf_counter()
        if batch.n_tokens == 1:
            self.decodes.append(end - start)
            if self._ended:
                self.gaps.append(start - self._ended)
        self._ended = end if batch.n_tokens == 1 else 0.0
        return status


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--tokens", default=200, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(model: Path, tokens: int, rounds: int, threads: int) -> None:
    """See above."""
    click.echo(llama_identity())
    config = JobConfig.of(model=str(model), ctx=_N_CTX, threads=threads, policy="iterative")
    with join(config).lead() as session:
        prompt = session.tokenizer.encode(_PROMPT)
        run_request(session, prompt, SamplingParams(), 16, ignore_eos=True)  # everything is loaded
        clock = backend.binding.llama_decode = Clock()
        for _ in range(rounds):
            run_request(session, prompt, SamplingParams(), tokens, ignore_eos=True)
    for name, seconds in (("a decode", clock.decodes), ("between two", clock.gaps)):
        click.echo(f"{name}: {1e3 * statistics.median(seconds):.3f} ms, mean "
                   f"{1e3 * statistics.fmean(seconds):.3f} ms, of {len(seconds)}")


if __name__ == "__main__":
    main()
