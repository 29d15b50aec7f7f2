"""Resolves options: from a config, the model's header and the ranks' facts, what a job is.

Pure: it contacts no rank, measures nothing and loads no weights. The order of the steps in
`resolve` is the only place that says which decision depends on which. Sizes follow later from what
the stages measure (`sizing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from pipeinfer.backends.factory import backends_of
from pipeinfer.cluster import features
from pipeinfer.cluster.comparable import check_ablation
from pipeinfer.cluster.draft_ranks import OwnProposer, own_proposers
from pipeinfer.cluster.heads import HeadPlan, check_heads, head_for, with_head
from pipeinfer.cluster.policy_choice import (
    check_proposers,
    choose_policy,
    draft_model,
    for_chains,
    for_state,
    on_gpus,
    with_lookup,
)
from pipeinfer.cluster.turns import takes_turns
from pipeinfer.config import Config, JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.shard import check_splittable
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry


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
    head: the target's prediction head; None where no proposer needs one
    """

    config: JobConfig
    policy: Policy
    head: HeadPlan | None


class JobPlan(Drafting, frozen=True):
    """What a job is.

    turns: whether ranks take turns on the cores of one host
    chains: whether each request has one chain of speculative tokens, see `on_gpus`
    gaps: whether positions may leave gaps
    own: proposers of single ranks
    draft: the draft model to load; None without one
    backends: of the stages
    stages: the most that there may be
    """

    turns: bool
    chains: bool
    gaps: bool
    own: tuple[OwnProposer, ...]
    draft: Path | None
    backends: tuple[str, ...]
    stages: int


def resolve(config: JobConfig, facts: JobFacts) -> JobPlan:
    """Return what a job with these options is. Raises UsageError and ModelError."""
    features.check(Config(job=config))
    model, draft, hosts, size = facts.model, facts.draft, facts.hosts, len(facts.hosts)
    backends = backends_of(config, model, list(hosts))
    turns, would = (takes_turns(one, hosts, backends, facts.numa_nodes)
                    for one in (config, config.replace(ablate=())))
    config = config if turns else config.replace(turns="off")
    config = for_state(config, model, in_turns=turns or size == 1)
    own = own_proposers(config, list(hosts), draft)
    chosen = choose(config, facts, backends, turns=turns, own=bool(own))
    config, policy = chosen.config, chosen.policy
    chains = on_gpus(config, model, hosts)
    config = for_chains(config) if chains else config
    check_ablation(config, policy, size, turns=turns or would)
    check_proposers(config.speculation, model, backends)
    check_heads(own, chosen.head)
    method = config.speculation.decomposer
    gaps = bool(method) and registry.decomposer(method).gaps and "llamacpp" in backends
    if gaps:
        GapModel(model)  # raises if the model cannot have gaps
    if gaps and chosen.head is not None:
        raise UsageError(f"--decomposer {method} leaves gaps between positions, and stages that "
                         "can do so give no rows to a prediction head: leave out --proposer "
                         f"{chosen.head.kind}")
    stages = size if config.cluster.head_stage or size == 1 else size - 1
    if stages > 1 and "llamacpp" in backends:
        check_splittable(model)
    return JobPlan(config, policy, chosen.head, turns, chains, gaps, tuple(own),
                    draft_model(config, draft, policy), tuple(backends), stages)


def choose(config: JobConfig, facts: JobFacts, backends: Sequence[str], *, turns: bool,
           own: bool = False, heads: bool = True) -> Drafting:
    """Return how a job proposes tokens: what the user named, else lookup, head and draft.

    own: whether ranks have proposers of their own
    heads: whether the stages give rows to a head
    Raises UsageError, ModelError.
    """
    found = with_lookup(config, facts.draft, 1 if turns else len(facts.hosts))
    if heads:
        found = with_head(config, found, facts.model, facts.draft, backends)
    return Drafting(found, choose_policy(found, facts.draft, own=own),
                  head_for(found, facts.model, backends))
