"""From profiles to a scenario: which nodes hold which layers, how long everything takes.

Nodes are counted as the paper counts them (section V): iterative and synchronous speculative
inference spread the layers over all N nodes, and node 0 drafts besides; with PipeInfer node 0
only drafts and the layers lie on the other N - 1. This module starts nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from pipeinfer.cluster.sizing import JOIN_UP_TO, never_pays, sizes_for
from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.emulation.profiles import ModelProfile, NodeProfile, Profiles
from pipeinfer.emulation.synthetic import SyntheticPair
from pipeinfer.emulation.virtual import (
    Result,
    Scenario,
    VirtualStage,
    Wire,
    no_attention,
    simulate,
)
from pipeinfer.errors import UsageError
from pipeinfer.planning.judge import Curve, Judge, LoadMix
from pipeinfer.planning.partition import Load, Member, Split, choose, measure
from pipeinfer.scheduler.controller import NEVER, Controller, alternatives_for, cutoff
from pipeinfer.scheduler.settings import PUBLISHED, Limits

CHUNK = 64
TREES = (1, 2, 4, 8)  #: drafted tokens of a synchronous tree that are tried
CUTOFFS = (0.0, 0.4)  #: of its drafted tokens
EXACT = 16  #: rows of a run that emulated backends compute exactly
_OUTPUTS = 4  #: of a draft's decode, at most so many rows are taken to have outputs
_SCRATCH = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Experiment:
    """One run to emulate; names refer to profiles.

    cluster: profile of the machines
    pair: profile of target and draft
    policy: name of the policy
    nodes: how many of the cluster's nodes; 0 for all
    acceptance: share of positions at which the first guess is right; None: the pair's published
        one, which is a share of drafted tokens, so that speeds are a lower bound
    claimed: mean confidence that the draft claims; None: its true one
    link: link profile; "" for the cluster's
    delay: seconds added to every link
    slow: (node, factor) that makes a node slower
    split: planned, which may leave slow nodes out as a job does, or equal
    ablate: components that are switched off
    limits: fields of `Limits` that are set, and pinned for the controller
    adapt: whether the controller tunes the rest
    prompt_seed: another seed, another text
    prompt: tokens of the prompt
    tokens: tokens to generate
    direct_cancel: whether cancellations go to every stage at once (never with `published`)
    context: tokens that are cached before the prompt; with any, the time of attention counts
    """

    cluster: str
    pair: str
    policy: str = "pipeinfer"
    nodes: int = 0
    acceptance: float | None = None
    claimed: float | None = None
    link: str = ""
    delay: float = 0.0
    slow: tuple[int, float] | None = None
    split: str = "planned"
    ablate: tuple[str, ...] = ()
    limits: tuple[tuple[str, float | int | bool], ...] = ()
    adapt: bool = True
    prompt_seed: int = 0
    prompt: int = 128
    tokens: int = 512
    direct_cancel: bool = True
    context: int = 0


@dataclass(frozen=True, slots=True)
class Built:
    """A scenario with what it was made from. memory: bytes per node, in the order of the nodes."""

    scenario: Scenario
    split: Split
    memory: tuple[float, ...]
    pinned: frozenset[str]
    row_cost: float
    curve: Curve


@dataclass(frozen=True, slots=True)
class Ground:
    """Machines and models of an experiment. nodes: that hold layers; drafter: has head and draft;
    groups: of the nodes, where they matter."""

    nodes: tuple[NodeProfile, ...]
    drafter: NodeProfile
    target: ModelProfile
    draft: ModelProfile
    wire: Wire
    acceptance: float
    by_depth: tuple[float, ...] = ()
    groups: tuple[str, ...] = ()


def ground_of(profiles: Profiles, experiment: Experiment) -> Ground:
    """All nodes of an experiment, the first of which drafts. Raises UsageError for unknown names.
    """
    cluster = profiles.cluster(experiment.cluster)
    nodes = [profiles.node(name) for name in cluster.nodes]
    count = experiment.nodes or len(nodes)
    nodes += [nodes[-1]] * (count - len(nodes))  # a bigger cluster of the same machines
    pair = profiles.pair(experiment.pair)
    link = profiles.link(experiment.link or cluster.link)
    return Ground(
        tuple(nodes[:count]), nodes[0], profiles.model(pair.target), profiles.model(pair.draft),
        Wire(link.latency + experiment.delay, link.bandwidth),
        pair.acceptance if experiment.acceptance is None else experiment.acceptance,
        pair.by_depth)


def build(profiles: Profiles, experiment: Experiment) -> Built:
    """The scenario of an experiment. Raises UsageError for unknown names, PlanError for memory."""
    ground, policy = ground_of(profiles, experiment), Policy(experiment.policy)
    alone = policy in (Policy.PIPEINFER, Policy.PUBLISHED) and len(ground.nodes) > 1
    target, stages = ground.target, ground.nodes[1:] if alone else ground.nodes
    slow, factor = experiment.slow or (-1, 1.0)
    factors = [factor if index + alone == slow else 1.0 for index in range(len(stages))]
    split = _split(stages, factors, ground, experiment)
    used = [(node, factor, rows) for node, factor, rows
            in zip(stages, factors, split.counts, strict=True) if rows]
    virtual = tuple(
        VirtualStage(_stage_time(target, node, n_layers, factor, last=index == len(used) - 1),
                     n_layers, attention_time(target, [node], n_layers, experiment, factor))
        for index, (node, factor, n_layers) in enumerate(used)
    )
    memory = [*[0.0] * alone, *split.sizes]
    if policy is not Policy.ITERATIVE:
        memory[0] += draft_bytes(ground.draft, experiment)
    return on_stages(virtual, ground, experiment, split, memory)


def on_stages(stages: tuple[VirtualStage, ...], ground: Ground, experiment: Experiment,
              split: Split, memory: Sequence[float]) -> Built:
    """The scenario of an experiment whose stages are known, with the limits that a start sets."""
    policy = Policy(experiment.policy)
    row_cost = max(stage.seconds(2) / stage.seconds(1) - 1.0 for stage in stages)
    slowest = max(stage.seconds(1) for stage in stages)
    limits, pinned = limits_of(policy, len(stages), row_cost, experiment)
    return Built(Scenario(
        stages, (ground.wire,) * (len(stages) + 1),
        draft_time(ground.draft, ground.drafter, one_layer=bool(ground.by_depth)), limits,
        SyntheticPair(ground.acceptance, seed=experiment.prompt_seed, claimed=experiment.claimed,
                      by_depth=ground.by_depth if policy is not Policy.ITERATIVE else ()),
        row_bytes=4 * ground.target.n_embd, prompt=experiment.prompt, tokens=experiment.tokens,
        direct_cancel=experiment.direct_cancel and policy is not Policy.PUBLISHED,
        context=experiment.context, draft_attention=attention_time(
            ground.draft, [ground.drafter], ground.draft.n_layers, experiment)),
        split, tuple(memory), pinned, row_cost,
        tuple((rows, max(stage.seconds(rows) for stage in stages) / slowest)
              for rows in CURVE_ROWS))


def draft_bytes(draft: ModelProfile, experiment: Experiment) -> float:
    """Bytes of a draft with its cache."""
    return draft.total_bytes + cache_bytes(draft, experiment) * draft.n_layers


def run(profiles: Profiles, experiment: Experiment) -> tuple[Built, Result]:
    """Emulate an experiment in virtual time."""
    built = build(profiles, experiment)
    return built, simulate(built.scenario, controller_of(built, experiment))


def synchronous_grid(experiment: Experiment) -> list[Experiment]:
    """The experiment as synchronous speculation, with every tree and cutoff that it leaves open."""
    chosen = dict(experiment.limits)
    trees = [chosen["tree_max"]] if "tree_max" in chosen else TREES
    cutoffs = [chosen["p_min"]] if "p_min" in chosen else CUTOFFS
    return [
        replace(experiment, policy=Policy.SPECULATIVE.value, limits=tuple(
            {**chosen, "tree_max": tree, "p_min": cutoff}.items()))
        for tree, cutoff in itertools.product(trees, cutoffs)
    ]


def controller_of(built: Built, experiment: Experiment) -> Controller | None:
    """What tunes this run, None when nothing does."""
    if not experiment.adapt or experiment.policy != Policy.PIPEINFER:
        return None
    limits, share = built.scenario.limits, 0.0
    if limits.time_sharing:  # as `controller_for` does for a job
        share = built.scenario.draft(1) / max(stage.seconds(1) for stage in built.scenario.stages)
        if never_pays(built.curve, share, limits, free=False):
            limits = structs.replace(limits, path_min=NEVER)
    controller = Controller(limits, built.pinned, built.curve, draft_share=share)
    return controller if controller.active else None


def load_of(target: ModelProfile, cache_per_layer: float) -> Load:
    """The layers as the planner sees them; costs in bytes that one row uses."""
    n = target.n_layers
    return Load(
        costs=(float(target.active_layer_bytes),) * n,
        sizes=(target.layer_bytes + cache_per_layer,) * n,
        first_bytes=float(target.embedding_bytes), last_cost=float(target.output_bytes),
        last_bytes=float(target.output_bytes), scratch=float(_SCRATCH),
    )


def _split(stages: Sequence[NodeProfile], factors: Sequence[float], ground: Ground,
           experiment: Experiment) -> Split:
    target = ground.target
    load = load_of(target, cache_bytes(target, experiment))
    size = 1e9  # members are as the planner sees them: seconds per byte for a run of one row
    members = [
        Member(node.title,
               factor * (node.seconds(size, target.quantisation, 1) - node.overhead) / size,
               factor * node.overhead, float(node.memory), optional=True)
        for node, factor in zip(stages, factors, strict=True)]
    if experiment.split == "planned":
        judge = Judge({}, {}, (LoadMix(Policy(experiment.policy), acceptance=ground.acceptance),),
                      link=ground.wire.latency)
        return choose(load, members, lambda split: judge(split, range(len(members))))[0]
    each, more = divmod(target.n_layers, len(stages))
    return measure(load, members, [each + (k < more) for k in range(len(stages))])


def cache_bytes(model: ModelProfile, experiment: Experiment) -> float:
    """Bytes of a layer's cache for the experiment's context."""
    return model.kv_bytes_per_token / model.n_layers * (
        experiment.context + experiment.prompt + experiment.tokens + 64)


def attention_time(
    model: ModelProfile, nodes: Sequence[NodeProfile], n_layers: int,
    experiment: Experiment, factor: float = 1.0, shares: Sequence[float] = (1.0,),
) -> Callable[[int, int], float]:
    """What attention adds to a run (`VirtualStage.attention`); nothing without a context. shares:
    of the heads that each of the nodes has."""
    def seconds(cells: int, longest: int) -> float:
        products, n_bytes = model.attention_of(cells, longest)
        return factor * n_layers * max(node.attention_seconds(share * products, share * n_bytes)
                                       for node, share in zip(nodes, shares, strict=True))

    return seconds if experiment.context else no_attention


def _stage_time(target: ModelProfile, node: NodeProfile, n_layers: int, factor: float, *,
                last: bool) -> Any:
    return lambda rows: factor * target.stage_seconds(node, n_layers, rows, last=last)


def draft_time(draft: ModelProfile, head: NodeProfile, *, one_layer: bool = False) -> Any:
    """The seconds of a draft's decode by rows. one_layer: of a prediction head, most of whose time
    is its output matrix, which rows of a path do not need."""
    def seconds(rows: int) -> float:
        few = min(rows, _OUTPUTS) if one_layer else rows
        output = draft.stage_seconds(head, draft.n_layers, few, last=True) - \
            draft.stage_seconds(head, draft.n_layers, few, last=False)
        return draft.stage_seconds(head, draft.n_layers, rows, last=False) + output

    return seconds


def limits_of(policy: Policy, n_stages: int, row_cost: float, experiment: Experiment
            ) -> tuple[Limits, frozenset[str]]:
    """Starting limits: what the runtime would start with, and what the experiment sets."""
    credit, sizes = n_stages + 1, sizes_for(row_cost)
    chosen: dict[str, Any] = dict(experiment.limits)
    base = Limits(
        n_ctx=experiment.prompt + experiment.tokens + 8, policy=policy,
        ablations=frozenset(Ablation(name) for name in experiment.ablate), chunk=CHUNK,
        exact_width=EXACT, credit=credit, partitions=max(16, 2 * credit),
        draft_max=sizes["draft_max"], tree_max=sizes["tree_max"],
        join_tip=sizes["join_tip"] and n_stages <= JOIN_UP_TO,
        alternatives=alternatives_for(credit), path_min=cutoff(credit),
        p_min=0.4 if policy is Policy.SPECULATIVE else 0.0,
    )
    if policy is Policy.PUBLISHED:
        paths = int(chosen.get("branches", 1))
        base = structs.replace(base, **PUBLISHED, partitions=base.partitions * paths)
    unknown = [name for name in chosen if not hasattr(base, name)]
    if unknown:
        raise UsageError(f"there is no limit named {', '.join(unknown)}")
    if not all(math.isfinite(value) for value in chosen.values()):
        raise UsageError("limits must be finite numbers")
    return structs.replace(base, **chosen), frozenset(chosen)
