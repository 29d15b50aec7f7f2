"""The registry of strategies: the built-in ones and those of other packages.

The command line, the API, the comparison and the start of a job read names, choices, needs and
options here, so that none of them contains the name of a strategy.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from pipeinfer.config import OwnOption, SpeculationConfig
from pipeinfer.errors import UsageError
from pipeinfer.loading import plug_ins
from pipeinfer.strategies.spec import DecomposerSpec, ProposerSpec

Spec: TypeAlias = ProposerSpec | DecomposerSpec

GROUP = "pipeinfer.strategies"  #: entry points of other packages
BUILT_IN = (
    "pipeinfer.strategies.proposers.draft_model:SPEC",
    "pipeinfer.strategies.proposers.target_head:SPEC",
    "pipeinfer.strategies.proposers.target_head:EAGLE",
    "pipeinfer.strategies.proposers.dflash:SPEC",
    "pipeinfer.strategies.proposers.prompt_lookup:SPEC",
    "pipeinfer.strategies.proposers.lookahead:SPEC",
    "pipeinfer.strategies.proposers.draft_lookahead:SPEC",
    "pipeinfer.strategies.proposers.bita:SPEC",
    "pipeinfer.strategies.decomposers.pasta:SPEC",
    "pipeinfer.strategies.decomposers.pdos:SPEC",
    "pipeinfer.strategies.decomposers.skeleton:SPEC",
    "pipeinfer.strategies.decomposers.apar:SPEC",
    "pipeinfer.strategies.decomposers.pdos:CHAIN_OF_DRAFT",
    "pipeinfer.strategies.decomposers.pdos:DRAFTS",
    "pipeinfer.strategies.decomposers.pdos:PLAIN",
)


@cache
def specs() -> Mapping[str, Spec]:
    """Return every strategy by name, the built-in ones first.

    Raises UsageError for a plug-in that cannot be loaded, is no strategy, or reuses a name.
    """
    found: dict[str, Spec] = {}
    for name in BUILT_IN:
        _add(found, pkgutil.resolve_name(name), name)
    for entry in plug_ins(GROUP):
        try:
            spec = entry.load()
        except Exception as error:
            raise UsageError(f"the strategy {entry.name} ({entry.value}) cannot be loaded: {error}"
                             ) from error
        _add(found, spec, entry.value)
    return found


def _add(found: dict[str, Spec], spec: Any, where: str) -> None:
    if not isinstance(spec, Spec):
        raise UsageError(f"{where} is not a strategy: it must be a ProposerSpec or "
                         "a DecomposerSpec")
    if spec.name in found:
        raise UsageError(f"{where} describes a second strategy named {spec.name}")
    found[spec.name] = spec


def proposers() -> Mapping[str, ProposerSpec]:
    """Return all proposers by name. Raises UsageError for a broken plug-in."""
    return {name: spec for name, spec in specs().items() if isinstance(spec, ProposerSpec)}


def decomposers() -> Mapping[str, DecomposerSpec]:
    """Return all decomposers by name. Raises UsageError for a broken plug-in."""
    return {name: spec for name, spec in specs().items() if isinstance(spec, DecomposerSpec)}


def decomposer(name: str) -> DecomposerSpec:
    """Return the decomposer with this name. Raises UsageError if there is none."""
    known = decomposers()
    if name not in known:
        raise UsageError(f"there is no decomposer {name!r}: choose from {', '.join(known)}")
    return known[name]


def own_options() -> Mapping[str, OwnOption]:
    """Return the strategies' own options by name; strategies may share one. Raises UsageError for
    two of the same name."""
    found: dict[str, OwnOption] = {}
    for spec in specs().values():
        if twice := {name for name, own in spec.options.items()
                     if found.get(name, own) is not own}:
            raise UsageError(f"two strategies have an option {', '.join(sorted(twice))}")
        found |= spec.options
    return found


def values_of(spec: Spec, config: SpeculationConfig) -> dict[str, Any]:
    """Return the values of a strategy's own options: those of `config`, else their defaults."""
    return {name: config.own.get(name, own.default) for name, own in spec.options.items()}


def named(config: SpeculationConfig) -> tuple[ProposerSpec, ...]:
    """Return the proposers that `config` names, in its order.

    Where it names none, these are the proposers whose adapter it names. Raises UsageError for an
    unknown proposer.
    """
    known = proposers()
    if wrong := [name for name in config.proposer if name not in known]:
        raise UsageError(f"there is no proposer {wrong[0]!r}: choose from {', '.join(known)}")
    if config.proposer:
        return tuple(known[name] for name in config.proposer)
    return tuple(spec for spec in known.values() if adapter_of(spec, config))


def usual() -> list[ProposerSpec]:
    """Return the proposers that a job may use whose user names none, the quickest first."""
    return sorted((spec for spec in proposers().values() if spec.usual),
                  key=lambda spec: spec.usual)


def free(config: SpeculationConfig) -> bool:
    """Return whether `config` names a proposer that evaluates nothing, in the draft's thread."""
    return any(spec.worker is not None and not spec.resource for spec in named(config))


def adapter_of(spec: ProposerSpec, config: SpeculationConfig) -> str:
    """Return the path of a proposer's adapter; empty where none is given or needed."""
    return str(values_of(spec, config)[spec.adapter]) if spec.adapter else ""


def inline(config: SpeculationConfig) -> ProposerSpec | None:
    """Return the inline proposer that `config` uses, the first that it names; None without any."""
    return next((spec for spec in named(config) if spec.inline is not None), None)


def adapter(config: SpeculationConfig) -> str:
    """Return the first adapter path that any proposer's option has; empty where none is given."""
    found = [adapter_of(spec, config) for spec in proposers().values()]
    return next(filter(None, found), "")
