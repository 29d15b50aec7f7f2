"""From a config to the scheduler's limits: what the user set, what the machine suggests.

What a user sets is pinned; the controller leaves it alone. Measures nothing, and loads nothing but
a BiTA adapter's few vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeinfer.config import Config
from pipeinfer.controller import (
    Controller,
    Curve,
    Timing,
    alternatives_for,
    cutoff,
    groups,
)
from pipeinfer.errors import UsageError
from pipeinfer.models.bita import load_bita
from pipeinfer.planner import Sizes, row_method
from pipeinfer.policy import Ablation, Limits, Policy
from pipeinfer.probing import Probe
from pipeinfer.strategies.bita import Bita
from pipeinfer.strategies.lookahead import Lookahead
from pipeinfer.strategies.rows import RowProposer

JOIN_UP_TO = 2  #: stages up to which `--tip auto` starts joined, see docs/options.md
_MOST_IDS = 60  #: sequence ids, which cost a backend memory
_MOST_KEPT = 32  #: remembered prompts, each with an id
_ALL_IDS = 255  #: llama.cpp tells 256 apart, one of which is the grave (backends.cellorder)


def row_proposer(config: Config, n_vocab: int = 0, prompt_id: int = 0) -> RowProposer | None:
    """What proposes from rows of its own in the target's runs, if anything does.

    n_vocab: ids of learned tokens start there. prompt_id: of learned prompts. Raises ModelError
    for an adapter that can not be read.
    """
    return _make(row_method(config), config, n_vocab, prompt_id)


def _make(method: str, config: Config, n_vocab: int = 0, prompt_id: int = 0) -> RowProposer | None:
    if method == "bita":
        learned = load_bita(config.bita)
        return Bita(n_vocab, learned.n_masks, config.bita_top,
                    prompt_id if learned.n_prompts else None)
    if method == "lookahead":
        return Lookahead(config.lookahead_window, config.lookahead_ngram,
                         config.lookahead_candidates)
    return None


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Room for whatever of a config proposes from rows: see `RowProposer`, each the most of any."""

    candidates: int = 0
    rows: int = 0
    paths: int = 0


def row_sizes(config: Config) -> RowSizes:
    """What proposers of rows that are named may need, in use or not."""
    found = [_make(method, config) for method in {row_method(config), *config.proposer}]
    return RowSizes(*(max((getattr(rows, name) for rows in found if rows is not None), default=0)
                      for name in ("candidates", "rows", "paths")))


def partitions_for(config: Config, credit: int) -> int:
    """Sequence ids beside a lane's first."""
    if config.partitions >= 0:
        return config.partitions
    return min(max(8, 2 * credit), _MOST_IDS) + row_sizes(config).paths


def lanes_of(config: Config) -> int:
    """Causal threads at a time."""
    return config.parallel * (1 + threads_of(config))


def threads_of(config: Config) -> int:
    """Threads of a response beside its main one."""
    return config.decompose_threads if config.decomposer else 0


def kept_for(config: Config) -> int:
    """Prompts of ended requests that are remembered."""
    return min(max(4, 2 * config.parallel), _MOST_KEPT) if config.prefix_cache else 0


def ids_for(config: Config, credit: int) -> int:
    """Sequence ids in all. Raises UsageError beyond what llama.cpp can tell apart."""
    count = lanes_of(config) + kept_for(config) + partitions_for(config, credit)
    if count > _ALL_IDS:
        raise UsageError(
            f"--parallel {config.parallel} (with --decompose-threads {config.decompose_threads}, "
            f"where --decomposer is given) and --partitions {partitions_for(config, credit)} need "
            f"{count} sequence ids, and a cache has {_ALL_IDS}: lower one of them")
    return count


def cells_for(config: Config, n_ctx: int) -> int:
    """Tokens that requests and remembered prompts hold together. Raises UsageError."""
    if config.cache_tokens and config.cache_tokens < n_ctx:
        raise UsageError(f"--cache-tokens {config.cache_tokens} is less than one request's context "
                         f"of {n_ctx}: raise it, or lower -c")
    one = config.parallel == 1 and not config.decomposer
    return config.cache_tokens or (n_ctx if one else 2 * n_ctx)


def spare_cells(width: int, credit: int) -> int:
    """Cells of a stage's cache for guesses, in runs of `width` rows, beyond `cells_for`."""
    return width * (2 * credit + 4)


def probe_cells(config: Config) -> int:
    """Cells for the probes of all lanes, and for learned prompts."""
    learned = load_bita(config.bita).n_prompts if config.bita else 0
    return learned + row_sizes(config).rows * lanes_of(config)


def widths_for(config: Config, exact: int) -> tuple[int, int]:
    """Rows of the widest run that verifies, when up to `exact` are bit-equal, and of the widest
    run of probes."""
    sizes = row_sizes(config)
    if config.exact == "on":
        return exact, sizes.rows
    guesses = max(config.tree_max, sizes.candidates + sizes.rows)
    return max(exact, guesses + 1, config.draft_max), sizes.rows


def limits_for(
    config: Config, policy: Policy, sizes: Sizes, *, n_ctx: int, chunk: int, exact: int,
    n_stages: int, curve: Curve, spare: int,
) -> tuple[Limits, frozenset[str]]:
    """The limits to start with, and the names of those that the user set.

    curve: what runs of several rows cost. spare: cells beyond those of `cells_for`, for guesses.
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
    ablations = frozenset(Ablation(a) for a in config.ablate)
    synchronous = policy is Policy.SPECULATIVE or Ablation.ASYNC in ablations
    credit = config.credit or n_stages + 1
    values: dict[str, Any] = {
        "credit": credit, "draft_max": sizes.draft_max,
        "join_tip": sizes.join and n_stages <= JOIN_UP_TO,
        "alternatives": alternatives_for(credit), "path_min": cutoff(credit), **pinned,
    }
    limits = Limits(
        n_ctx=n_ctx, policy=policy, ablations=ablations, chunk=chunk, exact_width=exact,
        partitions=partitions_for(config, credit), tree_max=config.tree_max or sizes.tree_max,
        branches=config.branches,
        p_min=_given(config.draft_p_min, 0.4 if synchronous else 0.0),
        p_split=_given(config.p_split, 0.2 if synchronous else 0.02),
        p_recovery=config.p_recovery, p_decay=config.p_decay,
        parallel=config.parallel, cells=cells_for(config, n_ctx), kept=kept_for(config),
        alone=config.speculation == "on", guess_rows=spare // 2,
        share=groups(Timing(1.0, n_stages, curve, 0.0, 0.0), exact, lanes_of(config)),
        threads=threads_of(config), **values,
    )
    return limits, frozenset(pinned)


def controller_for(config: Config, limits: Limits, pinned: frozenset[str], curve: Curve,
                   cells: int, *, contended: bool = False) -> Controller | None:
    """What tunes the limits while they are used, None with `--no-adapt` or nothing to tune.

    cells: beyond the context, half of which live guesses may take. contended: the draft takes
    processors from stages.
    """
    probe = contended and limits.speculates and config.speculation == "auto" \
        and "path_min" not in pinned
    controller = Controller(limits, pinned, curve, cells // 2, Probe() if probe else None)
    return controller if config.adapt and controller.active else None


def _given(value: float, otherwise: float) -> float:
    return value if value >= 0 else otherwise
