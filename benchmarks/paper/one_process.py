"""What guesses bring on one process, where draft and target take turns on the same cores.

    python -m benchmarks.paper.one_process [SEEDS] [--raw FILE]

In virtual time, with what rows of a run cost on some processors and files, and with durations that
vary as a shared machine's do. Texts are a real pair's (`record_texts`); every answer is compared
with plain decoding's. Speeds are geometric means over the texts of a kind, as times of plain
decoding with the same disturbances.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.texts import DRAFT, LOOKUP, PAPER, TEXTS, by_kind, checked_speed
from benchmarks.records import raw_files
from pipeinfer.cluster.sizing import NO_MODEL, controller_for, limits_for, sizes_for
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.lab.emulation.recorded import RecordedPair, Text, load
from pipeinfer.lab.emulation.virtual import (
    Overheads,
    Scenario,
    VirtualStage,
    Wire,
)
from pipeinfer.planning.judge import relative

_JITTER = 0.1  #: a duration is longer by half of that on average, and now and then by more
_DRIFT = 0.01  #: by which the machine's speed changes from one run to the next
_SLOWEST = 1.3
_OVERHEADS = Overheads(hop=50e-6, head=150e-6, poll=0.0)  # nothing is sent


@dataclass(frozen=True, slots=True)
class Machine:
    """seconds: of a run of one row. costs: of `CURVE_ROWS` rows, relative to that. share: a
    draft's token, relative to that; assumed. exact: R."""

    seconds: float
    costs: tuple[float, ...]
    share: float
    exact: int


#: costs as measured when the file was loaded, but for the last, which is no machine's
MACHINES: Mapping[str, Machine] = {
    "0.43 B Q4_0, Zen 3": Machine(26e-3, (1.645, 2.252, 2.288, 2.486, 3.939, 7.247), 0.05, 7),
    "SmolLM2 Q4_1, Zen 3": Machine(11e-3, (1.79, 2.408, 2.5, 3.479, 4.239, 8.038), 0.35, 16),
    "0.43 B Q8_0, Zen 3, short runs": Machine(
        43e-3, (1.12, 1.152, 1.394, 1.595, 2.086, 4.034), 0.05, 16),
    "SmolLM2 Q4_1, Zen 3, short runs": Machine(
        11e-3, (1.347, 1.671, 1.968, 2.779, 3.918, 6.734), 0.35, 16),
    "cheap rows": Machine(30e-3, (1.05, 1.1, 1.15, 1.2, 1.5, 2.2), 0.05, 16),
}
LEVERS: Mapping[str, tuple[str, ...]] = {
    "draft": (DRAFT,), "lookup": (LOOKUP,), "lookup and draft": (LOOKUP, DRAFT)}


def weather(seed: int) -> Callable[[float], float]:
    """Durations as they turn out, in the order in which they are asked for."""
    dice, pace = random.Random(seed), 1.0

    def turned_out(seconds: float) -> float:
        nonlocal pace
        pace = min(max(pace * (1.0 + dice.gauss(0.0, _DRIFT)), 1.0 / _SLOWEST), _SLOWEST)
        return seconds * pace * (1.0 + dice.expovariate(2.0 / _JITTER))

    return turned_out


def speed(machine: Machine, text: Text, proposers: tuple[str, ...], seed: int) -> float:
    """Tokens per second of an answer in virtual time; no proposers: plain decoding."""
    pair, luck = RecordedPair(text), weather(seed)
    curve = tuple(zip(CURVE_ROWS, machine.costs, strict=True))
    policy = Policy.PIPEINFER if proposers else Policy.ITERATIVE
    config = JobConfig.of(proposer=proposers).speculation
    share = machine.share if DRAFT in proposers else NO_MODEL
    limits, pinned = limits_for(
        config, policy, sizes_for(machine.costs[0] - 1.0), n_ctx=2048, chunk=64,
        exact=machine.exact, n_stages=1, curve=curve, spare=256, draft_share=share)
    controller = controller_for(config, limits, pinned, curve, 256, contended=True,
                                draft_share=share)
    here = Wire(0.0, 1e12)
    scenario = Scenario(
        (VirtualStage(lambda rows: luck(machine.seconds * relative(curve, rows))),), (here, here),
        lambda rows: luck(machine.seconds * machine.share * (1.0 + 0.1 * (rows - 1))),
        limits if controller is None else controller.limits, pair, prompt=len(text.prompt),
        tokens=pair.n_answer, overheads=_OVERHEADS, proposers=proposers or (DRAFT,))
    return checked_speed(scenario, controller, machine)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description="guesses on one process, in virtual time")
    parser.add_argument("seeds", type=int, nargs="?", default=3)
    parser.add_argument("--raw", type=Path, help="keep every speed as JSON")
    given = parser.parse_args()
    seeds = range(given.seeds)
    texts = [*load(TEXTS), *load(PAPER)]
    kinds = list(dict.fromkeys(text.kind for text in texts))
    print(f"| machine | guesses | {' | '.join(kinds)} | all | slowest |")
    print("| --- " * (4 + len(kinds)) + "|")
    found: dict[str, dict[str, list[list[float]]]] = {}
    for name, machine in MACHINES.items():
        plain = [[speed(machine, text, (), seed) for text in texts] for seed in seeds]
        found[name] = {"plain": plain}
        for lever, proposers in LEVERS.items():
            found[name][lever] = [[speed(machine, text, proposers, seed) for text in texts]
                                  for seed in seeds]
            means = _means(found[name], lever)
            shown = [*by_kind(means, [text.kind for text in texts]), min(means)]
            print(f"| {name} | {lever} | {' | '.join(f'{cell:.2f}' for cell in shown)} |",
                  flush=True)
    if given.raw:
        raw_files.write(given.raw, {"kinds": [text.kind for text in texts], "speeds": {
            name: {lever: [[round(one, 4) for one in row] for row in rows]
                   for lever, rows in levers.items()} for name, levers in found.items()}})


def _means(speeds: Mapping[str, Any], lever: str) -> list[float]:
    """Times of plain decoding, a number for each text: geometric means over seeds."""
    return [statistics.geometric_mean(one / own for one, own in zip(some, plain, strict=True))
            for some, plain in zip(zip(*speeds[lever], strict=True),
                                   zip(*speeds["plain"], strict=True), strict=True)]


def rows_of(raw: Mapping[str, Any]) -> list[list[str]]:
    """`one-process`, without its first and last column."""
    rows = []
    for speeds in raw["speeds"].values():
        for lever in LEVERS:
            means = _means(speeds, lever)
            *some, one, two, three, every = (
                f"{cell:.2f}" for cell in by_kind(means, raw["kinds"]))
            rows.append([lever + " (the default)" * (lever == "lookup and draft"), *some,
                         f"{one}, {two}, {three}", every, f"{min(means):.2f}"])
    return rows


if __name__ == "__main__":
    main()
