"""The torch backend on a device: python -m benchmarks.gpu.torch_check --device cuda

R by data type and tile, what rows cost, tokens per second of a plain loop, and every policy's text
against that loop. Prints a JSON object per question.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bits import compared, decoded, say
from pipeinfer.backends.exact_width import curve_of, exact_width
from pipeinfer.backends.pytorch.backend import TorchBackend
from pipeinfer.backends.pytorch.options import TorchOptions
from pipeinfer.core.types import ALL_SEQS, CURVE_ROWS, END
from pipeinfer.models.locate import EMBEDDED

MODEL = EMBEDDED / "target.gguf"


def load(device: str, dtype: str, tile: int | None = None) -> TorchBackend:
    """The embedded target."""
    return TorchBackend.load(MODEL, n_ctx=512, n_seq_max=4, n_batch=64, n_threads=1,
                             options=TorchOptions(device, dtype, tile))


def plain_tokens(backend: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, one row at a time behind a prompt in one piece."""
    path = list(prompt)
    logits = decoded(backend, [(t, i, (0,), i == len(path) - 1) for i, t in enumerate(path)])
    while len(path) < len(prompt) + count:
        path.append(int(logits[0].argmax()))
        logits = decoded(backend, [(path[-1], len(path) - 1, (0,), True)])
    backend.seq_rm(ALL_SEQS, 0, END)
    return path[len(prompt):]


def rows(device: str, dtype: str, tile: int | None) -> None:
    """One kind of arithmetic."""
    backend = load(device, dtype, tile)
    started = time.monotonic()
    width = exact_width(backend, 16)
    say("torch width", dtype=dtype, tile=backend.options.tile, R=width,
        seconds=round(time.monotonic() - started, 1),
        curve=dict(zip(map(str, CURVE_ROWS), curve_of(backend), strict=True)))
    prompt = np.random.default_rng(5).integers(3, 1000, 40).tolist()
    plain_tokens(backend, prompt, 8)
    started = time.monotonic()
    first = plain_tokens(backend, prompt, 96)
    say("torch speed", dtype=dtype, tile=backend.options.tile,
        tokens_per_second=96 / (time.monotonic() - started))
    say("torch again", dtype=dtype, same=plain_tokens(backend, prompt, 96) == first)
    # a hole of three cells, as in benchmarks.gpu.bits
    chain = [(t, i, (0,), True) for i, t in enumerate(prompt)]
    base = np.concatenate([decoded(backend, [row]) for row in chain])
    backend.seq_rm(ALL_SEQS, 0, END)
    for row in chain[:30]:
        decoded(backend, [row])
    backend.seq_cp(0, 1, 0, 30)
    decoded(backend, [(7 + i, 30 + i, (1,), True) for i in range(3)])
    found = [decoded(backend, [chain[30]])]
    backend.seq_rm(1, 0, END)
    found += [decoded(backend, [row]) for row in chain[31:]]
    say("torch hole", dtype=dtype, **compared(np.concatenate(found), base[30:]))
    backend.close()


def main() -> None:
    """Ask every question; one that fails is said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.set_num_threads(2)
    say("torch", version=torch.__version__, device=device,
        name=torch.cuda.get_device_name() if device == "cuda" else "processor")
    kinds: tuple[tuple[str, int | None], ...] = (("float32", None), ("bfloat16", None))
    if device == "cuda":
        kinds += (("bfloat16", 0), ("float32", 0), ("bfloat16", 8), ("bfloat16", 64))
    for dtype, tile in kinds:
        try:
            rows(device, dtype, tile)
        except Exception as error:
            say("error", of=f"{dtype}, tile {tile}",
                text=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
