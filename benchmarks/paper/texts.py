"""What guesses bring on a real pair's texts, each lever alone and all of them together.

    python -m benchmarks.paper.texts                    # cluster C, 8 nodes
    python -m benchmarks.paper.texts a dolphin-tinyllama 8
    python -m benchmarks.paper.texts c dolphin-tinyllama 8 paper    # prompts like the paper's

The clusters and models are emulated; what target and draft say is SmolLM2-135M-Instruct's and its
draft's (`record_texts`). Every answer is compared with plain decoding's. Speeds are geometric means
over the texts of a kind, as times of the plain pipeline.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.results import profiles
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


def by_kind(times: Sequence[float], texts: Sequence[Text]) -> list[float]:
    """Geometric means of what texts took, of each kind in the order in which they come, and of
    all."""
    kinds: dict[str, list[float]] = {}
    for time, text in zip(times, texts, strict=True):
        kinds.setdefault(text.kind, []).append(time)
    return [statistics.geometric_mean(some) for some in (*kinds.values(), times)]


def main() -> None:
    """See the module docstring."""
    cluster, pair, nodes = sys.argv[1:4] if len(sys.argv) > 3 else ("c", "dolphin-tinyllama", "8")
    texts = load(PAPER if sys.argv[4:] == ["paper"] else TEXTS)
    kinds = list(dict.fromkeys(text.kind for text in texts))
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
    for place, base in places.items():
        for name, lever in LEVERS.items():
            times = [speed(base, text, *lever) / own
                     for text, own in zip(texts, plain, strict=True)]
            shown = " | ".join(f"{cell:.2f}" for cell in by_kind(times, texts))
            print(f"| {place} | {name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
