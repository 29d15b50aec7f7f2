"""Starts models of real sizes and reports what a start takes beyond llama.cpp's own loading.

    python -m benchmarks.inflate --shape llama-8b --type Q4_0 -o 8b.gguf
    python -m benchmarks.sizes 8b.gguf [MORE.gguf ...] [--ranks 1 4] [--busy] [--rounds 2]

Each model is started with an empty cache of measurements, then again with what the first start
stored. `load` is rank 0's time from its start to readiness, `first` the time of the first token
after that. The file is in the system's cache. --busy: beside a process that keeps a core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeinfer.backends.llamacpp.context import LlamaOptions, load_model
from pipeinfer.llama import binding
from pipeinfer.llama.library import ensure_llama
from tests.kit import launch

PIPEINFER = [sys.executable, "-m", "pipeinfer"]


@contextlib.contextmanager
def busy(*, wanted: bool) -> Iterator[None]:
    """Keep a core busy meanwhile."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def own_loading(path: Path) -> float:
    """Return the seconds that llama.cpp takes to load a file that is in memory."""
    begun = time.monotonic()
    binding.llama_model_free(load_model(path, LlamaOptions()))
    return time.monotonic() - begun


def stats_of(ranks: int, words: Sequence[str], timeout: float, cache: str) -> dict[str, Any]:
    """Run `pipeinfer` with these words, which end with --json; return the stats of its answer.

    Raises SystemExit with what it printed if it fails.
    """
    done = launch.run(ranks, [*PIPEINFER, *words], timeout=timeout, PIPEINFER_CACHE=cache)
    if done.returncode:
        raise SystemExit(done.stderr)
    stats: dict[str, Any] = json.loads(done.stdout)["stats"]
    return stats


def started(path: Path, ranks: int, cache: str, timeout: float) -> dict[str, float]:
    """Start, decode eight tokens, and return the figures in seconds and MB."""
    words = ["generate", "-m", str(path), "-p", "The", "-n", "8", "-c", "1024", "--temp", "0",
             "--ignore-eos", "--json"]
    begun = time.monotonic()
    stats = stats_of(ranks, words, timeout, cache)
    return {"all": time.monotonic() - begun, "load": stats["load_seconds"],
            "first": stats["time_to_first_token"], "speed": stats["tokens_per_second"],
            "R": stats["exact_width"],
            "MB": max(stage["rss"] for stage in stats["stages"].values()) / 2**20,
            "files MB": sum(file.stat().st_size for file in Path(cache).glob("*.gguf")) / 1e6}


def main() -> None:
    """Print a line of JSON for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--timeout", type=float, default=900.0)
    given = parser.parse_args()
    ensure_llama()
    for path in given.models:
        with busy(wanted=given.busy):
            own_loading(path)
            print(json.dumps({"model": path.name, "cores": os.cpu_count(), "busy": given.busy,
                              "llama.cpp loads": round(own_loading(path), 2)}), flush=True)
            for ranks in given.ranks:
                with tempfile.TemporaryDirectory() as cache:
                    for number in range(given.rounds):
                        found = started(path, ranks, cache, given.timeout)
                        print(json.dumps({"model": path.name, "ranks": ranks, "start": number + 1}
                                         | {k: round(v, 2) for k, v in found.items()}), flush=True)


if __name__ == "__main__":
    main()
