"""Two nodes that share one stage by turns: would the paper's outlook pay?

    python -m benchmarks.paper.turns

PipeInfer's authors suggest to add nodes "in parallel with the slowest nodes, acting as
load-balancers" (section VII). Emulated here and nowhere else: both nodes of the shared stage hold
its layers, and a run is computed by the one that is free. The next run reads the cells of this one
at every layer, so the other node may begin it one layer later, once that layer's keys and values
have come over the link, and ends it no earlier. That both have all cells costs nothing else here.

Compared are the same nodes: all of them as a planned pipeline, as one without the added node, and
the best grid of wide stages where machines are equal; each, and every choice of the shared stage
and of its layers, at the best of what tuning and a few fixed settings give.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks.paper.results import profiles
from benchmarks.records import raw_files
from pipeinfer.core.policy import Policy
from pipeinfer.lab import grids
from pipeinfer.lab.emulation import wide
from pipeinfer.lab.emulation.profiles import NodeProfile
from pipeinfer.lab.emulation.scenarios import (
    Built,
    Experiment,
    assemble,
    cache_bytes,
    controller_of,
    load_of,
    stage_members,
)
from pipeinfer.lab.emulation.virtual import Simulation, VirtualStage, _Packet, simulate
from pipeinfer.lab.emulation.wide import WideExperiment
from pipeinfer.planning.partition import partition
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import IssueRun

PAIRS = ("dolphin-tinyllama", "goliath-xwin7b", "falcon-7b")
TITLES = {"dolphin-tinyllama": "Dolphin + TinyLlama", "goliath-xwin7b": "Goliath + XWin 7B",
          "falcon-7b": "Falcon + Falcon 7B"}
#: cluster, nodes with the added one, and by how much one of the others is slower
CASES = (("c", 5, 1.0), ("c", 9, 1.0), ("c", 33, 1.0), ("a", 9, 1.0), ("b", 14, 1.0),
         ("c", 9, 2.0), ("c", 9, 4.0))
FIXED: tuple[dict[str, Any], ...] = ({}, {"draft_max": 1}, {"draft_max": 2})
_TEXTS = 2


class Shared(Simulation):
    """One request through a scenario in which two nodes share the stage `shared`.

    cell_seconds: to send the keys and values of one row of one layer
    """

    def __init__(self, built: Built, controller: Controller | None, shared: int,
                 cell_seconds: float) -> None:
        super().__init__(built.scenario, controller)
        self.shared, self.cell_seconds = shared, cell_seconds
        self.computing: dict[int, tuple[_Packet, float, float]] = {}
        self._number = itertools.count()
        self._begun = self._ends = self._lag = 0.0

    def _next(self, index: int) -> None:
        if index != self.shared:
            super()._next(index)
            return
        stage = self.stages[index]
        while stage.queue and len(self.computing) < 2:
            packet, seconds, lag = stage.queue.popleft(), self.spec.overheads.hop, 0.0
            if isinstance(item := packet.item, IssueRun):
                packet.skipped |= item.run_id in stage.cancelled or item.parent_id in stage.skipped
                if packet.skipped:
                    stage.skipped.add(item.run_id)
                else:
                    seconds += stage.spec.seconds(len(item.rows))
                    lag = seconds / stage.spec.layers + self.spec.links[index].latency \
                        + len(item.rows) * self.cell_seconds
            begin = max(self.now, self._begun + self._lag)
            end = max(begin + seconds, self._ends + self._lag if self.computing else 0.0)
            self._begun, self._ends, self._lag = begin, end, lag
            self._plan(packet, begin, end)
        if not self.computing:
            stage.idle_since = self.now

    def _plan(self, packet: _Packet, begin: float, end: float) -> None:
        number = next(self._number)
        self.computing[number] = packet, begin, end
        self.at(end, lambda: self._done(number))

    def _done(self, number: int) -> None:
        if number not in self.computing:
            return  # a stopped run's planned end
        packet, begin, _ = self.computing.pop(number)
        stage = self.stages[self.shared]
        stage.running, stage.started = packet, begin
        stage.token += 1
        self._end(self.shared, stage.token)

    def _take_cancel(self, index: int, run_ids: tuple[int, ...]) -> None:
        super()._take_cancel(index, run_ids)
        if index != self.shared:
            return
        before = self.now  # a run leaves after those before it
        for number, (packet, begin, end) in list(self.computing.items()):
            item = packet.item
            if isinstance(item, IssueRun) and item.speculative and not packet.skipped \
                    and item.run_id in run_ids:
                packet.skipped = True
                self.stages[index].skipped.add(item.run_id)
                del self.computing[number]
                end = before
                self._plan(packet, begin, end)
            before = max(before, end)


def machines(cluster: str, count: int, *, added: bool) -> list[NodeProfile]:
    """The nodes of a case, the head's first; without the added one, which is the last."""
    nodes = [profiles().node(name) for name in profiles().cluster(cluster).nodes]
    nodes += [nodes[-1]] * max(0, count - len(nodes))
    return nodes[:count] if added else nodes[:count - 1]


def built_of(experiment: Experiment, nodes: Sequence[NodeProfile]) -> Built:
    """A planned pipeline on these nodes."""
    pair = profiles().pair(experiment.pair)
    return assemble(nodes, profiles().model(pair.target), profiles().model(pair.draft),
                    profiles().link(profiles().cluster(experiment.cluster).link), pair.acceptance,
                    experiment)


def planned(experiment: Experiment, nodes: Sequence[NodeProfile]) -> float:
    """Tokens per second of a planned pipeline on these nodes."""
    built = built_of(experiment, nodes)
    return simulate(built.scenario, controller_of(built, experiment)).tokens_per_second


def by_turns(experiment: Experiment, nodes: Sequence[NodeProfile], shared: int, speed: float
             ) -> float:
    """Tokens per second where the added node shares a stage that is planned as if it were so many
    times as fast; 0 where that has no layers."""
    built, target = built_of(experiment, nodes), profiles().model(
        profiles().pair(experiment.pair).target)
    stages, factors = list(nodes[1:]), [1.0] * (len(nodes) - 1)
    if experiment.slow is not None:
        factors[experiment.slow[0] - 1] = experiment.slow[1]
    fast = [factor / speed if k == shared else factor for k, factor in enumerate(factors)]
    counts = partition(load_of(target, cache_bytes(target, experiment)),
                       stage_members(stages, fast, target)).counts
    if not counts[shared]:
        return 0.0

    def stage(node: NodeProfile, factor: float, count: int, *, last: bool) -> VirtualStage:
        return VirtualStage(
            lambda rows: factor * target.stage_seconds(node, count, rows, last=last), count)

    used = [(node, factor, count) for node, factor, count
            in zip(stages, factors, counts, strict=True) if count]
    virtual = tuple(stage(*one, last=k == len(used) - 1) for k, one in enumerate(used))
    limits, wire = built.scenario.limits, built.scenario.links[0]
    built = dataclasses.replace(built, scenario=dataclasses.replace(
        built.scenario, stages=virtual, links=(wire,) * (len(used) + 1),
        limits=structs.replace(limits, credit=len(used) + 2)))
    result = Shared(built, controller_of(built, experiment), sum(map(bool, counts[:shared])),
                    target.kv_bytes_per_token / target.n_layers / wire.bandwidth).run()
    pair = built.scenario.pair
    assert result.tokens == pair.plain(pair.prompt(experiment.prompt, 0), experiment.tokens)
    return result.tokens_per_second


def best(measure: Any, experiment: Experiment, texts: int) -> float:
    """The best mean over texts, tuned or with fixed settings."""
    return max(statistics.fmean(
        measure(dataclasses.replace(experiment, adapt=not fixed, prompt_seed=seed,
                                    limits=tuple(fixed.items()))) for seed in range(texts))
        for fixed in FIXED)


def compare(cluster: str, count: int, factor: float, pair: str, texts: int, tokens: int
            ) -> dict[str, Any]:
    """Tokens per second by arrangement: a row of the table."""
    slow = (min(4, count - 2), factor) if factor > 1 else None
    base = Experiment(cluster, pair, Policy.PIPEINFER.value, slow=slow, tokens=tokens)
    whole, fewer = (machines(cluster, count, added=added) for added in (True, False))
    found = {"all in a pipeline": best(lambda one: planned(one, whole), base, texts),
             "without the added one": best(lambda one: planned(one, fewer), base, texts)}
    if slow is None:
        asked = WideExperiment(cluster, pair, nodes=count, tokens=tokens,
                               sum_type="f16" if cluster != "c" else "f32")
        if plans := grids.candidates(profiles(), asked, 1):
            found[f"grid {plans[0][1].name}"] = statistics.fmean(
                wide.run(profiles(), dataclasses.replace(plans[0][0], prompt_seed=seed))[1]
                .tokens_per_second for seed in range(texts))
    stages = len(fewer) - 1
    choices = {0, stages // 2, stages - 1, *((slow[0] - 1,) if slow else ())}
    turns = max(best(lambda one, k=shared, s=speed: by_turns(one, fewer, k, s), base, texts)
                for shared in choices for speed in (1.0, 2.0))
    return {"cluster": cluster, "nodes": count, "slow": slow, "pair": pair, "speeds": found,
            "turns": turns}


def cells(one: Mapping[str, Any]) -> list[str]:
    """A row as text."""
    found, turns, slow = one["speeds"], one["turns"], one["slow"]
    name = max(found, key=lambda name: found[name])
    what = f"{one['cluster'].upper()}, {one['nodes'] - 1} nodes and one" + (
        f", node {slow[0]} {slow[1]:g} times slower" if slow else "")
    return [what, one["pair"], f"{found['without the added one']:.2f}",
            f"{found['all in a pipeline']:.2f}", f"{found[name]:.2f} ({name})", f"{turns:.2f}",
            f"{turns / found['all in a pipeline']:.2f}", f"{turns / found[name]:.2f}"]


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`shared-stage`."""
    return [[what, TITLES[pair], *rest] for what, pair, *rest in map(cells, raw)]


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the first ones")
    parser.add_argument("--quick", action="store_true", help="one text of 96 tokens, two cases")
    parser.add_argument("--raw", type=Path, help="keep every speed as JSON")
    given, found = parser.parse_args(), []
    texts, tokens = (1, 96) if given.quick else (_TEXTS, 256)
    for cluster, count, factor in CASES[::5] if given.quick else CASES[given.skip:]:
        for pair in PAIRS[:1] if given.quick else PAIRS:
            found.append(compare(cluster, count, factor, pair, texts, tokens))
            print(cells(found[-1]), flush=True)
            if given.raw:
                raw_files.write(given.raw, found)


if __name__ == "__main__":
    main()
