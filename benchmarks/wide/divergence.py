"""How far slices of a file are from the file itself: nats per token, by slices and type of sums.

    python -m benchmarks.wide.divergence --model MODEL.gguf --slices 2,4 --tokens 256

A held-out text is fed to plain decoding of the file and of its slices, one row at a time; the
divergence is the mean of KL(file || slices) over its positions. Beside it what other roundings of
the very file make of it: f16 instead of q8_0 keys and values, and prompt chunks of 64 rows.
"""

from __future__ import annotations

import click
import numpy as np

from benchmarks.methods.heldout import prompts
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from tests.kit.plain_loop import PlainLoop
from tests.kit.sliced_loop import SlicedLoop


def scores(loop: PlainLoop, text: list[int], chunk: int = 1) -> FloatArray:
    """Log-probabilities after every `chunk`-th token: float32[n, n_vocab]."""
    loop.reset()
    rows = [loop.decode(text[at:at + chunk], at) for at in range(0, len(text), chunk)]
    loop.close()
    return log_probabilities(np.stack(rows))


def log_probabilities(logits: FloatArray) -> FloatArray:
    """The log-softmax of every row: float64[n, n_vocab]."""
    found = logits.astype(np.float64)
    found -= found.max(axis=1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    return found


def against(file: FloatArray, other: FloatArray) -> str:
    """The divergence, and how often the likeliest token is the same."""
    nats = (np.exp(file) * (file - other)).sum(axis=1)
    same = (file.argmax(axis=1) == other.argmax(axis=1)).mean()
    return f"{nats.mean():.2e} nats per token, likeliest token equal in {same:.1%}"


@click.command()
@click.option("--model", default=str(EMBEDDED / "target.gguf"))
@click.option("--slices", default="2,4", show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--sum-types", default="f32,f16,bf16", show_default=True)
def main(model: str, slices: str, tokens: int, sum_types: str) -> None:
    """Measure."""
    tokenizer = open_tokenizer(model)
    text = next(iter(prompts(tokenizer, 1, tokens)))[:tokens]
    tokenizer.close()
    file = scores(PlainLoop(model), text)
    print(f"{model.rsplit('/', 1)[-1]}, {len(text)} tokens")
    print("f16 keys and values:", against(file, scores(
        PlainLoop(model, type_k=1, type_v=1, flash=0), text)))
    chunked = scores(PlainLoop(model), text, 64)
    print("chunks of 64 rows:", against(file[63::64][:len(chunked)], chunked))
    for count in map(int, slices.split(",")):
        for kind in sum_types.split(","):
            loop = SlicedLoop(model, [ModelFile(model).n_layers], [[1.0] * count], sum_type=kind)
            print(f"{count} slices, sums in {kind}:", against(file, scores(loop, text)),
                  flush=True)


if __name__ == "__main__":
    main()
