"""Cancellation for real: stage time spent on runs that were already invalid when they started.

    python -m benchmarks.serving.cancel

A draft of random weights (the embedded draft with its quantised blocks shuffled), so that nearly
every speculative run is invalid; with and without cancellation, on the same prompts. The tokens
must be equal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import numpy as np

from benchmarks.methods.matrix import answers_of
from benchmarks.methods.prompts import PROMPTS
from tests.rig.launch import ROOT

EMBEDDED = ROOT / "pipeinfer" / "models" / "embedded"


def scramble(source: Path, target: Path, seed: int = 0) -> None:
    """Copy a Q8_0 model with the blocks of every matrix shuffled: same tokenizer, no sense."""
    from pipeinfer.models.gguf import ModelFile

    model = ModelFile(source)
    data = np.frombuffer(bytearray(source.read_bytes()), np.uint8)
    rng = np.random.default_rng(seed)
    for tensor in model.tensors.values() if isinstance(model.tensors, dict) else model.tensors:
        if tensor.type_name == "Q8_0":
            blocks = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, 34)
            rng.shuffle(blocks)
    target.write_bytes(data.tobytes())


def measure(np_: int, draft: Path, ablations: list[str], count: int, model: str,
            cancel_path: str) -> dict:
    """One job; the share of stage time on dead runs and the tokens."""
    cases = [{"prompt": p, "params": {"temperature": 0.0}, "count": count,
              "limits": {"policy": "pipeinfer", "p_min": 0.0, "ablations": ablations}}
             for p in PROMPTS[:4]]
    answer = answers_of(np_, {
        "model": model, "draft_model": str(draft), "policy": "pipeinfer", "ctx": 512,
        "threads": 1, "threads_draft": 1, "trace": "yes", "cancel_path": cancel_path},
        cases, timeout=900)
    died = {int(k): t for k, t in answer["died"].items()}
    busy = dead = stopped = 0.0
    for report in answer["reports"].values():
        for run_id, start, end, fate, *_ in report["events"]:
            busy += end - start
            if start >= died.get(run_id, float("inf")):
                dead += end - start
            if fate == "stopped":
                stopped += 1
    results = answer["results"]
    return {"tokens": [r["tokens"] for r in results], "share": dead / busy, "busy": busy,
            "speed": sum(r["n_output"] for r in results) / sum(
                r["n_output"] / r["tokens_per_second"] for r in results),
            "cancelled": sum(r["cancelled_runs"] for r in results),
            "skipped": sum(r["skipped_runs"] for r in results), "stopped": stopped}


@click.command()
@click.option("--ranks", default=4)
@click.option("--tokens", default=96)
@click.option("--model", default=str(EMBEDDED / "target.gguf"))
def main(ranks: int, tokens: int, model: str) -> None:
    """Print the shares for both ways a cancellation can travel."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "random.gguf"
        scramble(EMBEDDED / "draft.gguf", draft)
        got = {}
        for label, ablations, path in (("no cancellation", ["cancel"], "backward"),
                                       ("backward", [], "backward"), ("direct", [], "direct")):
            got[label] = one = measure(ranks, draft, ablations, tokens, model, path)
            print(f"{label}: {one['share']:.1%} of stage time on runs invalid at their start, "
                  f"{one['busy']:.2f} s busy, {one['speed']:.1f} tokens/s, {one['cancelled']} "
                  f"invalid runs, {one['skipped']} cut short, {one['stopped']:.0f} stops inside a "
                  "run", flush=True)
        equal = all(one["tokens"] == got["backward"]["tokens"] for one in got.values())
        print("tokens equal" if equal else "TOKENS DIFFER")


if __name__ == "__main__":
    main()
