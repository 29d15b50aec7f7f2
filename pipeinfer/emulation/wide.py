"""Grids of nodes in virtual time: stages of several members, which sum twice a layer.

The scheduler sees stages, as always. A stage's time is that of its slowest member in the attention,
plus that of its slowest member in the feed-forward part, plus the sums, for any number of rows.
Head and draft have a node of their own, or a part of the first member's cores and bandwidth, which
then holds a smaller share, or all of that machine by turns with the only stage. Profiles give
machines and links; what a sum costs besides is `SumCost`.
This module starts nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from pipeinfer.cluster.sizing import for_time_sharing
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.emulation import scenarios
from pipeinfer.emulation.profiles import ModelProfile, NodeProfile, Profiles
from pipeinfer.emulation.scenarios import (
    Built,
    Experiment,
    Ground,
    attention_time,
    cache_bytes,
    controller_of,
    draft_bytes,
    draft_time,
    load_of,
    on_stages,
)
from pipeinfer.emulation.sizes import pieces
from pipeinfer.emulation.virtual import Overheads, Result, VirtualStage, simulate
from pipeinfer.errors import UsageError
from pipeinfer.models.slice_parts import why_not_sliced
from pipeinfer.planning import teams
from pipeinfer.planning.grids import Cluster, GridPlan, best_grid, even_grid
from pipeinfer.planning.judge import LoadMix
from pipeinfer.planning.partition import Member, Split
from pipeinfer.planning.teams import EXCHANGE, PEER, Network, PlannedTeam, SumCost, TeamCut

ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
APART, BESIDE, TURNS = "apart", "beside", "by turns"
PART = 0.25  #: of the first member's cores and bandwidth that head and draft take beside it


@dataclass(frozen=True, slots=True)
class WideExperiment(Experiment):
    """As `Experiment`, on a grid. `nodes` counts all nodes, head and draft included.

    widths: members of each stage; () for the best grid. head: where head and draft are, apart,
    beside, or on the first member's machine by turns with the target, which takes a grid of one
    stage; with the iterative policy there is no draft, and the head is taken to cost nothing.
    part: see `PART`. sum_type: of values on the wire. exchange, peer: see `SumCost`. groups: of the
    cluster's nodes, see `Cluster`.
    """

    widths: tuple[int, ...] = ()
    head: str = APART
    part: float = PART
    sum_type: str = "f32"
    exchange: float = EXCHANGE
    peer: float = PEER
    groups: tuple[str, ...] = ()


def ground_of(profiles: Profiles, experiment: WideExperiment) -> Ground:
    """Who computes what. Raises UsageError."""
    ground = scenarios.ground_of(profiles, experiment)
    nodes, groups, count = ground.nodes, experiment.groups, len(ground.nodes)
    if groups and count > len(groups):
        raise UsageError(f"--hosts {count}: the hostfile has {len(groups)} ranks")
    drafter, groups = ground.drafter, groups[:count]
    if experiment.policy != Policy.ITERATIVE and experiment.head != TURNS:
        if experiment.head == BESIDE:
            drafter = part_of(nodes[0], experiment.part)
            nodes = (part_of(nodes[0], 1 - experiment.part), *nodes[1:])
        elif count < 2:
            raise UsageError("head and draft on a node of their own need a second node: use "
                             "--nodes 2 or more")
        else:
            nodes, groups = nodes[1:], groups[1:]
    return dataclasses.replace(
        ground, nodes=nodes, drafter=drafter, groups=groups,
        by_depth=ground.by_depth if experiment.policy != Policy.ITERATIVE else ())


def warning(profiles: Profiles, experiment: WideExperiment) -> str:
    """What the runtime would say of a grid for the experiment's target; empty where it has one."""
    target = profiles.model(profiles.pair(experiment.pair).target)
    why = why_not_sliced(target.shape.architecture) if target.shape is not None else ""
    return why and (f"{target.title} is emulated only: pipeinfer refuses grids for its file "
                    f"({why})")


def part_of(node: NodeProfile, part: float) -> NodeProfile:
    """A machine of which others have the rest."""
    return dataclasses.replace(
        node, bandwidth=node.bandwidth * part, rates={k: v * part for k, v in node.rates.items()},
        first={k: v * part for k, v in node.first.items()}, attention=node.attention * part)


def cluster_of(ground: Ground, experiment: WideExperiment) -> Cluster:
    """The experiment as the planner of grids sees it."""
    target, mix = ground.target, ground.target.quantisation
    assert target.shape is not None
    groups, heads, blocks = pieces(target.shape, mix)
    read, cache = target.active_layer_bytes, cache_bytes(target, experiment)
    stored = None if target.experts == 1 else (
        (target.attention_bytes + cache) / (target.layer_bytes + cache), 0.0)
    cut = TeamCut(target.n_embd, groups, blocks, target.attention_bytes / read,
                  target.keys_bytes / read, heads, stored=stored)
    draft = draft_time(ground.draft, ground.drafter)(1)
    policy = Policy(experiment.policy)
    return Cluster(
        tuple(_host(node, index, mix) for index, node in enumerate(ground.nodes)),
        Network(teams.Wire(ground.wire.latency, ground.wire.bandwidth)),
        load_of(target, cache), cut, sums_of(experiment),
        (LoadMix(policy, acceptance=ground.acceptance),), Overheads().hop,
        0.0 if policy is Policy.ITERATIVE else draft, groups=ground.groups)


def sums_of(experiment: WideExperiment) -> SumCost:
    """What a sum costs besides the wire. Raises UsageError for an unknown type."""
    if experiment.sum_type not in ITEM_BYTES:
        raise UsageError(f"sums have no type {experiment.sum_type!r}: use "
                         f"{', '.join(ITEM_BYTES)}")
    return SumCost(ITEM_BYTES[experiment.sum_type], experiment.exchange, experiment.peer)


def _host(node: NodeProfile, index: int, mix: str) -> Member:
    size = 1e9
    one = node.seconds(size, mix, 1) - node.overhead
    curve = tuple((rows, (node.seconds(size, mix, rows) - node.overhead) / one)
                  for rows in CURVE_ROWS)
    return Member(f"{node.name}-{index}", one / size, node.overhead, float(node.memory),
                  curve=curve)


def plan(profiles: Profiles, experiment: WideExperiment) -> GridPlan:
    """The experiment's grid, or the best one. Raises UsageError and PlanError."""
    cluster = cluster_of(ground_of(profiles, experiment), experiment)
    if experiment.widths:
        return even_grid(cluster, experiment.widths)
    return best_grid(cluster)


def build(profiles: Profiles, experiment: WideExperiment, grid: GridPlan | None = None) -> Built:
    """The scenario. grid: another one than that planned for the experiment, of the same nodes.
    memory: bytes of each node of the grid, in order, then head and draft's, where they are apart.
    Raises UsageError and PlanError."""
    ground = ground_of(profiles, experiment)
    grid = grid or plan(profiles, experiment)
    target, policy = ground.target, Policy(experiment.policy)
    turns = experiment.head == TURNS and policy is Policy.PIPEINFER
    if turns and len(grid.stages) > 1:
        raise UsageError(f"grid {grid.name}: draft and target compute by turns where there is one "
                         f"stage: use --head {APART} or {BESIDE}")
    end = len(grid.stages) - 1
    virtual = tuple(
        VirtualStage(partial(stage_seconds, one, count, k == end, ground.nodes, target,
                             grid.cluster), count, attention_time(
            target, [ground.nodes[index] for index in one.hosts], count, experiment,
            shares=[share / sum(one.attention) for share in one.attention]))
        for k, (one, count) in enumerate(zip(grid.stages, grid.layers, strict=True)))
    memory = [size for sizes in grid.memory for size in sizes]
    if policy is not Policy.ITERATIVE:
        own = draft_bytes(ground.draft, experiment)
        if experiment.head == APART:
            memory.append(own)
        else:
            memory[0] += own
    seconds = tuple(stage.seconds(1) for stage in virtual)
    built = on_stages(virtual, ground, experiment,
                      Split(grid.layers, seconds, tuple(map(max, grid.memory))), memory)
    return by_turns(built) if turns else built


def by_turns(built: Built) -> Built:
    """The scenario with the limits of head and draft that wait for the only stage, unless limits
    are set."""
    scenario = built.scenario
    if built.pinned:
        return built
    share = scenario.draft(1) / max(stage.seconds(1) for stage in scenario.stages)
    limits = structs.replace(scenario.limits, time_sharing=True, **for_time_sharing(
        built.curve, share, scenario.limits.exact_width, weighed=True))
    return dataclasses.replace(built, scenario=dataclasses.replace(scenario, limits=limits))


def stage_seconds(one: PlannedTeam, count: int, last: bool, nodes: Sequence[NodeProfile],
                  target: ModelProfile, cluster: Cluster, rows: int) -> float:
    """Time of `rows` rows through a wide stage of `count` layers, with the output if it is last."""
    members = [nodes[index] for index in one.hosts]

    def slowest(shares: Sequence[float], size: float, further: float = 0.0) -> float:
        return max(_computing(node, share * size, target.quantisation, rows, share * further)
                   for node, share in zip(members, shares, strict=True))

    read = target.active_layer_bytes
    # rows draw different experts, which are read from memory in addition
    further = (target.moved_layer_bytes(rows) - read) / (1 - cluster.cut.attention)
    layer = slowest(one.attention, read) + slowest(one.feed, read, further)
    speeds = [1 / cluster.hosts[index].per_cost for index in one.hosts]
    head = slowest([speed / sum(speeds) for speed in speeds], target.output_bytes) if last else 0.0
    sums = one.in_sums(count, rows, cluster.cut, cluster.sums, last=last)
    return max(node.overhead for node in members) + count * layer + head + sums


def _computing(node: NodeProfile, size: float, mix: str, rows: int, further: float) -> float:
    return node.seconds(size, mix, rows, size + further) - node.overhead


def run(profiles: Profiles, experiment: WideExperiment) -> tuple[Built, Result]:
    """Emulate an experiment in virtual time. Raises UsageError and PlanError."""
    built = build(profiles, experiment)
    return built, simulate(built.scenario, controller_of(built, experiment))
