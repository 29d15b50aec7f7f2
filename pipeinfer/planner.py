"""What goes where: model files, layers and memory per rank, and sizes that depend on the machine.

Looks at headers and at what hosts told about themselves; loads nothing, sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.config import Config
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.policy import Policy


@dataclass(frozen=True, slots=True)
class Sizes:
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


def model_paths(config: Config) -> tuple[Path, Path | None]:
    """Target and draft files; the embedded pair when no target is named."""
    embedded = Path(__file__).parent / "models" / "embedded"
    target = Path(config.model) if config.model else embedded / "target.gguf"
    if config.draft_model:
        draft: Path | None = Path(config.draft_model)
    else:
        draft = None if config.model else embedded / "draft.gguf"
    return target, draft


def open_model(path: Path) -> Any:
    """The model's header. Raises ModelError."""
    from pipeinfer.models.gguf import ModelFile

    return ModelFile(path)


def context_size(config: Config, model: Any) -> int:
    """Tokens of context: the one asked for, or the model's own up to 8192."""
    return config.ctx or min(int(model.arch_get("context_length", 4096) or 4096), 8192)


def choose_policy(config: Config, draft: Path | None) -> Policy:
    if config.policy:
        policy = Policy(config.policy)
        if policy is not Policy.ITERATIVE and draft is None:
            raise UsageError(f"--policy {policy} needs a draft model: give one with -md")
        return policy
    return Policy.ITERATIVE if draft is None else Policy.PIPEINFER


def check_memory(
    config: Config, model: Any, layers: list[tuple[int, int]], n_cells: int,
    hosts: list[dict[str, Any]],
) -> None:
    """Refuse a plan that a host can not hold. Raises PlanError naming the rank and the lack."""
    from pipeinfer.models.shard import shard_bytes

    offset = 0 if config.head_stage or len(hosts) == 1 else 1
    need: dict[str, int] = {}
    ranks: dict[str, list[int]] = {}
    for index, (start, stop) in enumerate(layers):
        rank = index + offset
        where = hosts[rank]["host"]
        need[where] = need.get(where, 0) + shard_bytes(model, start, stop)
        need[where] += _cache_bytes(model, stop - start, n_cells)
        ranks.setdefault(where, []).append(rank)
    for where, wanted in need.items():
        rank = ranks[where][0]
        free = hosts[rank]["memory_available"]
        if wanted > free:
            raise PlanError(
                f"rank {', '.join(map(str, ranks[where]))} on {where} needs "
                f"{wanted / 2**30:.1f} GiB for weights and cache and has {free / 2**30:.1f} GiB: "
                "use more hosts, a smaller quantisation or a smaller context (-c)"
            )


def _cache_bytes(model: Any, n_layers: int, n_cells: int) -> int:
    """A shard's cache with two bytes per element (quantised caches need less)."""
    heads = int(model.arch_get("attention.head_count", 1) or 1)
    kv_heads = int(model.arch_get("attention.head_count_kv", heads) or heads)
    size = model.n_embd // heads
    widths = sum(int(model.arch_get(f"attention.{kind}_length", size) or size)
                 for kind in ("key", "value"))
    return n_layers * n_cells * kv_heads * widths * 2
