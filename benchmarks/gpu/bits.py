"""Whether a row's logits depend on what is decoded beside it, and on cells that it does not see.

    python -m benchmarks.gpu.bits MODEL --gpu-layers 99 --options '[{}, {"flash_attn": "off"}]'

Prints a JSON object per question. Every comparison is of whole rows of logits, bit for bit, with a
plain loop's single rows; `largest` is the largest difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.backends.llamacpp.padded import PaddedBackend, holds
from pipeinfer.core.types import ALL_SEQS, END, FloatArray, make_rows
from pipeinfer.models.locate import open_model
from pipeinfer.models.shard import extract_shard

Loaded = TypeVar("Loaded", bound=LlamaCppBackend)
_WIDTHS = (2, 4, 8, 16)
_SECONDS = 15.0  #: after which no further width is tried on a slow device
_BLOCK = 256  #: cells by which llama.cpp's n_kv grows


def say(what: str, **found: Any) -> None:
    """Print what was found."""
    print(json.dumps({"what": what, **found}), flush=True)


def compared(found: FloatArray, wanted: FloatArray) -> dict[str, Any]:
    """How many rows are equal, of how many, and by how much the others differ."""
    same = [bool(np.array_equal(a, b)) for a, b in zip(found, wanted, strict=True)]
    return {"equal": sum(same), "of": len(same), "largest": float(np.abs(found - wanted).max()),
            "choices": int((found.argmax(1) == wanted.argmax(1)).sum())}


class Trial:
    """One model with one set of options, and the tokens that all questions use."""

    def __init__(self, path: Path, n_gpu_layers: int, options: dict[str, Any]) -> None:
        self.path, self.n_gpu_layers, self.options = path, n_gpu_layers, options
        self.n_layers = open_model(path).n_layers
        self.tokens = np.random.default_rng(3).integers(3, 1000, 700).tolist()

    def load(self, start: int = 0, stop: int | None = None, n_ctx: int = 512,
             kind: type[Loaded] = LlamaCppBackend, **more: Any) -> Loaded:
        """Layers [start, stop) as a backend."""
        stop = self.n_layers if stop is None else stop
        whole = (start, stop) == (0, self.n_layers)
        path = self.path if whole else extract_shard(open_model(self.path), start, stop)
        return kind.load(
            path, layers=(start, stop), n_layers_total=self.n_layers, first=start == 0,
            last=stop == self.n_layers, n_ctx=n_ctx, n_seq_max=4, n_batch=64, n_threads=2,
            options=LlamaOptions(n_gpu_layers=self.n_gpu_layers, **self.options, **more))

    def one_by_one(self, backend: LlamaCppBackend, start: int, stop: int, seq_id: int = 0,
                   ask: Callable[[], bool] | None = None) -> FloatArray:
        """Tokens [start, stop) decoded alone, each behind the one before."""
        return np.concatenate([
            decoded(backend, [(self.tokens[i], i, (seq_id,), True)], ask)
            for i in range(start, stop)])


def decoded(backend: Backend, rows: Sequence[tuple[Any, ...]],
            ask: Callable[[], bool] | None = None) -> FloatArray:
    """Logits of these rows."""
    found = backend.decode(make_rows(rows), None, ask)
    assert found is not None
    return found.copy()


def unpadded(trial: Trial) -> None:
    """R; whether the same decode gives the same bits; holes, n_kv, other sequences, a stop."""
    backend = trial.load()
    kinds = {"type_k": backend.options.type_k, "flash_attn": backend.options.flash_attn}
    started = time.monotonic()
    say("width", R=exact_width(backend, 16), seconds=round(time.monotonic() - started, 1), **kinds)
    base = trial.one_by_one(backend, 0, 50)
    backend.seq_rm(ALL_SEQS, 0, END)
    say("the same again", **compared(trial.one_by_one(backend, 0, 50), base))
    backend.seq_rm(ALL_SEQS, 0, END)
    armed = trial.one_by_one(backend, 0, 20, ask=lambda: False)
    say("asked whether to stop", **compared(armed, base[:20]))
    backend.seq_rm(ALL_SEQS, 0, END)
    # a wrong branch of three cells, then the right path, then the branch goes
    trial.one_by_one(backend, 0, 30)
    backend.seq_cp(0, 1, 0, 30)
    decoded(backend, [(7 + i, 30 + i, (1,), True) for i in range(3)])
    first = trial.one_by_one(backend, 30, 31)
    backend.seq_rm(1, 0, END)
    say("a hole of three cells",
        **compared(np.concatenate([first, trial.one_by_one(backend, 31, 50)]), base[30:]))
    backend.close()
    backend = trial.load(n_ctx=1024)
    for part in range(5):
        decoded(backend, [(5 + j, 60 * part + j, (1,), False) for j in range(59)]
                + [(5, 60 * part + 59, (1,), True)])
    say("300 cells of another sequence",
        **compared(trial.one_by_one(backend, 0, 50), base))
    backend.close()


def cut(trial: Trial) -> None:
    """Two shards against the whole, and a decode that is stopped inside."""
    whole = trial.load()
    base = trial.one_by_one(whole, 0, 20)
    whole.close()
    middle = trial.n_layers // 2
    first, last = trial.load(0, middle), trial.load(middle)
    found = []
    for i in range(20):
        rows = make_rows([(trial.tokens[i], i, (0,), True)])
        hidden = first.decode(rows)
        logits = last.decode(rows, hidden)
        assert logits is not None
        found.append(logits.copy())
    say("two shards", **compared(np.concatenate(found), base))
    rows = make_rows([(trial.tokens[20], 20, (0,), True)])
    say("stopped inside", stopped=first.decode(rows, None, lambda: True) is None)
    first.close()
    last.close()


def padded(trial: Trial, start: int) -> None:
    """Chains of W rows against single rows that are padded to W with rows of a spare sequence,
    behind `start` tokens: a chain, one whose second half was wrong, and beside other cells."""
    backend = trial.load(keep_order=False)

    def pad(real: list[tuple[Any, ...]], width: int, dummy: int) -> FloatArray:
        rows = real + [(dummy + j, j, (1,), True) for j in range(width - len(real))]
        found = decoded(backend, rows)[: len(real)]
        backend.seq_rm(1, 0, END)
        return found

    def begin(beside: int) -> None:
        backend.seq_rm(ALL_SEQS, 0, END)
        for at in range(0, beside, 60):
            decoded(backend, [(9, at + j, (2,), j == 59) for j in range(60)])
        for at in range(0, start, 50):
            count = min(50, start - at)
            decoded(backend, [(t, at + j, (0,), j == count - 1)
                              for j, t in enumerate(trial.tokens[at : at + count])])

    tokens = trial.tokens[start:]
    for width in _WIDTHS:
        chain = [(tokens[i], start + i, (0,), True) for i in range(width)]
        half = width // 2
        begin(0)
        single = np.concatenate([pad([row], width, 7 * i + 3) for i, row in enumerate(chain)])
        backend.seq_rm(0, start, END)
        found: dict[str, Any] = {"neighbours": compared(pad([chain[0]], width, 300), single[:1])}
        backend.seq_rm(0, start, END)
        found["chain"] = compared(decoded(backend, chain), single)
        backend.seq_rm(0, start, END)
        wrong = [row if i < half else (9, *row[1:]) for i, row in enumerate(chain)]
        before = decoded(backend, wrong)[:half]
        backend.seq_rm(0, start + half, END)
        behind = pad(chain[half:], width, 11)
        found["after a miss"] = compared(np.concatenate([before, behind]), single)
        begin(120)
        found["beside another sequence"] = compared(decoded(backend, chain), single)
        block = any((start + i + width - 1) // _BLOCK != (start + width - 1) // _BLOCK
                    for i in range(width))
        say("padded", width=width, behind=start, crosses_block=block, **found)
    backend.close()


def streams(trial: Trial) -> None:
    """What a stage asks at its first load: rows padded with the same sequence's, in a part of the
    cache of its own."""
    backend = trial.load(n_ctx=4096, kind=PaddedBackend, streams=True)
    started = time.monotonic()
    for width in _WIDTHS:
        if time.monotonic() < started + _SECONDS:
            say("streams", width=width, holds=holds(backend, width))
    backend.close()


def main() -> None:
    """Ask every question for every set of options; one that fails is said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpu-layers", type=int, default=99)
    parser.add_argument("--options", default="[{}]")
    given = parser.parse_args()
    for options in json.loads(given.options):
        trial = Trial(given.model, given.gpu_layers, options)
        say("options", model=given.model.name, **options)
        for question in (unpadded, cut, lambda t: padded(t, 40), lambda t: padded(t, 250), streams):
            try:
                question(trial)
            except Exception as error:
                say("error", of=getattr(question, "__name__", "padded"),
                    text=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
