"""What choosing a token costs on a model's own logits, in microseconds.

    python -m benchmarks.kernels.choosing MODEL.gguf [--text README.md] [--tokens 120]

For several ways to sample: `choose`, which looks at the tokens that may win, beside the best of the
perturbed scores of all tokens; they must agree. Then what a draft asks after each token, the eight
best and their shares, beside the same from the scores of all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from pipeinfer.core.sampling import best_shares, candidates, choose
from pipeinfer.core.types import FloatArray, SamplingParams
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.locate import open_tokenizer
from tests.rig.launch import ROOT
from tests.rig.plain_loop import PlainLoop

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature 0.8": {"temperature": 0.8},
    "top-k 40": {"temperature": 0.8, "top_k": 40},
    "top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}
_DRAFTED = 8  #: candidates that a draft keeps
_PATH = np.zeros(1, np.int32)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=ROOT / "README.md")
@click.option("--tokens", default=120, show_default=True)
def main(model: Path, text: Path, tokens: int) -> None:
    """See above."""
    click.echo(llama_identity())
    rows = _logits(model, text.read_text(encoding="utf-8"), tokens)
    click.echo(f"{len(rows)} rows of {len(rows[0])} logits, medians")
    for name, values in _WAYS.items():
        params = SamplingParams(**values, key=5)
        quick = [choose(row, params, _PATH, at).token for at, row in enumerate(rows)]
        if quick != [candidates(row, params, _PATH, at).best() for at, row in enumerate(rows)]:
            raise click.ClickException(f"{name}: the choice is not the best of all tokens")
        click.echo(f"{name}: {_median(rows, _chooser(params)):.0f} us, of all tokens "
                   f"{_median(rows, _best(params)):.0f} us")
    for name in ("greedy", "temperature 0.8"):
        params = SamplingParams(**_WAYS[name], key=5)
        click.echo(f"a draft's candidates, {name}: {_median(rows, _ranker(params)):.0f} us, of all "
                   f"tokens {_median(rows, _softmax(params)):.0f} us")


def _logits(model: Path, text: str, tokens: int) -> list[FloatArray]:
    tokenizer = open_tokenizer(model)
    ids = tokenizer.encode(text[: 16 * tokens])[: tokens + 1]
    tokenizer.close()
    loop = PlainLoop(model, n_ctx=max(256, 2 * tokens), n_threads=1)
    rows = [np.array(row, np.float32).reshape(-1) for row in loop.logits_after(ids[:1], ids[1:])]
    loop.close()
    return rows


def _chooser(params: SamplingParams) -> Callable[[FloatArray, int], object]:
    return lambda row, at: choose(row, params, _PATH, at)


def _best(params: SamplingParams) -> Callable[[FloatArray, int], object]:
    return lambda row, at: candidates(row, params, _PATH, at).best()


def _ranker(params: SamplingParams) -> Callable[[FloatArray, int], object]:
    return lambda row, at: best_shares(row, params, _PATH, at, count=_DRAFTED)


def _softmax(params: SamplingParams) -> Callable[[FloatArray, int], object]:
    def ranked(row: FloatArray, at: int) -> object:
        found = candidates(row, params, _PATH, at)
        best = np.argpartition(-found.scores, _DRAFTED)[:_DRAFTED]
        shares = np.exp(found.scores - found.scores.max())
        return found.ids[best], shares[best] / shares.sum()

    return ranked


def _median(rows: Sequence[FloatArray], task: Callable[[FloatArray, int], object]) -> float:
    times = []
    for at, row in enumerate(rows):
        start = time.perf_counter()
        task(row, at)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
