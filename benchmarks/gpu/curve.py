"""What rows decoded together cost: python -m benchmarks.gpu.curve MODEL --gpu-layers 99

Median seconds of decodes of 1 to 64 rows behind a context, and of one layer alone as the planner
measures it. Prints a JSON object per context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bits import Trial
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.planning.measure import layer_seconds

_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64)


def seconds(backend: Any, start: int, rounds: int) -> dict[str, float]:
    """Rows -> median seconds of a decode behind `start` tokens; every row gives logits."""
    for at in range(0, start, 64):
        count = min(64, start - at)
        backend.decode(make_rows([(5 + j, at + j, (0,), j == count - 1) for j in range(count)]))
    found = {}
    for width in _ROWS:
        rows = make_rows([(20 + i, start + i, (0,), True) for i in range(width)])
        times = []
        for _ in range(rounds):
            begun = time.perf_counter()
            backend.decode(rows)
            times.append(time.perf_counter() - begun)
            backend.seq_rm(0, start, END)
        found[str(width)] = statistics.median(times[rounds // 4:])
    backend.seq_rm(ALL_SEQS, 0, END)
    return found


def main() -> None:
    """Measure two contexts, then a layer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpu-layers", type=int, default=99)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    trial = Trial(given.model, given.gpu_layers, {})
    backend = trial.load(n_ctx=2048, keep_order=False)
    for start in (64, 1024):
        print(json.dumps({"behind": start, "seconds": seconds(backend, start, given.rounds)}),
              flush=True)
    whole = layer_seconds(backend, 0.5, (1,))[1]
    backend.close()
    part = trial.load(0, 1, keep_order=False)
    print(json.dumps({"layers": trial.n_layers, "whole_model_seconds": whole,
                      "one_layer_seconds": layer_seconds(part, 0.5, (1,))[1]}), flush=True)
    part.close()


if __name__ == "__main__":
    main()
