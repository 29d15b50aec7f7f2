"""From a config to the scheduler's limits: what the user set, what the machine suggests.

What a user sets is pinned; the controller leaves it alone. Loads nothing and measures nothing.
"""

from __future__ import annotations

from typing import Any

from pipeinfer.config import Config
from pipeinfer.controller import Controller, Curve, alternatives_for, cutoff
from pipeinfer.planner import Sizes
from pipeinfer.policy import Ablation, Limits, Policy

JOIN_UP_TO = 2  #: stages up to which `--tip auto` starts joined, see docs/options.md
_MOST_IDS = 60  #: sequence ids, which cost a backend memory


def partitions_for(config: Config, credit: int) -> int:
    """Sequence ids beside a lane's first."""
    return config.partitions if config.partitions >= 0 else min(max(8, 2 * credit), _MOST_IDS)


def limits_for(
    config: Config, policy: Policy, sizes: Sizes, *, n_ctx: int, chunk: int, exact: int,
    n_stages: int,
) -> tuple[Limits, frozenset[str]]:
    """The limits to start with, and the names of those that the user set."""
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
        p_recovery=config.p_recovery, p_decay=config.p_decay, **values,
    )
    return limits, frozenset(pinned)


def controller_for(config: Config, limits: Limits, pinned: frozenset[str], curve: Curve,
                   cells: int) -> Controller | None:
    """What tunes the limits while they are used, None with `--no-adapt` or nothing to tune.

    cells: beyond the context, half of which live guesses may take.
    """
    controller = Controller(limits, pinned, curve, cells // 2)
    return controller if config.adapt and controller.active else None


def _given(value: float, otherwise: float) -> float:
    return value if value >= 0 else otherwise
