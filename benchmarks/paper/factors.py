"""What the recovery and decay factors of the published policy do, in virtual time.

    python -m benchmarks.paper.factors [--raw FILE]

The same as `pipeinfer bench --policy published --nodes 8 --seeds 3 --pair PAIR --set p_recovery=R
--set p_decay=D` for each pair and each choice of factors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.lab.commands import bench
from pipeinfer.lab.emulation.profiles import load_profiles
from pipeinfer.lab.emulation.scenarios import Experiment

PAIRS = ("dolphin-tinyllama", "goliath-xwin7b", "falcon-7b")
#: recovery and decay; the first are those of the published program
FACTORS = ((0.0, 0.0), (0.1, 0.0), (0.2, 0.0), (0.4, 0.0), (0.2, 0.05), (0.4, 0.1))


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`published-factors`: means over texts."""
    rows = []
    for recovery, decay in FACTORS:
        name = f"{recovery:g}, {decay:g}"
        cells = [name + " (the published program's)" * (name == "0, 0")]
        for one in raw:
            if (one["recovery"], one["decay"]) == (recovery, decay):
                speed, runs = map(statistics.fmean, (one["speeds"], one["runs"]))
                unit = " runs" if not rows and len(cells) == 1 else ""
                cells.append(f"{speed:.2f}, {runs:.0f}{unit}")
        rows.append(cells)
    return rows


def main() -> None:
    """Print a line for each pair and choice."""
    parser = argparse.ArgumentParser(description="factors of the published policy's cutoff")
    parser.add_argument("--raw", type=Path, help="keep the numbers of every text as JSON")
    given = parser.parse_args()
    profiles, found = load_profiles(), []
    for recovery, decay in FACTORS:
        for pair in PAIRS:
            experiment = Experiment("c", pair, nodes=8, limits=(
                ("p_recovery", recovery), ("p_decay", decay)))
            texts = bench.virtual(profiles, experiment, ["published"], 3)["policies"][0]["runs"]
            found.append({"recovery": recovery, "decay": decay, "pair": pair,
                          "speeds": [text["tokens_per_second"] for text in texts],
                          "runs": [text["runs"] for text in texts]})
            print(found[-1], flush=True)
    if given.raw:
        raw_files.write(given.raw, found)


if __name__ == "__main__":
    main()
