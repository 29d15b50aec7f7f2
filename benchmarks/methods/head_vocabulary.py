"""What a smaller vocabulary saves a model's own head, and what it cannot propose.

    python -m benchmarks.methods.head_vocabulary [--width 2048] [--vocabulary 248320]

Times of a head with random weights in Q8_0 (a qwen35 layer), and the share of tokens in recorded
answers of SmolLM2 that are among the first ids of its vocabulary, or in the text so far.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
from msgspec import structs

from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.backends.llamacpp.head import LlamaHead
from pipeinfer.core.types import make_rows
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.head_file import HeadSource, SmallVocabulary

_OPTIONS = LlamaOptions(head="mtp", keep_order=False, layer_callbacks=False, huge_pages=False,
                        type_k="f16", type_v="f16", flash_attn="off")
_SIZES = {"n_ctx": 1024, "n_seq_max": 4, "n_batch": 256}
_TEXTS = (Path(__file__).parents[1] / "paper" / name
          for name in ("texts-smollm2.npz", "texts-smollm2-paper.npz"))


def timed(model: ModelFile, size: int, threads: int) -> str:
    """Return a row of the table for a head of so many tokens, 0: all."""
    small, process = SmallVocabulary.of(model, size), psutil.Process()
    before = process.memory_info().rss
    head = LlamaHead.open(HeadSource(model, small), model.n_layers, _SIZES, threads,
                          structs.replace(_OPTIONS, repack="off") if small else _OPTIONS)
    resident = process.memory_info().rss - before
    row, seconds = np.ones((1, model.n_embd), np.float32), []
    for k in range(60):
        batch = make_rows([(k * 7919 % model.n_vocab, k, (0,), True)])
        start = time.perf_counter()
        head.decode(batch, row)
        seconds.append(time.perf_counter() - start)
    head.close()
    return (f"| {size or model.n_vocab} | {1e3 * np.median(seconds):.1f} "
            f"({1e3 * min(seconds):.1f}) | {resident / 1e6:.0f} |")


def covered(share: float) -> dict[str, tuple[float, float]]:
    """Return by kind of text the share of tokens among that share of a vocabulary of 49,152, and
    with those of the text so far."""
    found: dict[str, list[tuple[bool, bool]]] = {}
    for path in _TEXTS:
        texts = np.load(path, allow_pickle=False)
        for i, kind in enumerate(texts["kinds"].tolist()):
            seen = set(texts[f"prompt{i}"].tolist())
            for token in texts[f"answer{i}"].tolist():
                low = token < 49152 * share
                found.setdefault(kind, []).append((low, low or token in seen))
                seen.add(token)
    return {kind: tuple(np.mean(had, axis=0).round(3).tolist()) for kind, had in found.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=248320)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = ModelFile(write_random_model(Path(folder) / "model.gguf", tiny(
            "qwen35-mtp", qtype="Q8_0", n_embd=given.width, n_vocab=given.vocabulary,
            n_ff=3 * given.width)))
        for size in (16384, 32768, 65536, 0):
            print(timed(model, size, given.threads), flush=True)
    print(covered(32768 / 151552))


if __name__ == "__main__":
    main()
