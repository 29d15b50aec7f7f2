"""From a config to the scheduler's limits: what the user set, what the machine suggests.

What a user sets is pinned; the controller leaves it alone. Measures nothing, and loads nothing but
a BiTA adapter's few vectors.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct, structs

from pipeinfer.cluster.policy_choice import LOOKUP, overlaps, weighs
from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.core.policy import Ablation, CancelPath, Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer.scheduler.controller import (
    GOOD,
    NEVER,
    Controller,
    Curve,
    Timing,
    alternatives_for,
    cutoff,
    groups,
    least_confidence,
    turns,
    weighed_by,
)
from pipeinfer.scheduler.settings import PUBLISHED, Limits, lanes_per_response
from pipeinfer.scheduler.speculation_trial import WINDOW, SpeculationTrial
from pipeinfer.scheduler.turns_trial import TurnsTrial
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import InlineProposer
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

NO_MODEL = 1e-3  #: a `draft_share` of proposers without a model
JOIN_UP_TO = 2  #: stages up to which `--tip auto` starts joined, see docs/options.md
_MOST_IDS = 60  #: sequence ids, which cost a backend memory
_MOST_KEPT = 32  #: remembered prompts, each with an id
_THEIR_CHUNK = 512  #: llama.cpp's --ubatch-size
_USUAL = 0.7  #: acceptance that is expected of a draft
_CHEAP = 0.05  #: of a token's time, for which a draft is asked that may be better than most
_SURE = 8  #: spans in which an expectation is believed before the contrary is tried
_ALL_IDS = 255  #: llama.cpp tells 256 apart, one of which is the grave (llamacpp.cell_order)


def chunk_of(config: JobConfig) -> int:
    """Rows of a prompt that travel together, at most."""
    chunk = config.speculation.chunk
    if config.model.like_llama_cpp and "chunk" not in config.given:
        chunk = _THEIR_CHUNK
    return min(chunk, config.model.ubatch or chunk)


def row_proposer(
    config: SpeculationConfig, n_vocab: int = 0, prompt_id: int = 0, curve: Curve = (),
    width: int = 0,
) -> InlineProposer | None:
    """What proposes from rows of its own in the target's runs, if anything does.

    n_vocab: ids of learned tokens start there. prompt_id: of learned prompts. curve: what runs of
    several rows cost. width: rows that may verify together; 0: any number. Raises ModelError for
    an adapter that cannot be read.
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
    """Room for what proposes from rows of its own: see `InlineProposer`, each the most of any."""

    candidates: int = 0
    rows: int = 0
    paths: int = 0


def row_sizes(config: SpeculationConfig) -> RowSizes:
    """What proposers of rows that are named may need, in use or not."""
    wanted = {spec.name: spec for spec in (*registry.named(config), registry.inline(config))
              if spec is not None and spec.inline is not None}
    found = [_make(spec, config) for spec in wanted.values()]
    return RowSizes(*(max((getattr(rows, name) for rows in found), default=0)
                      for name in ("candidates", "rows", "paths")))


def partitions_for(config: SpeculationConfig, credit: int) -> int:
    """Sequence ids beside a lane's first."""
    if config.partitions >= 0:
        return config.partitions
    return min(max(8, 2 * credit), _MOST_IDS) + row_sizes(config).paths


def cancel_path(config: JobConfig) -> CancelPath:
    """How cancellations travel; the same on every rank."""
    if config.cluster.cancel_path != "auto":
        return CancelPath(config.cluster.cancel_path)
    published = config.speculation.policy == Policy.PUBLISHED
    return CancelPath.BACKWARD if published else CancelPath.DIRECT


def lanes_of(config: SpeculationConfig) -> int:
    """How many causal threads (lanes) may be open at the same time."""
    return config.parallel * lanes_per_response(threads_of(config))


def threads_of(config: SpeculationConfig) -> int:
    """Threads of a response that are at work beside its main one."""
    return config.decompose_threads if config.decomposer else 0


def kept_for(config: SpeculationConfig) -> int:
    """Prompts of ended requests that are remembered."""
    return min(max(4, 2 * config.parallel), _MOST_KEPT) if config.prefix_cache else 0


def ids_for(config: SpeculationConfig, credit: int) -> int:
    """Sequence ids in all. Raises UsageError beyond what llama.cpp can tell apart."""
    count = lanes_of(config) + kept_for(config) + partitions_for(config, credit)
    if count > _ALL_IDS:
        raise UsageError(
            f"--parallel {config.parallel} (with --decompose-threads {config.decompose_threads}, "
            f"where --decomposer is given) and --partitions {partitions_for(config, credit)} need "
            f"{count} sequence ids, but a cache has only {_ALL_IDS}: lower one of them")
    return count


def cells_for(config: SpeculationConfig, n_ctx: int) -> int:
    """Tokens that requests and remembered prompts hold together. Raises UsageError."""
    if config.cache_tokens and config.cache_tokens < n_ctx:
        raise UsageError(f"--cache-tokens {config.cache_tokens} is smaller than the context of one "
                         f"request ({n_ctx}): raise it, or lower -c")
    one = config.parallel == 1 and not config.decomposer
    return config.cache_tokens or (n_ctx if one else 2 * n_ctx)


def spare_cells(width: int, credit: int) -> int:
    """Cells of a stage's cache for guesses, in runs of `width` rows, beyond `cells_for`."""
    return width * (2 * credit + 4)


def rows_and_cells(config: JobConfig, n_ctx: int, exact: int, stages: int) -> tuple[int, int, int]:
    """Rows of the widest run that verifies, rows of the widest run of all, and cells of each
    stage's cache, for at most so many stages."""
    width, hints = widths_for(config, exact)
    cells = cells_for(config.speculation, n_ctx) + spare_cells(
        width, config.speculation.credit or stages + 1) + hint_cells(config.speculation)
    return width, max(chunk_of(config), width, hints), cells


def hint_cells(config: SpeculationConfig) -> int:
    """Cells for the hints of all lanes, and for learned prompts."""
    path = registry.adapter(config)
    learned = load_bita(path).n_prompts if path else 0
    return learned + row_sizes(config).rows * lanes_of(config)


def widths_for(config: JobConfig, exact: int) -> tuple[int, int]:
    """Rows of the widest run that verifies, when up to `exact` are bit-equal, and of the widest
    run of hints."""
    sizes = row_sizes(config.speculation)
    if config.model.exact == "on":
        return exact, sizes.rows
    guesses = max(config.speculation.tree_max, sizes.candidates + sizes.rows)
    return max(exact, guesses + 1, config.speculation.draft_max), sizes.rows


def limits_for(
    config: SpeculationConfig, policy: Policy, sizes: Sizes, *, n_ctx: int, chunk: int, exact: int,
    n_stages: int, curve: Curve, spare: int, draft_share: float = 0.0,
) -> tuple[Limits, frozenset[str]]:
    """The limits to start with, and the names of those that the user set.

    curve: what runs of several rows cost. spare: cells beyond those of `cells_for`, for guesses.
    draft_share: a drafted token's time relative to the target's, where both are computed by the
    same cores and may take turns; else 0.
    """
    pinned: dict[str, Any] = {}
    if config.credit:
        pinned["credit"] = config.credit
    if config.draft_max:
        pinned["draft_max"] = config.draft_max
    if config.tip != "auto":
        pinned["join_tip"] = config.tip == "joined"
    if config.alternatives >= 0:
        pinned["alternatives"] = config.alternatives
    if config.path_min >= 0:
        pinned["path_min"] = config.path_min
    take_turns = draft_share > 0.0 and policy is Policy.PIPEINFER and not overlaps(config)
    if config.tree_max:
        pinned["tree_max"] = config.tree_max
    if config.draft_p_min >= 0:
        pinned |= {"p_min": config.draft_p_min, "free_min": None}
    ablations = frozenset(Ablation(a) for a in config.ablate)
    synchronous = policy is Policy.SPECULATIVE or Ablation.ASYNC in ablations
    credit = config.credit or n_stages + 1
    values: dict[str, Any] = {
        "credit": credit, "draft_max": sizes.draft_max,
        "join_tip": sizes.join and n_stages <= JOIN_UP_TO,
        "alternatives": alternatives_for(credit), "path_min": cutoff(credit),
        "tree_max": sizes.tree_max, "p_min": 0.4 if synchronous else 0.0,
    }
    if take_turns and exact > 1:
        values |= by_turns(curve, draft_share, exact, weighed=weighs(config),
                           free=LOOKUP in config.proposer)
    if policy is Policy.PUBLISHED:
        values |= PUBLISHED
    values |= {"p_recovery": config.p_recovery, "p_decay": config.p_decay}
    values |= pinned
    limits = Limits(
        n_ctx=n_ctx, policy=policy, ablations=ablations, chunk=chunk, exact_width=exact,
        partitions=partitions_for(config, credit), branches=config.branches,
        take_turns=take_turns,
        p_split=_given(config.p_split, 0.2 if synchronous else 0.02),
        parallel=config.parallel, cells=cells_for(config, n_ctx), kept=kept_for(config),
        alone=config.speculation == "on", guess_rows=spare // 2,
        share=groups(Timing(1.0, n_stages, curve, 0.0, 0.0), exact, lanes_of(config)),
        threads=threads_of(config), **values,
    )
    return limits, frozenset(pinned)


def by_turns(curve: Curve, draft_share: float, exact: int, *, weighed: bool, free: bool = False
             ) -> dict[str, Any]:
    """Values of limits to start with where draft and target compute by turns.

    weighed: whether every guess has to be worth its row. curve, draft_share: see `limits_for`.
    free: whether something else names guesses without a model: then a model has to pay as it
    usually guesses, and not only where it guesses well.
    """
    timing = _at_load(curve, draft_share)
    if not weighed:
        size = turns(timing, _USUAL, exact - 1) or 1
        return {"p_min": least_confidence(timing, _USUAL, size),
                "draft_max": size, "tree_max": size}
    values = weighed_by(timing, exact - 1)
    if not turns(timing, _USUAL if free else GOOD, exact - 1):
        values["draft_price"] = math.inf
    return values


def controller_for(config: SpeculationConfig, limits: Limits, pinned: frozenset[str], curve: Curve,
                   cells: int, *, contended: bool = False, draft_share: float = 0.0
                   ) -> Controller | None:
    """What tunes the limits while they are used, None with `--no-adapt` or nothing to tune.

    cells: beyond the context, half of which live guesses may take. contended: the draft takes
    processors from stages. draft_share: see `limits_for`.
    """
    trial = contended and limits.speculates and config.speculation == "auto" \
        and "path_min" not in pinned
    judge: SpeculationTrial | TurnsTrial | None = SpeculationTrial() if trial else None
    if judge is not None and limits.take_turns:
        judge = _judge_of_turns(curve, draft_share, limits, free=LOOKUP in config.proposer)
        if not judge.speculate:
            limits = structs.replace(limits, path_min=NEVER)
    controller = Controller(limits, pinned, curve, cells // 2, judge, draft_share)
    return controller if config.adapt and controller.active else None


def _judge_of_turns(curve: Curve, draft_share: float, limits: Limits, *, free: bool
                    ) -> SpeculationTrial | TurnsTrial:
    """What finds out whether guesses pay where draft and target take turns.

    free: whether something names guesses without a model, which goes on where models do not pay.
    """
    weighed, most = bool(limits.costs), limits.exact_width - 1
    timing = _at_load(curve, 0.0 if free and weighed else draft_share)
    likely, hopeless = turns(timing, _USUAL, most) > 0, turns(timing, GOOD, most) == 0
    if not weighed:
        return SpeculationTrial(likely, sure=_SURE, hopeless=hopeless)
    if likely:
        return TurnsTrial(begin=4 * WINDOW)
    doubtful = not free and draft_share > _CHEAP
    return TurnsTrial(rest=_SURE * WINDOW if doubtful else 0, hopeless=hopeless)


def _at_load(curve: Curve, draft_share: float) -> Timing:
    """What one stage takes, in times of a single row, as far as loading has shown it."""
    return Timing(1.0, 1.0, curve, 0.0, draft_share)


def _given(value: float, otherwise: float) -> float:
    return value if value >= 0 else otherwise


class Sizes(Struct, frozen=True):
    """Defaults that depend on what a further row of a run costs."""

    draft_max: int
    tree_max: int
    join: bool


def sizes_for(row_cost: float) -> Sizes:
    """Where a further row costs nearly a whole run, small runs; see docs/options.md."""
    if row_cost > 0.6:
        return Sizes(1, 2, join=False)
    if row_cost > 0.3:
        return Sizes(2, 4, join=False)
    return Sizes(3, 7, join=True)
