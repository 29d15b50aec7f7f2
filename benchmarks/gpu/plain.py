"""The plain loop on a device: python -m benchmarks.gpu.plain TASK.json OUT.json

The task has `model`, `gpu_layers`, `flash`, `pad`, `cases` (each with `prompt`, `params`, `count`)
and perhaps `cache`, the type of keys and values, and `against` (each with `case`, its number, and
`tokens`). Writes the tokens of each case; and for each answer that differs the position, the gap
between the two best perturbed scores there and the largest difference between logits of other
widths.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from msgspec import structs

from pipeinfer.backends.llamacpp.context import CACHE_TYPES
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from tests.kit.near_tie import tie_where
from tests.kit.plain_loop import PlainLoop


def main(task_path: str, out_path: str) -> None:
    """See the module's docstring."""
    task = json.loads(Path(task_path).read_text())
    tokenizer = open_tokenizer(task["model"])
    kind = CACHE_TYPES[task["cache"]][0] if "cache" in task else None
    loop = PlainLoop(task["model"], n_ctx=task.get("ctx", 512), n_threads=2,
                     n_gpu_layers=task["gpu_layers"], flash=task["flash"], pad=task["pad"],
                     type_k=kind, type_v=kind)
    prompts = [tokenizer.encode(case["prompt"]) for case in task["cases"]]
    params = [SamplingParams(**case["params"]) for case in task["cases"]]
    tokens = task.get("tokens") or [
        loop.generate(prompt, case["count"], own)
        for prompt, own, case in zip(prompts, params, task["cases"], strict=True)]
    differ = []
    for answer in task.get("against", ()):
        number = answer["case"]
        tie = tie_where(loop, prompts[number], params[number], tokens[number], answer["tokens"],
                        (2, 4, 8))
        differ.append({**answer, "tokens": None, **structs.asdict(tie), "near_tie": tie.near})
    Path(out_path).write_text(json.dumps({"tokens": tokens, "differ": differ}))
    loop.close()
    tokenizer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
