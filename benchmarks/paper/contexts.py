"""What a long context does to emulated clusters: python -m benchmarks.paper.contexts

For each pair and cluster, tokens per second behind so many cached tokens, attention counted, of
plain decoding over a pipeline and over one wide stage, of synchronous speculation, of PipeInfer as
published and as here, and of PipeInfer by turns with a wide stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.errors import PipeinferError
from pipeinfer.lab.emulation import scenarios, wide
from pipeinfer.lab.emulation.profiles import load_profiles

CONTEXTS = (1, 1024, 4096, 16384)
CASES = (("c", "dolphin-tinyllama", 8), ("c", "goliath-xwin7b", 8), ("a", "dolphin-tinyllama", 5),
         ("gpu", "dolphin-tinyllama", 4))


TITLES = {"dolphin-tinyllama": "Dolphin 70B + TinyLlama",
          "goliath-xwin7b": "Goliath 120B + XWin 7B"}


def rows_of(raw: Mapping[str, Any]) -> list[list[str]]:
    """`emulated-contexts`: all cases below each other."""
    rows = []
    for case in raw["cases"]:
        where = "four GPUs" if case["cluster"] == "gpu" else \
            f"{case['cluster'].upper()}, {case['nodes']} nodes"
        rows += [[f"{TITLES[case['pair']]}, {where}", name, *map(_cell, cells)]
                 for name, cells in case["speeds"].items()]
    return rows


def _cell(found: float | str) -> str:
    """A speed, or why there is none."""
    return found[:60] if isinstance(found, str) else f"{found:.2f}"


def main() -> None:
    """Print a table per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--raw", type=Path, help="keep every speed as JSON")
    tokens, contexts = (given := parser.parse_args()).tokens, given.contexts
    profiles = load_profiles()
    cases = []
    for cluster, pair, nodes in CASES:
        base = partial(scenarios.Experiment, cluster, pair, nodes=nodes, tokens=tokens)
        grid = partial(wide.WideExperiment, cluster, pair, nodes=nodes, tokens=tokens,
                       widths=(nodes,), head=wide.TURNS)
        rows = {
            "plain, pipeline": partial(base, "iterative"),
            "plain, one wide stage": partial(grid, "iterative"),
            "synchronous, as published": partial(base, "speculative", limits=(("branches", 1),)),
            "PipeInfer as published": partial(base, "published"),
            "PipeInfer, pipeline": partial(base, "pipeinfer"),
            "PipeInfer by turns, one wide stage": partial(grid, "pipeinfer"),
        }
        print(f"{pair}, {nodes} of {cluster}: tokens/s behind {', '.join(map(str, contexts))}")
        speeds: dict[str, list[float | str]] = {}
        for name, made in rows.items():
            cells = speeds[name] = []
            for context in contexts:
                experiment = made(context=context)
                run = wide.run if isinstance(experiment, wide.WideExperiment) else scenarios.run
                try:
                    cells.append(run(profiles, experiment)[1].tokens_per_second)
                except PipeinferError as error:
                    cells.append(str(error))
            print(f"| {name} | {' | '.join(map(_cell, cells))} |", flush=True)
        cases.append({"cluster": cluster, "pair": pair, "nodes": nodes, "speeds": speeds})
    if given.raw:
        raw_files.write(given.raw, {"tokens": tokens, "contexts": list(contexts),
                                    "cases": cases})


if __name__ == "__main__":
    main()
