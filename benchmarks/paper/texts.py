"""What guesses bring on a real pair's texts, each lever alone and all of them together.

    python -m benchmarks.paper.texts                    # cluster C, 8 nodes
    python -m benchmarks.paper.texts a dolphin-tinyllama 8
    python -m benchmarks.paper.texts c dolphin-tinyllama 8 paper    # prompts like the paper's
    python -m benchmarks.paper.texts --raw FILE         # and add every speed to a file, as JSON

The clusters and models are emulated; what target and draft say is SmolLM2-135M-Instruct's and its
draft's (`record_texts`). Every answer is compared with plain decoding's. Speeds are geometric means
over the texts of a kind, as times of the plain pipeline.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.results import profiles
from benchmarks.records import raw_files
from pipeinfer.core.policy import Policy
from pipeinfer.lab import grids
from pipeinfer.lab.emulation import scenarios, wide
from pipeinfer.lab.emulation.recorded import RecordedPair, Text, load
from pipeinfer.lab.emulation.scenarios import Experiment
from pipeinfer.lab.emulation.virtual import Scenario, prompt_of, simulate
from pipeinfer.lab.emulation.wide import WideExperiment
from pipeinfer.scheduler.controller import Controller

TEXTS = Path(__file__).with_name("texts-smollm2.npz")
PAPER = Path(__file__).with_name("texts-smollm2-paper.npz")
DRAFT, LOOKUP = "draft", "prompt-lookup"
#: policy, who guesses
LEVERS = {
    "no guesses": (Policy.ITERATIVE, (DRAFT,)),
    "synchronous, draft": (Policy.SPECULATIVE, (DRAFT,)),
    "synchronous, layered": (Policy.SPECULATIVE, (LOOKUP, DRAFT)),
    "lookup": (Policy.PIPEINFER, (LOOKUP,)),
    "draft": (Policy.PIPEINFER, (DRAFT,)),
    "layered": (Policy.PIPEINFER, (LOOKUP, DRAFT)),
}

#: the places of `emulated-layers-turns`, as they come, and its rows
PLACES = ("plain", "pipeline", "one wide stage of 8, by turns")
_BOTH = {"layered": "lookup and draft (the default)"}
TITLES: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "pipeline": {"synchronous, draft": "synchronous, draft",
                 **{name: f"PipeInfer, {title}" for name, title in (
                     ("lookup", "lookup alone"), ("draft", "draft alone"), *_BOTH.items())}},
    "one wide stage of 8, by turns": {"no guesses": "none", "lookup": "lookup alone",
                                      "draft": "draft alone", **_BOTH}}


def speed(base: Experiment, text: Text, policy: Policy, proposers: tuple[str, ...]) -> float:
    """Tokens per second of an answer in virtual time."""
    pair = RecordedPair(text)
    one = dataclasses.replace(base, policy=policy.value, prompt=len(text.prompt),
                              tokens=pair.n_answer)
    built = wide.build_any(profiles(), one)
    scenario = dataclasses.replace(built.scenario, pair=pair, proposers=proposers)
    return checked_speed(scenario, scenarios.controller_of(built, one), one)


def checked_speed(scenario: Scenario, controller: Controller | None, what: object) -> float:
    """Tokens per second of the scenario's answer, which has to be plain decoding's."""
    result = simulate(scenario, controller)
    if result.tokens != scenario.pair.plain(prompt_of(scenario), scenario.tokens):
        sys.exit(f"{what}: the tokens differ from plain decoding's")
    return result.tokens_per_second


def by_kind(times: Sequence[float], kinds: Sequence[str]) -> list[float]:
    """Geometric means of what texts took, of each kind in the order in which they come, and of
    all. kinds: of each text."""
    found: dict[str, list[float]] = {}
    for time, kind in zip(times, kinds, strict=True):
        found.setdefault(kind, []).append(time)
    return [statistics.geometric_mean(some) for some in (*found.values(), times)]


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description="guesses on a real pair's texts")
    parser.add_argument("where", nargs="*", metavar="CLUSTER PAIR NODES [paper]")
    parser.add_argument("--raw", type=Path, help="add every speed to this file, as JSON")
    given = parser.parse_args()
    cluster, pair, nodes = given.where[:3] if len(given.where) > 2 else (
        "c", "dolphin-tinyllama", "8")
    texts = load(PAPER if given.where[3:] == ["paper"] else TEXTS)
    every = [text.kind for text in texts]
    kinds = list(dict.fromkeys(every))
    accepted = statistics.fmean(text.acceptance for text in texts)
    pipeline = Experiment(cluster, pair, nodes=int(nodes))
    asked = WideExperiment(cluster, pair, nodes=int(nodes), acceptance=accepted)
    found = grids.candidates(profiles(), asked, 1)
    places: dict[str, Experiment] = {"pipeline": pipeline}
    if found:
        grid = dataclasses.replace(found[0][0], widths=found[0][1].widths)
        places[f"grid {found[0][1].name}, head {grid.head}"] = grid
    plain = [speed(pipeline, text, *LEVERS["no guesses"]) for text in texts]
    print(f"{cluster.upper()}, {nodes} nodes, models of {pair}; {len(texts)} texts, of which the "
          f"draft names {accepted:.2f} of the tokens")
    print(f"| where | guesses | {' | '.join(kinds)} | all |")
    print("| --- " * (3 + len(kinds)) + "|")
    found_speeds: dict[str, dict[str, list[float]]] = {"plain": {"plain": plain}}
    for place, base in places.items():
        for name, lever in LEVERS.items():
            speeds = [speed(base, text, *lever) for text in texts]
            found_speeds.setdefault(place, {})[name] = speeds
            times = [one / own for one, own in zip(speeds, plain, strict=True)]
            shown = " | ".join(f"{cell:.2f}" for cell in by_kind(times, every))
            print(f"| {place} | {name} | {shown} |", flush=True)
    if given.raw:
        raw_files.add(given.raw, {
            "cluster": cluster, "pair": pair, "nodes": int(nodes), "kinds": every,
            "accepted": accepted, "speeds": {place: {
                name: [round(one, 4) for one in speeds] for name, speeds in some.items()}
                for place, some in found_speeds.items()}})


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`emulated-layers-turns`: the texts of all commands, side by side."""
    names = {place: name for place, name in zip(raw[0]["speeds"], PLACES, strict=True)}
    rows = []
    for place, name in names.items():
        for lever, title in TITLES[name].items():
            cells = []
            for found in raw:
                speeds = found["speeds"][place][lever]
                times = [one / own for one, own in zip(
                    speeds, found["speeds"]["plain"]["plain"], strict=True)]
                cells += [f"{cell:.2f}" for cell in by_kind(times, found["kinds"])]
            rows.append([name, title, *cells])
    return rows


def worth_rows(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`emulated-draft-worth`: those with the draft on the wide stage, without the columns of what
    was before."""
    return [row[1:] for row in rows_of(raw) if row[0] == PLACES[-1] and "draft" in row[1]]


if __name__ == "__main__":
    main()
