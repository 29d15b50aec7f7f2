"""Sweep knobs of the policies in one job per world size; the defaults come from here.

    python -m benchmarks.kernels.sweep --model BIG.gguf --ranks 3 --knobs '{"draft_max": [1, 2, 3]}'
"""

from __future__ import annotations

import itertools
import json

import click

from benchmarks.kernels.speed import EMBEDDED, job


@click.command()
@click.option("--model", default=str(EMBEDDED / "target.gguf"))
@click.option("--draft", default=str(EMBEDDED / "draft.gguf"))
@click.option("--ranks", default=3)
@click.option("--tokens", default=48)
@click.option("--prompts", default=3)
@click.option("--temp", default=0.8)
@click.option("--threads", default=0)
@click.option("--knobs", default="{}", help="JSON: field of Limits to list of values.")
@click.option("--policy", default="pipeinfer")
def main(model: str, draft: str, ranks: int, tokens: int, prompts: int, temp: float,
         threads: int, knobs: str, policy: str) -> None:
    """Print tokens/s for every combination, best first, and for iterative."""
    grid = json.loads(knobs)
    limits = {"iterative": {"policy": "iterative"}}
    for values in itertools.product(*grid.values()):
        one = dict(zip(grid, values, strict=True))
        limits[json.dumps(one)] = {"policy": policy, **one}
    config = {"model": model, "draft_model": draft, "ctx": 1024, "threads": threads,
              "branches": max([1, *grid.get("branches", [])])}
    found = job(ranks, config, limits, tokens, prompts, {"temperature": temp, "key": 1})
    base = found["iterative"]["speed"]
    texts = {json.dumps(f["tokens"]) for f in found.values()}
    for label, one in sorted(found.items(), key=lambda item: -item[1]["speed"]):
        print(f"{one['speed']:8.2f} tokens/s  x{one['speed'] / base:.2f}  acceptance "
              f"{one['acceptance']:.0%}  in flight {one['in_flight']:.0%}  {label}")
    print("tokens equal" if len(texts) == 1 else "TOKENS DIFFER")


if __name__ == "__main__":
    main()
