"""Choices that lose: the planner gets a wrong acceptance, and the ledger 200 tokens to correct it.

    python -m benchmarks.paper.losing --out results.jsonl          # 30 clusters, five pairs
    python -m benchmarks.paper.losing --out results.jsonl --table  # what is written down already

Virtual time. For each cluster and pair the planner chooses grid and place of head and draft by an
acceptance that is 0.15 too high, or too low. From the 200th token on the speed is compared with the
best of what was possible on the same nodes: plain decoding on the pipeline and on the best grid,
synchronous speculation, and this project's policy on every arrangement that the planner would have
compared with the right acceptance.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.paper.results import profiles as base_profiles
from benchmarks.records import raw_files
from pipeinfer.core.policy import Policy
from pipeinfer.errors import PlanError
from pipeinfer.lab.emulation import scenarios, wide
from pipeinfer.lab.emulation.profiles import ClusterProfile, Profiles
from pipeinfer.lab.emulation.scenarios import Experiment, controller_of
from pipeinfer.lab.emulation.virtual import Result, simulate
from pipeinfer.lab.emulation.wide import WideExperiment
from pipeinfer.lab.placing import Place, around, fastest, places, safe, steady

NODES = ("xeon-e5-2650x2", "xeon-gold-6140x2", "i5-2400", "i7-2600", "i5-4590", "i7-4790")
LINKS = ("gigabit", "gigabit", "infiniband-qdr", "infiniband-edr")
SIZES = (2, 3, 4, 5, 6, 8, 10)
PAIRS = ("dolphin-tinyllama", "dolphin-orca2", "goliath-xwin7b", "falcon-7b", "yi-9b")
ERRORS = (-0.15, 0.15)
ENOUGH = 0.98  #: of the best speed
LEARNING, TOKENS = 200, 200  #: tokens for the ledger, and tokens that are measured
CHOOSERS = {"fastest": fastest, "steady": steady, "safe": safe}
TREES = ((1, 0.4), (2, 0.4), (4, 0.0))  #: of synchronous speculation: size and cutoff


def clusters(count: int, seed: int) -> dict[str, ClusterProfile]:
    """Random clusters of one to three kinds of machines, the faster ones first."""
    rng, found = np.random.default_rng(seed), {}
    for number in range(count):
        kinds = rng.choice(len(NODES), size=int(rng.integers(1, 4)), replace=False)
        nodes = sorted(int(rng.choice(kinds)) for _ in range(int(rng.choice(SIZES))))
        name = f"random-{number}"
        found[name] = ClusterProfile(name, name, tuple(NODES[k] for k in nodes),
                                     str(rng.choice(LINKS)))
    return found


def speed_of(result: Result) -> float:
    """Tokens per second once the ledger has had its tokens."""
    return (len(result.times) - 1 - LEARNING) / (result.times[-1] - result.times[LEARNING])


def run_place(profiles: Profiles, place: Place) -> float:
    """The speed of a place, at the pair's true acceptance."""
    built = wide.build(profiles, place.experiment, place.grid)
    return speed_of(simulate(built.scenario, controller_of(built, place.experiment)))


def others(profiles: Profiles, base: WideExperiment) -> Iterator[tuple[str, float]]:
    """Plain decoding and synchronous speculation, on the pipeline and on the best grid."""
    names = {field.name for field in dataclasses.fields(Experiment)}
    plain = Experiment(**{name: getattr(base, name) for name in names})
    trees = [dataclasses.replace(plain, policy=Policy.SPECULATIVE.value,
                                 limits=(("tree_max", size), ("p_min", cutoff)))
             for size, cutoff in TREES]
    for one in (dataclasses.replace(plain, policy=Policy.ITERATIVE.value), *trees):
        yield f"pipeline, {one.policy}", speed_of(scenarios.run(profiles, one)[1])
    grid = wide.plan(profiles, dataclasses.replace(base, policy=Policy.ITERATIVE.value))
    for one in trees:
        asked = dataclasses.replace(base, policy=one.policy, limits=one.limits, head=wide.TURNS)
        built = wide.build(profiles, asked, grid)
        yield f"{grid.name}, {one.policy}", speed_of(simulate(built.scenario))


def compare(profiles: Profiles, cluster: str, pair: str) -> dict[str, Any]:
    """One cluster and pair. Raises PlanError where the model does not fit."""
    base = WideExperiment(cluster, pair, nodes=len(profiles.cluster(cluster).nodes),
                          tokens=1 + LEARNING + TOKENS)
    right, known = profiles.pair(pair).acceptance, dict[object, float]()

    def speed(place: Place) -> float:
        if place.key not in known:
            known[place.key] = run_place(profiles, place)
        return known[place.key]

    possible = dict(others(profiles, base))
    for place in places(profiles, base, [right]):
        possible[place.name] = max(speed(place), possible.get(place.name, 0.0))
    best = max(possible, key=possible.__getitem__)
    chosen = []
    for error in ERRORS:
        given = min(max(right + error, 0.0), 0.99)
        found = places(profiles, base, around(given))
        for name, choose in CHOOSERS.items():
            place = choose(found, given)
            chosen.append({"chooser": name, "given": round(given, 3), "place": place.name,
                           "judged": round(place.speed(right), 3), "speed": round(speed(place), 4)})
    return {"cluster": cluster, "nodes": profiles.cluster(cluster).nodes,
            "link": profiles.cluster(cluster).link, "pair": pair, "best": best,
            "speed": round(possible[best], 4),
            "possible": {name: round(one, 3) for name, one in possible.items()}, "chosen": chosen}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--clusters", "count", default=30, show_default=True)
@click.option("--first", default=0, show_default=True)
@click.option("--seed", default=46, show_default=True, help="Other clusters.")
@click.option("--table", is_flag=True, help="Only print what is there.")
def main(out: Path, count: int, first: int, seed: int, table: bool) -> None:
    """Compare what is not compared yet, and print the table."""
    known = base_profiles()
    made = clusters(count, seed)
    profiles = dataclasses.replace(known, clusters={**known.clusters, **made})
    done = {(one["cluster"], one["pair"]) for one in written(out)}
    with out.open("a", encoding="utf-8") as file:
        for name, pair in ((n, p) for n in [*made][first:] for p in PAIRS if not table):
            if (name, pair) in done:
                continue
            try:
                record = compare(profiles, name, pair)
            except PlanError as error:
                record = {"cluster": name, "pair": pair, "error": str(error)}
            file.write(json.dumps(record) + "\n")
            file.flush()
    report(written(out))


def written(path: Path) -> list[dict[str, Any]]:
    """The records of a file, which may be compressed (.gz)."""
    lines = raw_files.text(path).splitlines() if path.exists() else ()
    return [json.loads(line) for line in lines]


def plain_speed(record: dict[str, Any]) -> float:
    """The speed of plain decoding on the best grid or the pipeline."""
    return max(speed for name, speed in record["possible"].items()
               if name.endswith((", no draft", ", iterative")))


def figures(records: Sequence[dict[str, Any]], chooser: str, pair: str = "") -> list[str]:
    """Of the choices for a pair (empty: all) the number, the speed over the best (worst, the tenth
    that is worst, below 0.98), and over plain decoding on the best grid (worst, below 0.98)."""
    ratios, slower = [], []
    for one in records:
        for choice in one.get("chosen", ()):
            if choice["chooser"] == chooser and pair in ("", one["pair"]):
                ratios.append(choice["speed"] / one["speed"])
                slower.append(choice["speed"] / plain_speed(one))
    ratios.sort()
    return [str(len(ratios)), f"{ratios[0]:.2f}", f"{ratios[len(ratios) // 10]:.2f}",
            str(sum(ratio < ENOUGH for ratio in ratios)), f"{min(slower):.2f}",
            str(sum(ratio < ENOUGH for ratio in slower))]


def report(records: Sequence[dict[str, Any]]) -> None:
    """Print `figures` by chooser and pair, and the choices that lose most."""
    click.echo(f"{len(records)} clusters with pairs, {sum('error' in one for one in records)} of "
               "which do not hold the model")
    for name in CHOOSERS:
        if not any(choice["chooser"] == name for one in records
                   for choice in one.get("chosen", ())):
            continue
        for pair in (*PAIRS, ""):
            click.echo(f"{name}, {pair or 'all'}: {', '.join(figures(records, name, pair))}")
        found = [(choice["speed"] / one["speed"], one, choice) for one in records
                 for choice in one.get("chosen", ()) if choice["chooser"] == name]
        for ratio, one, choice in sorted(found, key=lambda entry: entry[0])[:10]:
            click.echo(f"  {ratio:.3f} {one['cluster']} ({len(one['nodes'])} nodes, "
                       f"{one['link']}) {one['pair']} at {choice['given']:.2f}: "
                       f"{choice['place']} {choice['speed']:.2f} (judged {choice['judged']:.2f}), "
                       f"best {one['best']} {one['speed']:.2f}")


if __name__ == "__main__":
    main()
