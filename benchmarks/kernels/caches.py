"""What types of keys and values in llama.cpp's cache cost and do, all in one process.

    python -m benchmarks.kernels.caches MODEL.gguf [--depths 96,1024,4096] [--threads 2]
    python -m benchmarks.kernels.caches MODEL.gguf --text FILE      divergence from an f32 cache

Every cache has a context of its own over the same weights; they take turns by blocks of tokens, so
a machine whose speed drifts does so for all. The first is pipeinfer's choice for this library.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.wide.divergence import against, log_probabilities
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend, LlamaOptions
from pipeinfer.core.types import FloatArray, make_rows
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer

_BLOCK = 8  #: tokens of one turn; the first, for which other weights were read last, is not counted
_CHUNK = 64  #: rows of a prompt's decodes
_CACHES = "auto,q8_0/q8_0,q8_0/f16,bf16/f16,f16/f16,f16/f16/off"


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--caches", default=_CACHES, show_default=True,
              help="Keys/values[/flash attention], or auto.")
@click.option("--depths", default="96,1024", show_default=True, help="Tokens in the cache before.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=12, show_default=True)
@click.option("--text", type=click.Path(path_type=Path),
              help="Mean divergence over this text's first tokens instead.")
@click.option("--tokens", default=1024, show_default=True, help="Of the text.")
def main(model: Path, caches: str, depths: str, threads: int, rounds: int, text: Path | None,
         tokens: int) -> None:
    """See above."""
    names = caches.split(",")
    click.echo(llama_identity())
    if text is not None:
        _diverge(model, names, text, tokens, threads)
        return
    for depth in map(int, depths.split(",")):
        _compare(model, names, depth, threads, rounds)


def _open(model: Path, name: str, n_ctx: int, threads: int) -> LlamaCppBackend:
    given: dict[str, Any] = {}
    if name != "auto":
        kinds = name.split("/")
        given = {"type_k": kinds[0], "type_v": kinds[1],
                 "flash_attn": kinds[2] if len(kinds) > 2 else "on"}
    n = ModelFile(model).n_layers
    return LlamaCppBackend.load(model, layers=(0, n), n_layers_total=n, first=True, last=True,
                                n_ctx=n_ctx, n_seq_max=2, n_batch=_CHUNK, n_threads=threads,
                                options=LlamaOptions(**given))


def _compare(model: Path, names: list[str], depth: int, threads: int, rounds: int) -> None:
    """Milliseconds of single rows behind `depth` tokens, and seconds of those."""
    rng = random.Random(1)
    opened = [_open(model, name, depth + _BLOCK * rounds + 8, threads) for name in names]
    vocabulary = opened[0].info.n_vocab
    prompt = [rng.randrange(vocabulary) for _ in range(depth)]
    seconds: list[list[float]] = [[] for _ in opened]
    prefill = []
    for backend in opened:
        begin = time.perf_counter()
        _feed(backend, prompt)
        prefill.append(time.perf_counter() - begin)
    for turn in range(rounds):
        for which in rng.sample(range(len(opened)), len(opened)):
            for i in range(_BLOCK):
                pos = depth + turn * _BLOCK + i
                rows = make_rows([(rng.randrange(vocabulary), pos, (0,), True)])
                begin = time.perf_counter()
                opened[which].decode(rows)
                if i:
                    seconds[which].append(time.perf_counter() - begin)
    first = statistics.median(seconds[0])
    for name, backend, own, before in zip(names, opened, seconds, prefill, strict=True):
        kinds = f"{backend.options.type_k}/{backend.options.type_v}"
        middle = statistics.median(own)
        click.echo(f"{depth} tokens, {name} ({kinds}, flash attention "
                   f"{backend.options.flash_attn}): {1e3 * middle:.2f} ms, x{middle / first:.3f}; "
                   f"prompt {before:.2f} s, x{before / prefill[0]:.2f}")
        backend.close()


def _feed(backend: LlamaCppBackend, tokens: list[int], *, outputs: bool = False) -> FloatArray:
    """Logits float32[n, n_vocab] after all tokens, or after the last one."""
    found = []
    for start in range(0, len(tokens), _CHUNK):
        stop = min(start + _CHUNK, len(tokens))
        logits = backend.decode(make_rows([
            (tokens[i], i, (0,), outputs or i == len(tokens) - 1) for i in range(start, stop)]))
        assert logits is not None
        found.append(logits)
    return np.concatenate(found)


def _diverge(model: Path, names: list[str], text: Path, count: int, threads: int) -> None:
    """Mean over the text of KL(f32 cache without flash attention || this cache), nats."""
    tokenizer = open_tokenizer(model)
    tokens = tokenizer.encode(text.read_text(encoding="utf-8"))[:count]
    tokenizer.close()
    reference: FloatArray | None = None
    for name in ("f32/f32/off", *names):
        backend = _open(model, name, len(tokens) + 8, threads)
        kinds = f"{backend.options.type_k}/{backend.options.type_v}"
        logits = log_probabilities(_feed(backend, tokens, outputs=True))
        backend.close()
        if reference is None:
            reference = logits
            continue
        click.echo(f"{len(tokens)} tokens, {name} ({kinds}): {against(reference, logits)}")


if __name__ == "__main__":
    main()
