"""Plans which rank holds which layers, from model files, memory and measured speeds.

A plan splits the layers so that the slowest stage is as fast as possible (`partition`). Then it
checks whether leaving out the slowest ranks, one after another, makes the whole faster, as judged
(`judge`). Reads headers and host facts; loads nothing, sends nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from pipeinfer.backends.factory import backends_of
from pipeinfer.config import ClusterConfig, JobConfig
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.models.gguf import per_layer
from pipeinfer.models.layers import barred, cache_bytes, has_latent_cache, row_width
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.partition import (
    Load,
    Member,
    Split,
    check_fits,
    choose,
    measure,
    partition,
    remedy,
    size_text,
)
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import Teams, holdings

ACCEPTANCE = 0.7  #: assumed where nothing is known about the draft
WORTH = 1.1  #: least speed-up of the slowest stage for which a plan differs from equal shares
_SCRATCH = 32 << 20


def _widest(model: Any) -> int:
    """Return the FFN columns of the widest layer, for the scratch memory of a decode."""
    return max(per_layer(model, "feed_forward_length", 4 * model.n_embd))


# --- plans ------------------------------------------------------------------------------------


class Plan(Struct, frozen=True):
    """Stages in order: `ranks[i]` holds layers `ranges[i]`. Seconds are relative unless `timed`.

    candidates: ranks that may hold a stage
    split: layers of each candidate, in their order
    equal: the same with equal shares for every candidate
    left_out: candidates without layers, and why
    timed: whether ranks were measured, so that seconds are real
    teams: the ranks of wide stages, None where every stage is one rank. Candidates are their
        leaders then
    cuts: names of the slices of each stage's layers, with teams
    """

    candidates: tuple[int, ...]
    split: Split
    equal: Split
    left_out: Mapping[int, str]
    timed: bool
    teams: Teams | None = None
    cuts: tuple[tuple[str, ...], ...] = ()

    @property
    def held(self) -> tuple[Holding, ...]:
        """The holdings of all ranks, in the order of nodes."""
        if self.teams is None:
            return tuple(Holding(rank, start, stop) for rank, (start, stop) in zip(
                self.ranks, self.ranges, strict=True))
        return holdings(self.teams, self.ranges, self.cuts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a stage, in the order of the pipeline."""
        return tuple(self.candidates[i] for i, _, _ in self.split.ranges())

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The layers [start, stop) of each stage."""
        return [(start, stop) for _, start, stop in self.split.ranges()]

    def seconds_of(self, held: Sequence[Holding]) -> tuple[float, ...]:
        """Return the seconds of each stage, where its rank was measured and stages are held as
        planned; otherwise nothing."""
        known = self.timed and self.teams is None and tuple(held) == self.held
        return tuple(filter(None, self.split.seconds)) if known else ()

    def line(self) -> str:
        """Describe the plan in one line; "" if it is the equal split over all ranks."""
        counts = ", ".join(str(stop - start) for start, stop in self.ranges)
        if self.teams is not None:
            return f"plan: layers {counts} on " + "; ".join(
                "ranks " + ", ".join(map(str, team)) if len(team) > 1 else f"rank {team[0]}"
                for team in self.teams.ranks)
        if self.split.counts == self.equal.counts and not self.left_out:
            return ""
        parts = [f"layers {counts} on ranks {', '.join(map(str, self.ranks))}"]
        if self.timed and self.equal.slowest > self.split.slowest:  # else those do not fit
            parts.append(f"slowest stage {1e3 * self.split.slowest:.1f} ms instead of "
                         f"{1e3 * self.equal.slowest:.1f} ms with equal shares")
        parts += [f"rank {rank} left out ({why})" for rank, why in self.left_out.items()]
        return "plan: " + "; ".join(parts)


def torch_item_bytes(config: JobConfig, model: Any, hosts: Sequence[RankInfo]) -> int:
    """Return the bytes of a weight if a rank runs torch, 0 if none does."""
    from pipeinfer.backends.pytorch.options import itemsize

    if "torch" not in backends_of(config, model, hosts):
        return 0
    devices = {rank.settings.device for rank in hosts}
    return max(itemsize(config.model.dtype, device or config.model.device) for device in devices)


def load_of(model: Any, n_cells: int, n_batch: int, item_bytes: int = 0, n_ids: int = 1, *,
            pictures: bool = False) -> Load:
    """Return the cost (bytes of weights that a row reads) and the memory of a model's layers.

    n_cells: of the KV cache. n_batch: rows of the widest run.
    item_bytes: of a weight in torch's memory; 0: no rank runs torch. Costs are the file's bytes in
        any case: speeds of different backends are measured per such byte.
    n_ids: sequences of the KV cache, which all have a state where layers keep one.
    pictures: whether the first stage reads their rows.
    """
    from pipeinfer.models.hf_folder import torch_parts
    from pipeinfer.models.shard import by_layer_bytes, shard_bytes

    if item_bytes or model.path.is_dir():
        layers, embedding, head = torch_parts(model, item_bytes)
        cache = cache_bytes(model, n_cells, item_bytes or 4)
        _, _, head_cost = torch_parts(model, 0)
        return Load(
            tuple(map(float, model.layer_bytes)),
            tuple(map(operator.add, layers, cache)),
            first_bytes=float(embedding), last_cost=float(head_cost), last_bytes=float(head),
            scratch=float(_SCRATCH + 16 * n_batch * (model.n_embd + _widest(model))))
    n = model.n_layers
    layers = [shard_bytes(model, i, i + 1) for i in range(n)]
    plain = [size + by_layer_bytes(model) for size in model.layer_bytes]
    cache = cache_bytes(model, n_cells, n_ids=n_ids)
    head = layers[-1] - plain[-1] if n > 1 else 0
    bars, why = barred(model, pictures=pictures)
    return Load(
        tuple(map(float, model.layer_reads)),
        tuple(map(operator.add, plain, cache)),
        first_bytes=float(layers[0] - plain[0]), last_cost=float(head), last_bytes=float(head),
        scratch=float(_SCRATCH + 8 * n_batch * (row_width(model) + _widest(model))),
        whole=tuple(cache) if has_latent_cache(model) else (), barred=bars, bar=why)


def with_text(load: Load, model: Any, length: int) -> Load:
    """Return the load of rows behind a text of `length` tokens.

    A row reads the cached keys and values of the text as it reads weights, in layers with a sliding
    window at most those inside it. A state is as large behind any text.
    """
    window = int(model.arch_get("attention.sliding_window", 0) or 0) or length
    near = per_layer(model, "attention.sliding_window_pattern", 0)
    cells = (min(length, window) if one else length for one in near)
    return structs.replace(load, costs=tuple(
        cost + (one - none) * count for cost, one, none, count in zip(
            load.costs, cache_bytes(model, 1), cache_bytes(model, 0), cells, strict=True)))


def with_head(load: Load, figures: Iterable[Figures]) -> Load:
    """Return the load with the measured cost of the output matrix, in bytes of a layer that take
    as long.

    By its bytes a large vocabulary would count as many layers, so that its stage got none; but a
    product with one matrix wastes no time between operations, as a layer does.
    """
    found = [one.head / one.per_byte for one in figures if one.head > 0]
    return structs.replace(load, last_cost=statistics.median(found)) if found else load


def asked_counts(config: ClusterConfig, model: Any, candidates: Sequence[int],
                 hosts: Sequence[RankInfo], whole: Sequence[int] | None
                 ) -> list[int | None]:
    """Return the layers of each candidate as set by --layers, the nodes file or roles; None:
    free.

    whole: the nodes file's list for the whole job. Raises UsageError and PlanError.
    """
    counts: list[int | None] = []
    for rank in candidates:
        settings = hosts[rank].settings
        counts.append(0 if settings.waits else settings.layers)
    if all(hosts[rank].settings.waits for rank in candidates):
        raise PlanError("no rank is left for layers: all others draft or are spares by the nodes "
                        "file; start more ranks, or change role, proposer or draft there")
    origin = "--layers" if config.layers else "layers in the nodes file"
    if config.layers:
        words = [word.strip() for word in config.layers.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            raise UsageError(f"--layers {config.layers}: give counts such as 10,12,12,6")
        whole = [int(word) for word in words]
    if whole is None:
        return counts
    free = [i for i, count in enumerate(counts) if count != 0]
    slots = range(len(counts)) if len(whole) == len(counts) else free
    if len(whole) != len(slots):
        raise PlanError(f"{origin} has {len(whole)} counts, but {len(counts)} ranks can hold a "
                        "stage: give one count for each, 0 to leave a rank out")
    if sum(whole) != model.n_layers:
        raise PlanError(f"{origin} adds up to {sum(whole)}; the model has {model.n_layers} layers")
    result: list[int | None] = [0] * len(counts)
    for slot, count in zip(slots, whole, strict=True):
        if count and hosts[candidates[slot]].settings.drafts:
            raise PlanError(f"{origin} gives {count} layers to rank {candidates[slot]}, which "
                            "drafts: give it 0, or leave its count out")
        result[slot] = count
    return result


def equal_counts(n_layers: int, members: Sequence[Member]) -> list[int]:
    """Return equal numbers of layers for members without a fixed number. Raises PlanError."""
    from pipeinfer.models.shard import stage_layers

    free = [i for i, m in enumerate(members) if m.layers is None]
    left = n_layers - sum(m.layers or 0 for m in members)
    counts = [m.layers or 0 for m in members]
    if free and left >= len(free):
        for i, (start, stop) in zip(free, stage_layers(left, len(free)), strict=True):
            counts[i] = stop - start
    elif free and left >= 0:
        raise PlanError(f"{len(free)} ranks for {left} of {n_layers} layers: every rank needs at "
                        "least one; start fewer ranks")
    if sum(counts) != n_layers:
        raise PlanError(f"the fixed layer counts add up to {sum(counts)}; the model has {n_layers}")
    return counts


def equal_ranges(load: Load, n_stages: int) -> list[tuple[int, int]]:
    """Return `[start, stop)` of stages that are as equal as the model allows. Raises PlanError."""
    split = _equal(load, [Member(f"stage {i}", 1.0) for i in range(1, n_stages + 1)])
    return [(start, stop) for _, start, stop in split.ranges()]


def _equal(load: Load, members: Sequence[Member]) -> Split:
    """Return equal shares, as far as counts are not fixed and the model can be cut so."""
    counts = equal_counts(len(load.costs), members)
    ends = [0, *itertools.accumulate(counts)]
    if not load.barred.isdisjoint(itertools.pairwise(ends)):
        n = len(load.costs)
        even = Load((1.0,) * n, (0.0,) * n, barred=load.barred, bar=load.bar)
        counts = list(partition(even, [
            Member(one.name, 1.0, layers=one.layers) for one in members]).counts)
    return measure(load, members, counts)


def make_plan(
    config: ClusterConfig, load: Load, members: Sequence[Member], candidates: Sequence[int],
    hosts: Sequence[RankInfo], predict: Callable[[Split], float], *, timed: bool,
) -> Plan:
    """Return the plan for `members` (one per candidate rank).

    predict: see `choose`. timed: whether the members' speeds were measured. Raises PlanError.
    """
    try:
        return _plan_of(config, load, members, candidates, hosts, predict, timed)
    except PlanError as error:
        if 0 in candidates or config.head_stage:
            raise
        raise PlanError(f"{error}; --head-stage lets rank 0 hold layers, too") from None


def _plan_of(
    config: ClusterConfig, load: Load, members: Sequence[Member], candidates: Sequence[int],
    hosts: Sequence[RankInfo], predict: Callable[[Split], float], timed: bool,
) -> Plan:
    equal = _equal(load, members)
    plain = _equal(load, [
        member if member.layers == 0 else structs.replace(member, layers=None)
        for member in members])
    if config.split == "equal" or all(m.layers is not None for m in members):
        split = equal
        check_fits(split, members)
        left_out = {i: "set to hold no layers" for i, c in enumerate(split.counts) if not c}
    else:
        split, left_out = choose(load, members, predict)
        if (set(left_out) <= _unused(equal) and equal.slowest <= split.slowest * WORTH
                and _fits(equal, members)):
            split = equal
    names = [member.room or hosts[rank].host
             for rank, member in zip(candidates, members, strict=True)]
    split, left_out = _within_hosts(
        config, load, members, candidates, names, (split, left_out), predict)
    return Plan(tuple(candidates), split, plain,
                {rank: "it drafts" if hosts[rank].settings.drafts else left_out[i]
                 for i, rank in enumerate(candidates) if i in left_out}, timed)


def _unused(split: Split) -> set[int]:
    return {i for i, count in enumerate(split.counts) if not count}


def _fits(split: Split, members: Sequence[Member]) -> bool:
    return all(size <= member.memory
               for size, member in zip(split.sizes, members, strict=True))


def _within_hosts(
    config: ClusterConfig, load: Load, members: Sequence[Member], candidates: Sequence[int],
    names: Sequence[str], chosen: tuple[Split, dict[int, str]],
    predict: Callable[[Split], float],
) -> tuple[Split, dict[int, str]]:
    """Return the choice, or one in which the ranks of each host together fit its memory.

    names: the host of each member. The memory of an overfull host is divided equally among as many
        of its ranks as can work with that. Raises PlanError with host and ranks.
    """
    name = _fullest(chosen[0], members, names)
    if name is None:
        return chosen
    if config.split != "equal":
        for many in (True, False):  # fewer ranks on one host may leave enough memory on others
            found = _share_out(load, members, names, chosen, predict, many=many)
            if found is not None:
                return found
    need, room = _need(chosen[0], names, name), _room(members, names, name)
    ranks = [str(rank) for i, rank in enumerate(candidates)
             if names[i] == name and chosen[0].counts[i]]
    raise PlanError(
        f"ranks {', '.join(ranks)} on {name} need {size_text(need)} together for weights, cache "
        f"and scratch, but {name} has {size_text(room)}: it lacks {size_text(need - room)}; "
        f"{remedy(members)}")


def _share_out(
    load: Load, members: Sequence[Member], names: Sequence[str],
    chosen: tuple[Split, dict[int, str]], predict: Callable[[Split], float], *, many: bool,
) -> tuple[Split, dict[int, str]] | None:
    """Divide the memory of overfull hosts, see `_within_hosts`; None if no way fits.

    many: use as many ranks as possible rather than as few.
    """
    trial = list(members)
    shared_out: set[str] = set()
    while (name := _fullest(chosen[0], members, names)) is not None:
        here = [i for i, m in enumerate(members) if names[i] == name and m.layers is None]
        room = _room(members, names, name) - sum(
            size for i, size in enumerate(chosen[0].sizes) if names[i] == name and i not in here)
        counts = range(1, len(here) + 1) if name not in shared_out else ()
        for count in sorted(counts, reverse=many):
            shared = list(trial)
            for turn, i in enumerate(here):
                shared[i] = structs.replace(members[i], memory=room / count) \
                    if turn < count else structs.replace(members[i], layers=0)
            with contextlib.suppress(PlanError):
                chosen, trial = choose(load, shared, predict), shared
                break
        else:
            return None
        shared_out.add(name)
    split, left_out = chosen
    return split, left_out | {
        i: "the memory of its host is enough for fewer ranks" for i in left_out
        if members[i].layers is None and trial[i].layers == 0}


def _room(members: Sequence[Member], names: Sequence[str], name: str) -> float:
    return min(m.memory for i, m in enumerate(members) if names[i] == name)


def _need(split: Split, names: Sequence[str], name: str) -> float:
    return sum(size for i, size in enumerate(split.sizes) if names[i] == name)


def _fullest(split: Split, members: Sequence[Member], names: Sequence[str]) -> str | None:
    """Return the host that lacks the most memory, None if all have enough."""
    lacks = {name: _need(split, names, name) - _room(members, names, name) * (1 + 1e-9)
             for name in names}
    worst = max(lacks, key=lambda name: lacks[name])
    return worst if lacks[worst] > 0 else None
