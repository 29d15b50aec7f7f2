"""Models of 2026 on emulated clusters, with small drafts whose acceptance is assumed.

    python -m benchmarks.paper.today [--raw FILE]

The same as `pipeinfer plan --grids --profiles benchmarks/paper/today.toml --cluster C --pair PAIR
--hosts N` for each cluster and pair.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.lab import grids
from pipeinfer.lab.emulation.profiles import load_profiles
from pipeinfer.lab.emulation.wide import TURNS, WideExperiment

PROFILES = Path(__file__).with_name("today.toml")
TITLES = {"qwen36-27b": "Qwen3.6 27B", "qwen36-35b": "Qwen3.6 35B-A3B", "glm-air": "GLM-4.5 Air",
          "qwen3-30b": "Qwen3 30B-A3B", "qwen3-235b": "Qwen3 235B-A22B"}
CLUSTERS = {"a": "A", "c": "C", "pi": "4 Pi 5"}
CASES = (("a", 8, ("qwen36-27b", "qwen36-35b", "glm-air")),
         ("c", 8, ("qwen36-27b", "qwen3-30b", "glm-air", "qwen3-235b")),
         ("pi", 4, ("qwen3-30b",)))


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`emulated-today`."""
    rows = []
    for table in raw:
        plain, alone, *others = (grids.Row(**row) for row in table["rows"])
        best = max(others, key=lambda row: row.best)
        name = f"{best.grid}, {best.head}" if best.head == TURNS else best.grid
        rows.append([CLUSTERS[table["cluster"]], TITLES[table["pair"]],
                     f"{plain.iterative:.1f}", f"{plain.asynchronous:.1f}",
                     f"{alone.iterative:.1f} ({alone.grid})", f"{best.best:.1f} ({name})"])
    return rows


def main() -> None:
    """Print a table for each cluster and pair."""
    parser = argparse.ArgumentParser(description="models of 2026 on emulated clusters")
    parser.add_argument("--raw", type=Path, help="keep every number as JSON")
    given = parser.parse_args()
    profiles, found = load_profiles(PROFILES), []
    for cluster, nodes, pairs in CASES:
        for pair in pairs:
            table = grids.compare(profiles, WideExperiment(cluster, pair, nodes=nodes, tokens=256))
            print(grids.as_text(table) + "\n", flush=True)
            found.append(grids.as_data(table))
    if given.raw:
        raw_files.write(given.raw, found)


if __name__ == "__main__":
    main()
