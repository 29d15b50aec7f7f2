"""Whether llama.cpp gives rows that come as embeddings the bits of rows that come as tokens.

    python -m benchmarks.kernels.embedding_rows MODEL.gguf

BiTA's masks are no tokens of the vocabulary, and a batch of llama.cpp has either tokens or
embeddings: with masks beside them, all rows of a step would have to be embeddings. Also: whether
a row keeps its bits when masks that see it stand in its run under a sequence id of their own.
"""

from __future__ import annotations

from pathlib import Path

import click
import gguf
import numpy as np
from numpy.typing import NDArray

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.models.gguf import ModelFile

ROWS, MASKS = 64, 3


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
def main(model: Path) -> None:
    """Print how many rows have equal bits, by width of the run."""
    file = ModelFile(model)
    table = next(t for t in gguf.GGUFReader(model).tensors if t.name == "token_embd.weight")
    embedding = gguf.quants.dequantize(table.data, table.tensor_type).astype(np.float32)
    backend = LlamaCppBackend.load(
        model, layers=(0, file.n_layers), n_layers_total=file.n_layers, first=True, last=True,
        n_ctx=512, n_seq_max=2, n_batch=64, n_threads=1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, len(embedding) - 10, ROWS)

    def logits(width: int, *, given: bool) -> NDArray[np.float32]:
        backend.seq_rm(ALL_SEQS, 0, END)
        found = []
        for at in range(0, ROWS, width):
            part = tokens[at : at + width]
            rows = make_rows([(int(t), at + i, (0, 1), True) for i, t in enumerate(part)])
            out = backend.decode(rows, embedding[part] if given else None)
            assert out is not None
            found.append(out.copy())
        return np.concatenate(found)

    for width in (1, 2, 4, 8, 16):
        one, other = logits(width, given=False), logits(width, given=True)
        click.echo(f"runs of {width}: {int((one == other).all(1).sum())} of {ROWS} rows equal, "
                   f"most {float(np.abs(one - other).max()):.2g} of a spread of {one.std():.2g}")
    alone = logits(1, given=False)[-1]
    backend.seq_rm(ALL_SEQS, ROWS - 1, END)
    masks = rng.normal(0, embedding.std(), (MASKS, embedding.shape[1])).astype(np.float32)
    beside = backend.decode(
        make_rows([(int(tokens[-1]), ROWS - 1, (0, 1), True),
                   *((0, ROWS + k, (1,), True) for k in range(MASKS))]),
        np.concatenate([embedding[tokens[-1:]], masks]))
    assert beside is not None
    click.echo(f"beside {MASKS} masks: {'equal' if (beside[0] == alone).all() else 'differs'}")
    backend.close()


if __name__ == "__main__":
    main()
