"""Every architecture under guesses that are mostly wrong, and without a rank that dies.

    python -m benchmarks.methods.architectures [NAME ...]

Tiny random models with real metadata (`lab.random_architectures`). Cancellations: a random
share of the matrix of `lossless` over three ranks, with the same weights quantised otherwise as a
draft. Recovery: a stage is killed in the middle of a text, and the text is compared with one
process's. Prints a line for each; exit status 1 when a token differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.lab.random_architectures import RECIPES, stages_of
from pipeinfer.lab.random_model import tiny, write_random_model
from tests.rig import launch


def guessed(model: Path, draft: Path) -> str:
    """The last line of `lossless`."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.methods.lossless", "--model", str(model), "--draft",
         str(draft), "--prompts", "2", "--tokens", "48", "--share", "0.08", "--ranks", "3"],
        capture_output=True, text=True, timeout=600, check=False)
    return (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]


def tokens(n_ranks: int, model: Path, *more: str) -> tuple[list[int], list[str]]:
    """What a job writes after a few words, and its notes."""
    done = launch.run(n_ranks, [
        sys.executable, "-m", "pipeinfer", "generate", "-m", str(model), "-p", "the rain in",
        "-n", "96", "-c", "256", "-t", "1", "--ignore-eos", "--temp", "1", "--seed", "5", "--json",
        *more])
    if done.returncode:
        return [], [done.stderr.strip()[-300:]]
    found = json.loads(done.stdout)
    return found["tokens"], found["stats"]["notes"]


def recovered(name: str, model: Path) -> str:
    """Whether the text is whole though a stage was killed."""
    plain, _ = tokens(1, model)
    again, notes = tokens(stages_of(name) + 1, model, "--fault", "kill@2:decode=20",
                          "--policy", "pipeinfer", "--proposer", "prompt-lookup")
    if not any("went on after" in note for note in notes):
        return f"was not disturbed: {notes[-1:]}"
    return "every token kept" if plain and again == plain else "TOKENS DIFFER"


def main(names: Sequence[str]) -> int:
    """See the module docstring."""
    bad = 0
    for name in names or list(RECIPES):
        with tempfile.TemporaryDirectory() as folder:
            model, draft = (write_random_model(
                Path(folder) / f"{kind}.gguf", tiny(name, qtype=kind))
                for kind in ("Q8_0", "Q4_0"))
            lines = guessed(model, draft), recovered(name, model)
        bad += "0 differ" not in lines[0] or lines[1] != "every token kept"
        print(f"{name}: guesses: {lines[0]}; a killed stage: {lines[1]}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
