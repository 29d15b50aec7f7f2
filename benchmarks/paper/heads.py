"""What a prediction head brings over a plain pipeline, in virtual time.

    python -m benchmarks.paper.heads [--cluster c] [--nodes 8]

For each model, in tokens per second: the plain pipeline; tensor parallelism alone; the head asked
synchronously for a chain of three, as other engines do (node 0 asks it and holds layers);
pipeinfer with the head on node 0; and its best grid. Acceptance by position is as reported by
others, so every figure is emulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.emulation import scenarios, wide
from pipeinfer.emulation.profiles import Profiles, load_profiles

TODAY = Path(__file__).with_name("today.toml")
SMALL = {"desktops": "old desktops", "minis": "mini computers"}
PAIRS = ("glm-air-mtp-code", "glm-air-mtp-prose", "qwen36-27b-mtp-code", "qwen36-27b-mtp-prose")


def pipeline(profiles: Profiles, **given: Any) -> float:
    """Tokens per second over plain stages."""
    return scenarios.run(profiles, scenarios.Experiment(**given))[1].tokens_per_second


def grid(profiles: Profiles, **given: Any) -> tuple[float, str]:
    """Tokens per second of the best grid, or of `widths`; and its name."""
    built = wide.WideExperiment(**given)
    return (wide.run(profiles, built)[1].tokens_per_second, wide.plan(profiles, built).name)


def alone(profiles: Profiles, nodes: int, **given: Any) -> tuple[float, str]:
    """The best number of members of one stage, without guesses."""
    found = []
    for count in range(2, nodes + 1):
        try:
            found.append(grid(profiles, nodes=count, widths=(count,), policy="iterative", **given))
        except Exception as error:  # more members than the model has blocks, or too little memory
            del error
    return max(found, default=(0.0, "-"))


def cells(found: Mapping[str, Any]) -> list[str]:
    """Speeds and ratios of a model."""
    plain, (alone_speed, width), (best, name) = found["plain"], found["alone"], found["best"]
    return [f"{plain:.1f}", f"{alone_speed:.1f} ({width})", f"{found['synchronous']:.1f}",
            f"{found['own']:.1f}", f"{best:.1f} ({name})",
            f"{best / plain:.1f}, {best / alone_speed:.1f}"]


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`emulated-heads`."""
    rows = []
    for found in raw:
        cluster, nodes = found["cluster"], found["nodes"]
        where = f"{nodes} {SMALL[cluster]}" if cluster in SMALL else \
            f"{cluster.upper()}, {nodes} nodes" + (", 1 Gbit/s" if found["link"] else "")
        model, text = found["title"].partition(" + ")[0], found["pair"].rpartition("-")[2]
        rows.append([where, f"{model}, {text}", *cells(found)])
    return rows


def main() -> None:
    """Print a row of a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="c")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--link", default="")
    parser.add_argument("--pair", nargs="+", default=PAIRS)
    parser.add_argument("--raw", type=Path, help="add every number to this file, as JSON")
    given = parser.parse_args()
    profiles = load_profiles(TODAY)
    for pair in given.pair:
        where = {"cluster": given.cluster, "link": given.link, "pair": pair}
        plain = pipeline(profiles, policy="iterative", nodes=given.nodes, **where)
        wide_alone, width = alone(profiles, given.nodes, **where)
        others = pipeline(profiles, policy="speculative", nodes=given.nodes, limits=(
            ("tree_max", 3), ("p_min", 0.0)), **where)
        own = pipeline(profiles, nodes=given.nodes, **where)
        best, name = grid(profiles, nodes=given.nodes, **where)
        turns, turns_name = grid(profiles, nodes=given.nodes, head=wide.TURNS, widths=(
            given.nodes,), **where) if width == f"1x{given.nodes}" else (0.0, "")
        if turns > best:
            best, name = turns, f"{turns_name}, by turns"
        found = {"cluster": given.cluster, "nodes": given.nodes, "link": given.link,
                 "pair": pair, "title": profiles.pair(pair).title, "plain": plain,
                 "alone": [wide_alone, width], "synchronous": others, "own": own,
                 "best": [best, name]}
        print(f"| {given.cluster} | {found['title']} | {' | '.join(cells(found))} |", flush=True)
        if given.raw:
            raw_files.add(given.raw, found)


if __name__ == "__main__":
    main()
