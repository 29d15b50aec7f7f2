"""How far slices of mixtures of experts are from the whole file, on random models.

    python -m benchmarks.wide.mixtures                 a table in Markdown
    python -m benchmarks.wide.mixtures qwen3moe gpt-oss --tokens 256

Random tokens are fed to plain decoding of the file and of its slices, one row at a time; the
divergence is the mean of KL(file || slices) over all positions, as in `benchmarks.wide.divergence`.
Beside it what f16 instead of q8_0 keys and values make of the very file. Random weights, so sizes
of differences can be compared with each other, and with nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.wide.divergence import scores
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import PlanError
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.gguf import ModelFile
from tests.rig.plain_loop import PlainLoop
from tests.rig.sliced_loop import SlicedLoop

CASES = (
    ("qwen3moe", "F32", 192), ("qwen3moe", "Q8_0", 192), ("qwen3moe", "Q8_0", 64),
    ("gpt-oss", "MXFP4", 192), ("glm4moe", "Q8_0", 192), ("granitemoe", "Q8_0", 192),
    ("deepseek2", "Q8_0", 192), ("llama4", "Q8_0", 192), ("gemma4", "Q8_0", 192),
)
CUTS = ((1.0, 1.0), (3.0, 2.0, 1.0), (1.0, 1.0, 1.0, 1.0))
_HEADER = ("architecture, type, columns of an expert", "f16 keys and values", "2 slices",
           "3 unequal", "4 slices")


def compared(file: FloatArray, other: FloatArray) -> str:
    """The divergence in nats per token, and how often the likeliest token is the same."""
    nats = (np.exp(file) * (file - other)).sum(axis=1).mean()
    return f"{max(nats, 0.0):.1e}, {(file.argmax(axis=1) == other.argmax(axis=1)).mean():.0%}"


def row_of(name: str, qtype: str, columns: int, count: int, folder: Path) -> list[str]:
    """The row of one model."""
    spec = tiny(name, qtype=qtype, expert_ff=columns, n_ff=192, n_head=8, n_head_kv=4)
    path = write_random_model(folder / f"{name}-{qtype}-{columns}.gguf", spec)
    text = np.random.default_rng(7).integers(0, spec.n_vocab, count).tolist()
    n_layers = ModelFile(path).n_layers
    file = scores(PlainLoop(path, n_ctx=512), text)
    cells = [f"{name}, {qtype}, {columns}",
             compared(file, scores(PlainLoop(path, n_ctx=512, type_k=1, type_v=1, flash=0), text))]
    for shares in CUTS:
        try:
            loop = SlicedLoop(path, [n_layers], [shares], n_ctx=512, cache_dir=folder)
        except PlanError:
            cells.append("not possible")
            continue
        cells.append(compared(file, scores(loop, text)))
    return cells


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tokens", default=192, show_default=True)
def main(names: Sequence[str], tokens: int) -> None:
    """Measure."""
    for cells in (_HEADER, ["---"] * len(_HEADER)):
        print(f"| {' | '.join(cells)} |")
    with tempfile.TemporaryDirectory() as place:
        for name, qtype, columns in CASES:
            if not names or name in names:
                cells = row_of(name, qtype, columns, tokens, Path(place))
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
