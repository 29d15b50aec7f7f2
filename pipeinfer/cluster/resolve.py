"""Resolves options: from a config, the model's header and the ranks' facts, what a job is.

Pure: it contacts no rank, measures nothing and loads no weights. The order of the steps in
`resolve` is the only place that says which decision depends on which. Sizes follow later from what
the stages measure (`sizing`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from pipeinfer.backends.factory import backend_for, backends_of
from pipeinfer.cluster import features
from pipeinfer.cluster.draft_ranks import PlacedProposer, placed
from pipeinfer.cluster.sizing import JOIN_UP_TO
from pipeinfer.config import Config, JobConfig, SpeculationConfig
from pipeinfer.core.grid import parse_widths
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.architectures import declared
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.layers import has_windows, keeps_state
from pipeinfer.models.shard import check_splittable
from pipeinfer.nodes import RankInfo
from pipeinfer.scheduler.controller import TUNABLE
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, Resource, class_of

_STATES, _REQUESTS = 8, 4  #: copies of a state for speculative runs; requests at a time


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
            one.resource for one in self.proposers
            if one.resource is not None and not one.elsewhere]


class JobPlan(Drafting, frozen=True):
    """What a job is.

    time_sharing: whether ranks share the cores of one host in time
    chains: whether each request has one chain of speculative tokens, see `on_gpus`
    gaps: whether positions may leave gaps
    backends: of the stages
    stages: the most that there may be
    """

    time_sharing: bool
    chains: bool
    gaps: bool
    backends: tuple[str, ...]
    stages: int


def resolve(config: JobConfig, facts: JobFacts) -> JobPlan:
    """Return what a job with these options is. Raises UsageError and ModelError."""
    features.check(Config(job=config))
    model, hosts, size = facts.model, facts.hosts, len(facts.hosts)
    backends = tuple(backends_of(config, model, list(hosts)))
    if "torch" in backends and features.used(["-mm"], Config(job=config)):
        raise UsageError("--mmproj: pictures need stages on llama.cpp: leave out --backend torch")
    sharing, would = (shares_cores(one, hosts, backends, facts.numa_nodes)
                    for one in (config, config.replace(ablate=())))
    config = config if sharing else config.replace(turns="off")
    config = for_state(config, model, time_sharing=sharing or size == 1)
    chosen = choose(config, facts, backends, time_sharing=sharing)
    config, policy = chosen.config, chosen.policy
    chains = on_gpus(config, model, hosts)
    config = for_chains(config) if chains else config
    check_ablation(config, policy, size, time_sharing=sharing or would)
    check_proposers(config.speculation, model, backends)
    method = config.speculation.decomposer
    gaps = bool(method) and registry.decomposer(method).gaps and "llamacpp" in backends
    if gaps:
        GapModel(model)  # raises if the model cannot have gaps
    features.check_found({features.GAPS: gaps, features.HEAD: bool(chosen.taps)}, config)
    stages = size if config.cluster.head_stage or size == 1 else size - 1
    if stages > 1 and "llamacpp" in backends:
        check_splittable(model)
    return JobPlan(config, policy, chosen.proposers, sharing, chains, gaps, backends, stages)


def idle_node(facts: JobFacts, stages: int) -> list[str]:
    """Return a note if rank 0 keeps a NUMA node of the job's only host from layers."""
    if facts.numa_nodes < 2 or len({one.host for one in facts.hosts}) > 1 \
            or stages == len(facts.hosts):
        return []
    return ["the cores of rank 0's NUMA node compute no layers: --head-stage gives it some, and "
            "--grid auto cuts layers where that is faster"]


def choose(config: JobConfig, facts: JobFacts, backends: tuple[str, ...], *, time_sharing: bool,
           heads: bool = True) -> Drafting:
    """Return how a job proposes tokens: what the user named, else lookup, head and draft.

    heads: whether the stages give rows to a head
    Raises UsageError, ModelError.
    """
    asked = Asked(config, facts.model, facts.draft, backends)
    config = with_usual(asked, 1 if time_sharing else len(facts.hosts), heads=heads)
    found = placed(structs.replace(asked, config=config), facts.hosts)
    return Drafting(config, choose_policy(config, found), found)


# --- time sharing -----------------------------------------------------------------------------


def shares_cores(config: JobConfig, hosts: Sequence[RankInfo], backends: Collection[str],
                numa_nodes: int) -> bool:
    """Whether all ranks take turns with all cores of the host that they share (time sharing).

    Over several hosts, a pipeline computes a run at every stage at the same time. Where all ranks
    share the cores of one host this gains nothing: a run takes as long as on all cores together,
    and a wrong speculative token takes cores from a right one. There, draft and stages compute one
    after the other, each with all cores, and a speculative token has to pay for its row.
    They do not if an option excludes it (`features.TIME_SHARING`), if the nodes file binds threads,
    if sums are split by threads (torch), or if the host has several NUMA nodes.
    backends: of the stages. numa_nodes: of rank 0's host.
    """
    ranks = [one for one in hosts if not one.dead]
    if config.cluster.turns == "off" or len(ranks) < 2 or len({one.host for one in ranks}) > 1 \
            or numa_nodes > 1 or set(backends) != {"llamacpp"} \
            or any(one.settings.drafts for one in ranks[1:]) \
            or features.excluding(features.TIME_SHARING, config):
        return False
    if any(one.settings.bound or one.settings.on_gpu for one in ranks):
        return False
    return min(one.cores_host for one in ranks) > max(one.cores for one in ranks)


# --- proposers and the policy -----------------------------------------------------------------


def for_state(config: JobConfig, model: Any, *, time_sharing: bool = False) -> JobConfig:
    """Return the config, restricted if the model's layers keep a recurrent state.

    No part of such a state can be removed again, so each speculative run has a copy of it. Every
    sequence costs memory for a state. Where copies are not exact, there is one sequence.

    time_sharing: whether draft and target compute one after the other, so that a request has one
        run in flight.
    Other models get the same config back. Raises UsageError for options that need more.
    """
    if not keeps_state(model):
        return config
    if found := features.excluding(features.STATE, config):
        raise UsageError(
            f"{model.path.name}: layers of a {model.architecture} keep a state of the text, of "
            "which llama.cpp cannot take a part back: leave out " + " and ".join(found))
    own: dict[str, Any] = {}
    if declared(model.architecture).one_sequence:
        asked = {f"--policy {config.speculation.policy}":
                 config.speculation.policy not in ("", Policy.ITERATIVE),
                 "--parallel": "parallel" in config.given and config.speculation.parallel > 1}
        if found := [name for name, there in asked.items() if there]:
            raise UsageError(
                f"{model.path.name}: llama.cpp gives the tokens of plain decoding of a "
                f"{model.architecture} for one sequence at a time alone: leave out "
                + " and ".join(found))
        return config.replace(policy=str(Policy.ITERATIVE), parallel=1, prefix_cache=False,
                              partitions=0)
    parallel = config.speculation.parallel
    if "parallel" not in config.given:
        parallel = own["parallel"] = min(parallel, _REQUESTS)
    if config.speculation.partitions < 0:
        own["partitions"] = parallel + 1 if time_sharing else _STATES
    return config.replace(**own) if own else config


def on_gpus(config: JobConfig, model: Any, hosts: Sequence[RankInfo]) -> bool:
    """Return whether stages on GPUs pad their decodes (`backends.llamacpp.padded`), which needs
    every lane's tokens to be a chain with a part of the cache for itself."""
    own = config.speculation
    there = any(one.gpu_layers(config) and backend_for(one.asked_backend, model.path) == "llamacpp"
                for one in hosts)
    other = config.cluster.grid or own.decomposer \
        or registry.inline(own) is not None or Ablation.MULTIBUFFER in own.ablate
    return there and config.model.exact == "on" and not (
        other or keeps_state(model) or has_windows(model))


def for_chains(config: JobConfig) -> JobConfig:
    """Return the config with fewer requests at a time, unless their number is given: each has
    cells for a whole context."""
    few = min(config.speculation.parallel, _REQUESTS)
    return config if "parallel" in config.given else config.replace(parallel=few)


def with_usual(asked: Asked, ranks: int, *, heads: bool = True) -> JobConfig:
    """Return the config, with the proposers of a job whose user has chosen none.

    Prompt lookup is one of them if that costs next to nothing: over several stages without a draft,
    with a draft, and on one rank, where every speculative token has to pay for its row. A
    prediction head is one if the target has one, and a draft model that comes along.
    ranks: 1 for ranks that share cores in time. heads: whether the stages give rows to a head.
    """
    config, given = asked.config, asked.config.speculation
    if registry.named(given) or given.speculation == "off":
        return config
    why = set(features.excluding(features.LOOKUP, config))
    if ranks < 2:
        lookup = not why and not features.excluding(features.LOOKUP_ALONE, config)
    else:
        lookup = not why and (asked.draft is not None or most_stages(config, ranks) > 1)
    if asked.draft is None:
        why.discard(f"--policy {Policy.PUBLISHED}")  # that needs one source of draft tokens
    heads = heads and not why and not config.speculation.decomposer
    names, own = [], dict(config.speculation.own)
    for spec in registry.usual():
        kind = class_of(spec)
        if kind is None:
            used: Mapping[str, Any] | None = {} if lookup else None
        else:
            used = None if kind.reads_rows and not heads else kind.usual(asked)
            heads = heads and not (kind.reads_rows and used is not None)  # one head
        if used is not None:
            names.append(spec.name)
            own |= used
    return config.replace(proposer=tuple(names), own=own) if names else config


def most_stages(config: JobConfig, ranks: int) -> int:
    """Return how many stages the job has at most."""
    if config.cluster.grid not in ("", "auto"):
        return len(parse_widths(config.cluster.grid))
    return max(1, ranks if config.cluster.head_stage else ranks - 1)


def choose_policy(config: JobConfig, found: Sequence[PlacedProposer]) -> Policy:
    """Return the policy of a config that `features.check` accepts.

    found: the proposers that threads call
    Raises UsageError if a proposer or a policy lacks what it needs.
    """
    if config.speculation.speculation == "off":
        return Policy.ITERATIVE
    named = registry.named(config.speculation)
    for spec in named:
        if spec.adapter and not registry.adapter_of(spec, config.speculation):
            raise UsageError(f"--proposer {spec.name} needs an adapter: give one with "
                             f"--{spec.adapter.replace('_', '-')}")
    guesses = bool(found) or bool(named)
    _check_components(config.speculation)
    inline = registry.inline(config.speculation)
    synchronous = inline is not None and inline.synchronous
    if config.speculation.policy:
        policy = Policy(config.speculation.policy)
        if policy is not Policy.ITERATIVE and not guesses:
            raise UsageError(f"--policy {policy} needs a draft model (-md) or another --proposer")
    elif synchronous:
        policy = Policy.SPECULATIVE
    else:
        policy = Policy.PIPEINFER if guesses else Policy.ITERATIVE
    return policy


def _check_components(config: SpeculationConfig) -> None:
    """Raise UsageError for an --ablate component that the policy does not have."""
    policy = Policy(config.policy or Policy.PIPEINFER)
    for name in config.ablate:
        if COMPONENTS[policy] and Ablation(name) not in COMPONENTS[policy]:
            others = ", ".join(one for one, parts in COMPONENTS.items() if name in parts)
            raise UsageError(f"--ablate {name} names no component of --policy {policy} (it has "
                             f"{', '.join(COMPONENTS[policy])}), but one of {others}")


def check_proposers(config: SpeculationConfig, model: Any, backends: Sequence[str]) -> None:
    """Check, before any stage loads, that the stages support the proposers.

    backends: of the stages. Raises UsageError or ModelError.
    """
    for spec in registry.proposers().values():
        path = registry.adapter_of(spec, config)
        if not path and spec not in registry.named(config):
            continue
        learned = load_bita(path) if path else None
        bound = learned is None or learned.n_prompts > 0
        if bound and spec.backends and not set(backends) <= spec.backends:
            raise UsageError(f"--proposer {spec.name} does not work with stages on "
                             f"{', '.join(sorted(set(backends) - spec.backends))}: {spec.why}")
        if learned is not None:
            learned.check(model.n_layers, model.n_embd)


def check_ablation(config: JobConfig, policy: Policy, ranks: int, *, time_sharing: bool) -> None:
    """Raise UsageError, with what to add, if --ablate would change more than its components.

    time_sharing: whether the ranks would share cores in time without --ablate.
    """
    own = config.speculation
    if not own.ablate:
        return
    asked = " ".join(f"--ablate {name}" for name in own.ablate)
    if not COMPONENTS[policy]:
        raise UsageError(f"{asked} has nothing to leave out: policy {policy} has no components "
                         "(pipeinfer and published have; both need -md or --proposer)")
    if policy is Policy.PUBLISHED:
        return
    more = ["--set turns=off"] if time_sharing else []
    if own.adapt and not TUNABLE.issuperset(own.ablate):
        more.append("--set adapt=false")
    # one rank takes turns and looks up unless an option of overlapping runs is given; a tip that
    # waits for its tokens is synchronous speculation
    joins = Ablation.CONTINUOUS in own.ablate and own.tip == "auto" \
        and most_stages(config, ranks) <= JOIN_UP_TO
    alone = ranks == 1 and not features.excluding(features.LOOKUP_ALONE, config.replace(ablate=()))
    if joins or alone:
        more.append("--set tip=alone")
    if more:
        raise UsageError(f"{asked} would change more than that: add {' '.join(more)}, here and to "
                         "the run that you compare with (`pipeinfer ablate` does both)")
