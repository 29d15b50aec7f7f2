"""Chains of the controller against fixed ones, with heads of several qualities, in virtual time.

    python -m benchmarks.paper.chains [--pair qwen36-27b-mtp-code] [--draft-ms 1.62]

One wide stage of eight nodes of cluster C that takes turns with the head or draft. A figure is
that of ten texts of 160 tokens together: with three they differ by 3 to 5 %.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping

from msgspec import structs

from benchmarks.paper.heads import TODAY
from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import Profiles, load_profiles
from pipeinfer.emulation.scenarios import controller_of
from pipeinfer.emulation.virtual import simulate

FIXED = (2, 3, 4, 5, 6, 8)
QUALITIES = (0.0, 0.85, 0.9)  #: how often the first guess is right; 0: as profiled


def speed(profiles: Profiles, base: wide.WideExperiment, chain: int, texts: int, draft: float
          ) -> float:
    """Tokens per second. chain: fixed length; 0: the controller's. draft: seconds of a token; 0:
    as profiled."""
    tokens = seconds = 0.0
    for seed in range(texts):
        one = dataclasses.replace(base, prompt_seed=seed)
        built = wide.build(profiles, one)
        scenario = built.scenario
        if draft:
            scenario = dataclasses.replace(scenario, draft=lambda _: draft)
        if chain:
            scenario = dataclasses.replace(scenario, limits=structs.replace(
                scenario.limits, tree_max=chain, draft_max=chain))
        own = controller_of(dataclasses.replace(built, scenario=scenario), one)
        result = simulate(scenario, None if chain else own)
        tokens, seconds = tokens + len(result.times) - 1, seconds + result.seconds
    return tokens / seconds


def of_quality(profiles: Profiles, pair: str, first: float) -> Profiles:
    """The profiles with a first guess that is right so often, and later ones better by as much."""
    one = profiles.pair(pair)
    more = first - one.by_depth[0] if one.by_depth else 0.0
    better = dataclasses.replace(one, acceptance=first, by_depth=tuple(
        min(0.99, right + more) for right in one.by_depth))
    return dataclasses.replace(profiles, pairs={**profiles.pairs, pair: better})


def main() -> None:
    """Print a row for each quality."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="qwen36-27b-mtp-code")
    parser.add_argument("--draft-ms", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=10)
    given = parser.parse_args()
    profiles = load_profiles(TODAY)
    base = wide.WideExperiment("c", given.pair, nodes=8, widths=(8,), head=wide.TURNS, tokens=160)
    for first in QUALITIES:
        those = of_quality(profiles, given.pair, first) if first else profiles
        fixed: Mapping[int, float] = {chain: speed(
            those, base, chain, given.texts, given.draft_ms / 1e3) for chain in FIXED}
        own, best = speed(those, base, 0, given.texts, given.draft_ms / 1e3), max(fixed.values())
        print(f"| {given.pair} | {first or 'as profiled'} | {own:.1f} | "
              f"{', '.join(f'{one:.1f}' for one in fixed.values())} | {own / best:.3f} |",
              flush=True)


if __name__ == "__main__":
    main()
