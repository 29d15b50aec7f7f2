"""The plain loop on a device: python -m benchmarks.gpu.plain TASK.json OUT.json

The task has `model`, `gpu_layers`, `cases` (each with `prompt`, `params`, `count`) and perhaps
`against` (each with `case`, its number, and `tokens`). Writes the tokens of each case; and for each
answer that differs the position, the gap between the two best perturbed scores there and the
largest difference between logits of other widths (benchmarks/methods/lossless.py judges alike).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.core.sampling import candidates
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from tests.rig.plain_loop import PlainLoop


def gap_at(loop: PlainLoop, prompt: list[int], params: SamplingParams, reference: list[int],
           at: int) -> dict[str, Any]:
    """How near a tie the choice after `at` tokens of the reference is."""
    single = list(loop.logits_after(prompt, reference[:at]))[-1]
    noise = 0.0
    for width in (2, 4, 8):
        loop.reset()
        for start in range(0, len(prompt), 64):
            other = loop.decode(prompt[start : start + 64], start)
        for start in range(0, at, width):
            other = loop.decode(reference[start : min(start + width, at)], len(prompt) + start)
        noise = max(noise, float(np.abs(other - single).max()))
    path = [*prompt, *reference[:at]]
    ids, scores = candidates(single, params, np.array(path, np.int32), len(path) - 1).ranked(2)
    gap = float(scores[0] - scores[1]) * (params.temperature or 1.0)
    return {"at": at, "best": [int(i) for i in ids], "gap": gap, "noise": noise,
            "near_tie": gap <= 2 * noise}


def main(task_path: str, out_path: str) -> None:
    """See the module's docstring."""
    task = json.loads(Path(task_path).read_text())
    tokenizer = open_tokenizer(task["model"])
    loop = PlainLoop(task["model"], n_ctx=task.get("ctx", 512), n_threads=2,
                     n_gpu_layers=task["gpu_layers"], flash=task["flash"])
    prompts = [tokenizer.encode(case["prompt"]) for case in task["cases"]]
    params = [SamplingParams(**case["params"]) for case in task["cases"]]
    tokens = task.get("tokens") or [
        loop.generate(prompt, case["count"], own)
        for prompt, own, case in zip(prompts, params, task["cases"], strict=True)]
    differ = []
    for answer in task.get("against", ()):
        number = answer["case"]
        at = next(i for i, (a, b) in enumerate(zip(answer["tokens"], tokens[number], strict=False))
                  if a != b)
        differ.append({**answer, "tokens": None,
                       **gap_at(loop, prompts[number], params[number], tokens[number], at)})
    Path(out_path).write_text(json.dumps({"tokens": tokens, "differ": differ}))
    loop.close()
    tokenizer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
