"""Chooses the proposers and the policy, from the options and the available models.

Depends on options, strategies and models' headers. Sizes follow from the choice (`sizing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeinfer.config import NO_DRAFT, JobConfig, SpeculationConfig
from pipeinfer.core.grid import parse_widths
from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.architectures import keeps_state
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.models.locate import find
from pipeinfer.strategies import registry
from pipeinfer.strategies.spec import Need

LOOKUP = "prompt-lookup"  #: the proposer that copies from texts


def for_state(config: JobConfig, model: Any) -> JobConfig:
    """Return the config, restricted if the model's layers keep a recurrent state.

    Nothing of such a state can be removed again. So there is one request at a time, without
    speculative tokens and without a prefix cache. Other models get the same config back. Raises
    UsageError for options that need more.
    """
    if not keeps_state(model):
        return config
    asked = {
        "-md": config.model.draft_model,
        "--policy": config.speculation.policy not in ("", Policy.ITERATIVE),
        "--proposer": registry.named(config.speculation),
        "--decomposer": config.speculation.decomposer,
    }
    if named := [flag for flag, value in asked.items() if value]:
        raise UsageError(
            f"{model.path.name}: layers of a {model.architecture} keep a state of the text, of "
            "which llama.cpp cannot take guesses back or copy a part: leave out "
            f"{' and '.join(named)}")
    return config.replace(policy=Policy.ITERATIVE, parallel=1, prefix_cache=False)


def with_lookup(config: JobConfig, draft: Path | None, ranks: int) -> JobConfig:
    """Return the config, with prompt lookup added before the draft if that costs next to
    nothing.

    It is added only if the user has not chosen proposers: over several stages without a draft,
    with a draft, and on one rank, where every speculative token has to pay for its row. The
    paper's policy uses the draft alone. ranks: 1 for ranks that take turns.
    """
    own, grid = config.speculation, config.cluster.grid
    if own.proposer or own.speculation == "off" or own.layout == "replicate" \
            or registry.named(own) or config.model.draft_model == NO_DRAFT \
            or own.policy in (Policy.ITERATIVE, Policy.PUBLISHED):
        return config
    if ranks < 2:
        if own.policy == Policy.SPECULATIVE or overlaps(own) or not weighs(own):
            return config
    elif draft is None:
        most = ranks if config.cluster.head_stage else ranks - 1
        if (len(parse_widths(grid)) if grid not in ("", "auto") else most) < 2:
            return config
    return config.replace(proposer=(LOOKUP,) if draft is None else (LOOKUP, "draft"))


def overlaps(config: SpeculationConfig) -> bool:
    """Whether an option was given that only applies to speculation during the target's runs."""
    return bool(config.credit or config.draft_max or config.tip != "auto" or config.ablate
                or config.alternatives >= 0 or config.path_min >= 0)


def weighs(config: SpeculationConfig) -> bool:
    """Whether speculative tokens have to pay for their rows where draft and target take turns."""
    return config.adapt and config.speculation == "auto" and not config.tree_max


def choose_policy(config: JobConfig, draft: Path | None) -> Policy:
    """Return the policy of a config. Raises UsageError if its options contradict each other."""
    if config.speculation.layout == "replicate":
        _check_replicas(config)
        return Policy.SPECULATIVE
    if config.speculation.speculation == "off":
        if config.speculation.policy not in ("", Policy.ITERATIVE):
            raise UsageError(
                f"--speculation off and --policy {config.speculation.policy} contradict each "
                "other: leave one out"
            )
        return Policy.ITERATIVE
    named = registry.named(config.speculation)
    for spec in named:
        if Need.DRAFT in spec.needs and draft is None:
            raise UsageError(f"--proposer {spec.name} needs a draft model: give one with -md")
        if spec.adapter and not registry.adapter_of(spec, config.speculation):
            raise UsageError(f"--proposer {spec.name} needs an adapter: give one with "
                             f"--{spec.adapter.replace('_', '-')}")
    guesses = draft is not None or bool(named)
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
    if inline is not None and policy is Policy.PUBLISHED:
        raise UsageError(f"--policy published issues one chain of a draft's guesses, so it cannot "
                         f"be combined with --proposer {inline.name}: leave one out")
    return policy


def _check_components(config: SpeculationConfig) -> None:
    """Raise UsageError for an --ablate component that the policy does not have."""
    policy = Policy(config.policy or Policy.PIPEINFER)
    for name in config.ablate:
        if COMPONENTS[policy] and Ablation(name) not in COMPONENTS[policy]:
            others = ", ".join(one for one, parts in COMPONENTS.items() if name in parts)
            raise UsageError(f"--ablate {name} names no component of --policy {policy} (it has "
                             f"{', '.join(COMPONENTS[policy])}), but one of {others}")


def _check_replicas(config: JobConfig) -> None:
    """Raise UsageError for options that have no meaning with --layout replicate."""
    wrong = {
        "--policy": config.speculation.policy not in ("", Policy.SPECULATIVE),
        "--proposer": not all(s.replicable for s in registry.named(config.speculation)),
        "-md": config.model.draft_model not in ("", NO_DRAFT),
        "-hfd": config.model.hf_repo_draft,
        "-mds": config.model.draft_small,
        "an adapter": registry.adapter(config.speculation),
        "--decomposer": config.speculation.decomposer,
        "--layers": config.cluster.layers,
        "--speculation": config.speculation.speculation == "off",
        "--ablate": config.speculation.ablate,
    }
    if found := [name for name, given in wrong.items() if given]:
        raise UsageError("--layout replicate distributes the rows of lookahead decoding; it cannot "
                         f"be combined with {', '.join(found)}")


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


def draft_models(config: JobConfig, draft: Path | None, policy: Policy) -> list[Path]:
    """Return the draft models to load, the smallest first. Raises UsageError."""
    named = registry.named(config.speculation)
    wanted = not named or any(Need.DRAFT in spec.needs for spec in named)
    if (
        policy is Policy.ITERATIVE
        or draft is None
        or not wanted
        or config.speculation.layout == "replicate"
    ):
        return []
    if not config.model.draft_small:
        return [draft]
    return [find(config.model.draft_small, offline=config.model.offline).path, draft]
