"""Chooses the proposers and the policy, from the options and the available models.

Depends on options, strategies and models' headers. Sizes follow from the choice (`sizing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeinfer.backends.factory import backend_for
from pipeinfer.cluster import features
from pipeinfer.cluster.draft_ranks import PlacedProposer
from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.core.grid import parse_widths
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.architectures import declared
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.models.layers import has_windows, keeps_state
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, class_of

_STATES, _REQUESTS = 8, 4  #: copies of a state for speculative runs; requests at a time


def for_state(config: JobConfig, model: Any, *, in_turns: bool = False) -> JobConfig:
    """Return the config, restricted if the model's layers keep a recurrent state.

    No part of such a state can be removed again, so each speculative run has a copy of it. Every
    sequence costs memory for a state. Where copies are not exact, there is one sequence.

    in_turns: whether draft and target compute one after the other, so that a request has one run in
        flight.
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
        own["partitions"] = parallel + 1 if in_turns else _STATES
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
    ranks: 1 for ranks that take turns. heads: whether the stages give rows to a head.
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
