"""Whether stages of a model give the bits of all of it: what the tests of splits and the table of
architectures rest on. Knows one process; ranks and messages are tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import FloatArray, Rows, make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import barred, keeps_state
from pipeinfer.models.shard import extract_shard, stage_layers
from tests.kit.llama import load

Cut = list[tuple[int, int]]


def cuts_of(model: ModelFile) -> list[Cut]:
    """At every layer, into three and into single layers, where the model can be cut so."""
    n, (bars, _) = model.n_layers, barred(model)
    cuts = [[(0, k), (k, n)] for k in range(1, n)] + [stage_layers(n, 3), stage_layers(n, n)]
    return [cut for cut in cuts if bars.isdisjoint(cut)]


def script(n_vocab: int, *, branches: bool = True) -> list[Rows | None]:
    """A prompt chunk, single rows, None for a branch, and rows in both branches.

    branches: otherwise one sequence goes on, with a chunk and a single row.
    """
    rng = np.random.default_rng(3)

    def token() -> int:
        return int(rng.integers(0, n_vocab))

    prompt = make_rows([(token(), p, (0,), p == 24) for p in range(25)])
    singles = [make_rows([(token(), 25 + i, (0,), True)]) for i in range(2)]
    if not branches:
        more = make_rows([(token(), 27 + i, (0,), i == 9) for i in range(10)])
        return [prompt, *singles, more, make_rows([(token(), 37, (0,), True)])]
    tree = make_rows(
        [(token(), 27, (0, 1), True), (token(), 28, (0,), True), (token(), 29, (0,), True),
         (token(), 28, (1,), True), (token(), 29, (1,), False)]
    )
    after = make_rows([(token(), 30, (1,), True), (token(), 30, (0,), True)])
    return [prompt, *singles, None, tree, after]


def run(backends: Sequence[LlamaCppBackend], steps: Iterable[Rows | None]) -> list[FloatArray]:
    """The logits of each step."""
    results = []
    for step in steps:
        if step is None:
            for backend in backends:
                backend.seq_cp(0, 1, 0, 27)
            continue
        hidden: FloatArray | None = None
        for backend in backends:
            hidden = backend.decode(step, hidden)
        assert hidden is not None
        results.append(hidden)
    return results


def differing(model: ModelFile, cuts: Iterable[Cut], cache_dir: Path, **options: Any
              ) -> list[tuple[Cut, float]]:
    """The cuts whose stages give other logits than the whole file, and by how much."""
    n, found = model.n_layers, []
    steps = script(model.n_vocab, branches=not keeps_state(model))
    whole = load(model.path, (0, n), n, **options)
    expected = run([whole], steps)
    whole.close()
    assert expected[0].std() > 0.5, "logits that say nothing"
    for cut in cuts:
        shards = [load(extract_shard(model, a, b, cache_dir=cache_dir), (a, b), n, **options)
                  for a, b in cut]
        worst = max(float(np.abs(got - want).max()) if got.tobytes() != want.tobytes() else -1.0
                    for got, want in zip(run(shards, steps), expected, strict=True))
        if worst >= 0:
            found.append((cut, worst))
        for shard in shards:
            shard.close()
    return found
