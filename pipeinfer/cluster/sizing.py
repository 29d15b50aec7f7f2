"""Computes the scheduler's limits from a config and measurements of the stages.

Values that the user sets are pinned: the controller does not change them. This module measures
nothing, and loads nothing but the few vectors of a BiTA adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from pipeinfer.backends.base import ALL_IDS
from pipeinfer.backends.factory import EXACT_LIMIT
from pipeinfer.cluster.features import overlaps, weighs
from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.core.policy import Ablation, CancelPath, Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.planning.judge import Curve
from pipeinfer.scheduler.controller import (
    GOOD,
    NEVER,
    Controller,
    Timing,
    alternatives_for,
    best_chain,
    cutoff,
    groups,
    least_confidence,
    weighed_by,
)
from pipeinfer.scheduler.settings import PUBLISHED, Limits, lanes_per_response
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import InlineProposer
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

NO_MODEL = 1e-3  #: a `draft_share` of proposers without a model
JOIN_UP_TO = 2  #: stages up to which `--set tip=auto` starts joined, see docs/options.md
_MOST_EXACT = 128  #: rows of the widest decode that torch tries for exactness
_MOST_GROUPED = 64  #: requests whose tokens may share a run; every further one is tried at load
_MOST_IDS = 60  #: sequence ids, which cost a backend memory
_MOST_KEPT = 32  #: prompts in the prefix cache, each with a sequence id
_THEIR_CHUNK = 512  #: llama.cpp's --ubatch-size
_USUAL = 0.7  #: acceptance that is expected of a draft
#: settings of `SpeculationConfig` that are limits of the same name, with the values by which a job
#: tunes them itself
_TUNED = {"credit": 0, "draft_max": 0, "alternatives": -1, "path_min": -1, "tree_max": 0,
          "p_split": -1}
_FURTHER_IDS = 3  #: ids that a backend adds for its own use, at most


def chunk_of(config: JobConfig) -> int:
    """Return the largest number of prompt rows in one run."""
    chunk = config.speculation.chunk
    if config.model.like_llama_cpp and "chunk" not in config.given:
        chunk = _THEIR_CHUNK
    return min(chunk, config.model.ubatch or chunk)


def row_proposer(
    config: SpeculationConfig, n_vocab: int = 0, prompt_id: int = 0, curve: Curve = (),
    width: int = 0,
) -> InlineProposer | None:
    """Return the proposer that adds rows of its own to the target's runs, None if there is none.

    n_vocab: the first id of learned tokens.
    prompt_id: the first sequence id of learned prompts.
    curve: the cost of runs of several rows.
    width: rows that may be verified together; 0: any number.
    Raises ModelError for an adapter that cannot be read.
    """
    spec = registry.inline(config)
    return None if spec is None else _make(spec, config, n_vocab, prompt_id, curve, width)


def _make(spec: ProposerSpec, config: SpeculationConfig, n_vocab: int = 0, prompt_id: int = 0,
          curve: Curve = (), width: int = 0) -> InlineProposer:
    assert spec.inline is not None
    learned = load_bita(registry.adapter_of(spec, config)) if spec.adapter else None
    return spec.inline(ProposerSetup(registry.values_of(spec, config), n_vocab, adapter=learned,
                                     prompt_id=prompt_id, given=frozenset(config.own),
                                     cost=_at_load(curve, 0.0).slot
                                     if curve and config.adapt else None, width=width))


class RowSizes(Struct, frozen=True):
    """Space that row proposers need: the maximum over all of them, see `InlineProposer`."""

    candidates: int = 0
    rows: int = 0
    paths: int = 0


def row_sizes(config: SpeculationConfig) -> RowSizes:
    """Return the space that the named row proposers may need, in use or not."""
    wanted = {spec.name: spec for spec in (*registry.named(config), registry.inline(config))
              if spec is not None and spec.inline is not None}
    found = [_make(spec, config) for spec in wanted.values()]
    return RowSizes(*(max((getattr(rows, name) for rows in found), default=0)
                      for name in ("candidates", "rows", "paths")))


def partitions_for(config: SpeculationConfig, credit: int) -> int:
    """Return the number of sequence ids besides the first of each lane."""
    if config.partitions >= 0:
        return config.partitions
    paths = config.branches if config.policy == Policy.PUBLISHED else 1
    return min(max(8, 2 * credit) * paths, _MOST_IDS) + row_sizes(config).paths


def cancel_path(config: JobConfig) -> CancelPath:
    """Return the path of cancellations; it is the same on every rank."""
    if config.cluster.cancel_path != "auto":
        return CancelPath(config.cluster.cancel_path)
    published = config.speculation.policy == Policy.PUBLISHED
    return CancelPath.BACKWARD if published else CancelPath.DIRECT


def lanes_of(config: SpeculationConfig) -> int:
    """Return how many lanes may be open at the same time."""
    return config.parallel * lanes_per_response(threads_of(config))


def threads_of(config: SpeculationConfig) -> int:
    """Return the number of response threads besides the main one."""
    return config.decompose_threads if config.decomposer else 0


def kept_for(config: SpeculationConfig, *, chains: bool = False) -> int:
    """Return the number of prompts of ended requests in the prefix cache.

    chains: whether each of them takes cells for a whole context, see `stream_cells`.
    """
    if not config.prefix_cache:
        return 0
    return max(1, config.parallel // 2) if chains else min(max(4, 2 * config.parallel), _MOST_KEPT)


def ids_for(config: SpeculationConfig, credit: int, *, chains: bool = False) -> int:
    """Return the number of sequence ids in all. Raises UsageError if llama.cpp has fewer."""
    if chains:
        return lanes_of(config) + kept_for(config, chains=True)
    count = lanes_of(config) + kept_for(config) + partitions_for(config, credit)
    if count > ALL_IDS:
        raise UsageError(
            f"--parallel {config.parallel} (with --set decompose_threads="
            f"{config.decompose_threads}, where --decomposer is given) and --set partitions="
            f"{partitions_for(config, credit)} need {count} sequence ids, but a cache has only "
            f"{ALL_IDS}: lower one of them")
    return count


def states_for(config: SpeculationConfig, n_stages: int) -> int:
    """Return the number of sequences that each have a state where layers keep one."""
    return ids_for(config, config.credit or n_stages + 1) + _FURTHER_IDS


def cells_for(config: SpeculationConfig, n_ctx: int) -> int:
    """Return the number of tokens that requests and stored prompts hold together. Raises
    UsageError."""
    if config.cache_tokens and config.cache_tokens < n_ctx:
        raise UsageError(f"--set cache_tokens={config.cache_tokens} is smaller than the context of "
                         f"one request ({n_ctx}): raise it, or lower -c")
    one = config.parallel == 1 and not config.decomposer
    return config.cache_tokens or (n_ctx if one else 2 * n_ctx)


def stream_cells(n_ctx: int) -> int:
    """Return the cells of a sequence that has a part of the cache for itself, as on GPUs: those of
    its context, and of the padding behind it."""
    return n_ctx + EXACT_LIMIT


def spare_cells(width: int, credit: int) -> int:
    """Return the number of cells for speculative tokens, in addition to `cells_for`.

    width: rows of a run. credit: runs in flight.
    """
    return width * (2 * credit + 4)


def rows_and_cells(config: JobConfig, n_ctx: int, exact: int, stages: int) -> tuple[int, int, int]:
    """Return the rows of the widest run that verifies, the rows of the widest run of all, and
    the cells of each stage's KV cache.

    exact: rows that are bit-equal. stages: at most so many.
    """
    width, hints = widths_for(config, exact)
    cells = cells_for(config.speculation, n_ctx) + spare_cells(
        width, config.speculation.credit or stages + 1) + hint_cells(config.speculation)
    return width, max(chunk_of(config), width, hints), cells


def hint_cells(config: SpeculationConfig) -> int:
    """Return the number of cells for hint rows of all lanes, and for learned prompts."""
    path = registry.adapter(config)
    learned = load_bita(path).n_prompts if path else 0
    return learned + row_sizes(config).rows * lanes_of(config)


def exact_rows(config: JobConfig) -> int:
    """Return the widest decode that torch tries for exactness: what fits the rows of a strategy in
    one run, where the user has set its sizes. (Others keep to R, since rows cost time.)"""
    spec = registry.inline(config.speculation)
    if spec is None or config.speculation.decomposer or config.model.exact != "on" or not (
            set(spec.options) - {spec.adapter}) & set(config.speculation.own):
        return EXACT_LIMIT
    sizes = row_sizes(config.speculation)
    return min(_MOST_EXACT, max(EXACT_LIMIT, 1 + sizes.candidates + sizes.rows))


def tried_rows(config: JobConfig, exact: int, *, grouped: bool) -> int:
    """Return the widest decode that stages try for exactness: one with a token of every lane.

    exact: most rows of a run that a request has for itself. grouped: whether requests share runs.
    """
    return max(exact, min(lanes_of(config.speculation), _MOST_GROUPED)) if grouped else exact


def widths_for(config: JobConfig, exact: int) -> tuple[int, int]:
    """Return the rows of the widest run that verifies, and of the widest run of hint rows.

    exact: rows that are bit-equal.
    """
    sizes = row_sizes(config.speculation)
    if config.model.exact == "on":
        return exact, sizes.rows
    guesses = max(config.speculation.tree_max, sizes.candidates + sizes.rows)
    return max(exact, guesses + 1, config.speculation.draft_max), sizes.rows


def limits_for(
    config: SpeculationConfig, policy: Policy, sizes: Mapping[str, Any], *, n_ctx: int, chunk: int,
    exact: int, n_stages: int, curve: Curve, spare: int, draft_share: float = 0.0,
) -> tuple[Limits, frozenset[str]]:
    """Return the limits to start with, and the names of those that the user set.

    sizes: defaults that depend on the row cost.
    n_ctx: context of a request, in tokens. chunk: prompt rows in one run.
    exact: R, rows that may be verified together.
    curve: the cost of runs of several rows.
    spare: cells for speculative tokens, in addition to `cells_for`.
    draft_share: time of a drafted token relative to the target's, if the same cores compute both
        and may take turns; else 0.
    """
    pinned: dict[str, Any] = {name: getattr(config, name) for name, tuned in _TUNED.items()
                              if getattr(config, name) > tuned}
    if config.tip != "auto":
        pinned["join_tip"] = config.tip == "joined"
    if config.draft_p_min >= 0:
        pinned |= {"p_min": config.draft_p_min, "free_min": None}
    time_sharing = draft_share > 0.0 and policy is Policy.PIPEINFER and not overlaps(config)
    ablations = frozenset(Ablation(a) for a in config.ablate)
    synchronous = policy is Policy.SPECULATIVE or Ablation.ASYNC in ablations
    credit = config.credit or n_stages + 1
    values: dict[str, Any] = {
        **sizes, "credit": credit, "join_tip": sizes["join_tip"] and n_stages <= JOIN_UP_TO,
        "alternatives": alternatives_for(credit), "path_min": cutoff(credit),
        "p_min": 0.4 if synchronous else 0.0,
        "p_split": 0.2 if synchronous else 0.02,
    }
    if time_sharing and exact > 1:
        values |= for_time_sharing(curve, draft_share, exact, weighed=weighs(config),
                           free=registry.free(config))
    if policy is Policy.PUBLISHED:
        values |= PUBLISHED
    values |= {"p_recovery": config.p_recovery, "p_decay": config.p_decay}
    values |= pinned
    limits = Limits(
        n_ctx=n_ctx, policy=policy, ablations=ablations, chunk=chunk, exact_width=exact,
        partitions=partitions_for(config, credit), branches=config.branches,
        time_sharing=time_sharing,
        parallel=config.parallel, cells=cells_for(config, n_ctx), kept=kept_for(config),
        alone=config.speculation == "on", guess_rows=spare // 2,
        threads=threads_of(config), **values,
    )
    return limits, frozenset(pinned)


def grouped(limits: Limits, group_max: int, n_stages: int, curve: Curve) -> Limits:
    """Return these limits with the best sizes of decode groups at the start.

    group_max: see `Limits`. Others: see `limits_for`.
    """
    limits = structs.replace(limits, group_max=group_max)
    timing = Timing(1.0, n_stages, curve, 0.0, 0.0)
    return structs.replace(limits, share=groups(timing, limits.widest_group, limits.lanes))


def for_time_sharing(curve: Curve, draft_share: float, exact: int, *, weighed: bool,
                     free: bool = False) -> dict[str, Any]:
    """Return the initial limits where draft and target take turns.

    curve, draft_share: see `limits_for`.
    weighed: whether every speculative token has to pay for its row.
    free: whether a proposer without a model is used too. Then the draft model is used only if it
        pays at its usual acceptance, not just at a good one.
    """
    timing = _at_load(curve, draft_share)
    if not weighed:
        size = best_chain(timing, _USUAL, exact - 1) or 1
        return {"p_min": least_confidence(timing, _USUAL, size),
                "draft_max": size, "tree_max": size}
    values = weighed_by(timing, exact - 1)
    if not best_chain(timing, _USUAL if free else GOOD, exact - 1):
        values["draft_price"] = math.inf
    return values


def controller_for(config: SpeculationConfig, limits: Limits, pinned: frozenset[str], curve: Curve,
                   cells: int, draft_share: float = 0.0) -> Controller | None:
    """Return the controller that tunes the limits, None with `adapt=false` or nothing to tune.

    pinned: names of limits that stay. cells: beyond the context; half of them are for live
        speculative tokens.
    draft_share: see `limits_for`.
    """
    if limits.time_sharing and limits.speculates and config.speculation == "auto" \
            and "path_min" not in pinned \
            and never_pays(curve, draft_share, limits, free=registry.free(config)):
        limits = structs.replace(limits, path_min=NEVER)
    controller = Controller(limits, pinned, curve, cells // 2, draft_share)
    return controller if config.adapt and controller.active else None


def never_pays(curve: Curve, draft_share: float, limits: Limits, *, free: bool) -> bool:
    """Return whether not even a good draft would pay where draft and target take turns.

    free: whether a proposer without a model goes on where models do not pay.
    """
    share = 0.0 if free and limits.costs else draft_share
    return not best_chain(_at_load(curve, share), GOOD, limits.exact_width - 1)


def _at_load(curve: Curve, draft_share: float) -> Timing:
    """Return the times of one stage relative to a single row, as measured at load."""
    return Timing(1.0, 1.0, curve, 0.0, draft_share)


def sizes_for(row_cost: float) -> dict[str, Any]:
    """Return the limits that depend on what a further row of a run costs: small runs if it costs
    nearly as much as a run of one row. See docs/options.md."""
    draft_max, tree_max = (1, 2) if row_cost > 0.6 else (2, 4) if row_cost > 0.3 else (3, 7)
    return {"draft_max": draft_max, "tree_max": tree_max, "join_tip": row_cost <= 0.3}
