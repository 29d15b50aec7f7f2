"""Resolves options: from a config, the model's header and the ranks' facts, what a job is.

Pure: it contacts no rank, measures nothing and loads no weights. The order of the steps in
`resolve` is the only place that says which decision depends on which. Sizes follow later from what
the stages measure (`sizing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from pipeinfer.backends.factory import backends_of
from pipeinfer.cluster import features
from pipeinfer.cluster.comparable import check_ablation
from pipeinfer.cluster.draft_ranks import PlacedProposer, placed
from pipeinfer.cluster.policy_choice import (
    check_proposers,
    choose_policy,
    for_chains,
    for_state,
    on_gpus,
    with_usual,
)
from pipeinfer.cluster.turns import takes_turns
from pipeinfer.config import Config, JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.shard import check_splittable
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, Resource


class JobFacts(Struct, frozen=True):
    """What a job is resolved from, besides its options.

    model: the target's header
    draft: the draft's file; None without one
    hosts: all ranks
    numa_nodes: of rank 0's host
    """

    model: Any
    draft: Path | None
    hosts: Sequence[RankInfo]
    numa_nodes: int = 1


class Drafting(Struct, frozen=True):
    """How a job proposes tokens, which may change while its stages stay loaded.

    config: with the proposers that are used
    proposers: those that threads call
    """

    config: JobConfig
    policy: Policy
    proposers: tuple[PlacedProposer, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs proposers read."""
        return next((one.taps for one in self.proposers if one.taps), ())

    @property
    def evaluated(self) -> list[Resource]:
        """What rank 0 loads for its proposers."""
        return [] if self.policy is Policy.ITERATIVE else [
            one.resource for one in self.proposers if one.resource is not None and not one.ranks]


class JobPlan(Drafting, frozen=True):
    """What a job is.

    turns: whether ranks take turns on the cores of one host
    chains: whether each request has one chain of speculative tokens, see `on_gpus`
    gaps: whether positions may leave gaps
    backends: of the stages
    stages: the most that there may be
    """

    turns: bool
    chains: bool
    gaps: bool
    backends: tuple[str, ...]
    stages: int


def resolve(config: JobConfig, facts: JobFacts) -> JobPlan:
    """Return what a job with these options is. Raises UsageError and ModelError."""
    features.check(Config(job=config))
    model, hosts, size = facts.model, facts.hosts, len(facts.hosts)
    backends = tuple(backends_of(config, model, list(hosts)))
    turns, would = (takes_turns(one, hosts, backends, facts.numa_nodes)
                    for one in (config, config.replace(ablate=())))
    config = config if turns else config.replace(turns="off")
    config = for_state(config, model, in_turns=turns or size == 1)
    chosen = choose(config, facts, backends, turns=turns)
    config, policy = chosen.config, chosen.policy
    chains = on_gpus(config, model, hosts)
    config = for_chains(config) if chains else config
    check_ablation(config, policy, size, turns=turns or would)
    check_proposers(config.speculation, model, backends)
    method = config.speculation.decomposer
    gaps = bool(method) and registry.decomposer(method).gaps and "llamacpp" in backends
    if gaps:
        GapModel(model)  # raises if the model cannot have gaps
    features.check_found({features.GAPS: gaps, features.HEAD: bool(chosen.taps)}, config)
    stages = size if config.cluster.head_stage or size == 1 else size - 1
    if stages > 1 and "llamacpp" in backends:
        check_splittable(model)
    return JobPlan(config, policy, chosen.proposers, turns, chains, gaps, backends, stages)


def choose(config: JobConfig, facts: JobFacts, backends: tuple[str, ...], *, turns: bool,
           heads: bool = True) -> Drafting:
    """Return how a job proposes tokens: what the user named, else lookup, head and draft.

    heads: whether the stages give rows to a head
    Raises UsageError, ModelError.
    """
    asked = Asked(config, facts.model, facts.draft, backends)
    config = with_usual(asked, 1 if turns else len(facts.hosts), heads=heads)
    found = placed(structs.replace(asked, config=config), facts.hosts)
    return Drafting(config, choose_policy(config, found), found)
