"""What one environment computes and how fast; run in a process that has the environment.

    python -m benchmarks.portability.measure llamacpp|torch FOLDER      prints JSON
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.core.sampling import choose, noise_key
from pipeinfer.core.types import ALL_SEQS, CURVE_ROWS, END, SamplingParams, make_rows
from pipeinfer.lab.random_model import RandomSpec, write_random_model
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer

EMBEDDED = Path(__file__).resolve().parents[2] / "pipeinfer" / "models" / "embedded"
PAIR = {f"embedded {name}": EMBEDDED / f"{name}.gguf" for name in ("target", "draft")}
#: types of the random models; llama.cpp's own mix stands for Q4_K
TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
COUNT = 64
_PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n",
            "for i in range(10):\n    print(i)\n")
_ROUNDS = 15


def write_models(folder: Path) -> None:
    """The random models, once: the types are rounded by whichever library writes them."""
    for qtype in TYPES:
        path = folder / f"{qtype}.gguf"
        if not path.exists():
            write_random_model(path, RandomSpec(n_layer=4, n_embd=1024, n_head=8, n_head_kv=4,
                                                n_ff=2816, qtype=qtype))


def load(kind: str, path: Path, dtype: str = "float32") -> Backend:
    """The whole model on one thread."""
    n = ModelFile(path).n_layers
    sizes: dict[str, Any] = {"layers": (0, n), "n_ctx": 512, "n_seq_max": 4, "n_batch": 64,
                             "n_threads": 1}
    if kind == "llamacpp":
        from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
        return LlamaCppBackend.load(path, n_layers_total=n, first=True, last=True, **sizes)
    from pipeinfer.backends.pytorch.backend import TorchBackend
    from pipeinfer.backends.pytorch.options import TorchOptions
    return TorchBackend.load(path, options=TorchOptions("cpu", dtype), **sizes)


def milliseconds(backend: Backend) -> dict[int, float]:
    """Rows -> least milliseconds of a decode behind 64 tokens; widths in turn, so that a busy
    moment does not meet one width alone."""
    backend.decode(make_rows([(5 + i, i, (0,), False) for i in range(64)]))
    least: dict[int, float] = {}
    for _ in range(_ROUNDS):
        for width in (1, *CURVE_ROWS):
            start = time.perf_counter()
            backend.decode(make_rows([(7, 64 + i, (0,), True) for i in range(width)]))
            taken = 1e3 * (time.perf_counter() - start)
            backend.seq_rm(0, 64, END)
            least[width] = min(taken, least.get(width, taken))
    backend.seq_rm(ALL_SEQS, 0, END)
    return least


def greedy(backend: Backend, prompt: list[int]) -> list[int]:
    """COUNT tokens, one row at a time."""
    logits = backend.decode(make_rows(
        [(token, i, (0,), i == len(prompt) - 1) for i, token in enumerate(prompt)]))
    found = []
    while True:
        assert logits is not None
        found.append(int(logits[0].argmax()))
        if len(found) == COUNT:
            backend.seq_rm(ALL_SEQS, 0, END)
            return found
        logits = backend.decode(make_rows([(found[-1], len(prompt) + len(found) - 1, (0,), True)]))


def model(kind: str, path: Path, dtype: str = "float32") -> dict[str, Any]:
    """R, times by rows, greedy tokens of each prompt."""
    backend = load(kind, path, dtype)
    tokenizer = open_tokenizer(path)
    try:
        return {"exact_width": exact_width(backend), "ms": milliseconds(backend),
                "tokens": [greedy(backend, tokenizer.encode(prompt)) for prompt in _PROMPTS]}
    finally:
        tokenizer.close()
        backend.close()


def sampled() -> str:
    """A digest of choices from the same logits: numpy's own kernels differ by processor, too."""
    rng = np.random.default_rng(0)
    params = SamplingParams(0.8, top_k=40, top_p=0.95, min_p=0.05, key=noise_key(3))
    digest = hashlib.blake2b(digest_size=8)
    for position in range(2000):
        logits = rng.normal(0, 3, 512).astype(np.float32)
        choice = choose(logits, params, np.zeros(1, np.int32), position)
        digest.update(int(choice.token).to_bytes(4, "little"))
    return digest.hexdigest()


def main(kind: str, folder: Path) -> None:
    """Print everything about this process's environment as one JSON object."""
    found: dict[str, Any] = {"sampled": sampled()}
    if kind == "llamacpp":
        from pipeinfer.llama.library import llama_identity, llama_kernels
        found |= {"identity": llama_identity(), "kernels": llama_kernels()}
        files = PAIR | {qtype: folder / f"{qtype}.gguf" for qtype in TYPES}
        found["models"] = {name: model(kind, path) for name, path in files.items()}
    else:
        import torch
        found |= {"identity": f"torch {torch.__version__}",
                  "kernels": torch.backends.cpu.get_cpu_capability()}
        found["models"] = {f"{name}, {dtype}": model(kind, path, dtype)
                           for name, path in PAIR.items() for dtype in ("float32", "bfloat16")}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
