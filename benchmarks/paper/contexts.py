"""What a long context does to emulated clusters: python -m benchmarks.paper.contexts

For each pair and cluster, tokens per second behind so many cached tokens, attention counted, of
plain decoding over a pipeline and over one wide stage, of synchronous speculation, of PipeInfer as
published and as here, and of PipeInfer by turns with a wide stage.
"""

from __future__ import annotations

import argparse
from functools import partial

from pipeinfer.errors import PipeinferError
from pipeinfer.lab.emulation import scenarios, wide
from pipeinfer.lab.emulation.profiles import load_profiles

CONTEXTS = (1, 1024, 4096, 16384)
CASES = (("c", "dolphin-tinyllama", 8), ("c", "goliath-xwin7b", 8), ("a", "dolphin-tinyllama", 5),
         ("gpu", "dolphin-tinyllama", 4))


def main() -> None:
    """Print a table per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    tokens, contexts = (given := parser.parse_args()).tokens, given.contexts
    profiles = load_profiles()
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
        for name, made in rows.items():
            cells = []
            for context in contexts:
                experiment = made(context=context)
                run = wide.run if isinstance(experiment, wide.WideExperiment) else scenarios.run
                try:
                    cells.append(f"{run(profiles, experiment)[1].tokens_per_second:.2f}")
                except PipeinferError as error:
                    cells.append(str(error)[:60])
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
