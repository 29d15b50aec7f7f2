"""Cuts layers into slices for wide stages: attention heads, FFN columns, rows of the output head.

A slice is named by the parts of every layer that it holds, so that its name is its identity: in
file names, in messages, in stored measurements. A cut is the list of all slices of a model; the sum
over a layer's slices is computed in that order. Where a slice may begin depends on the file:

    heads     whole KV heads with their query heads; with more slices than KV heads, a KV head is
              repeated and its query heads are distributed
    columns   of attn_output, ffn_down and each expert at quantisation blocks of every layer; with
              more slices than an expert has blocks, the experts are divided, too
    and       at multiples of 32 where possible, or kernels for whole tiles are chosen for one slice
              and not for another

`shard.extract_shard` writes a slice's file. Independent of ranks; the planner decides on shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeinfer.errors import PlanError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer.models.shard import check_splittable
from pipeinfer.models.slice_parts import Mixture, Sizes, Slice, layout, most_by_columns, sizes_of

_TILE = 32  #: rows and columns that kernels take at once


def widths_of(model: ModelFile | ModelDir) -> tuple[int, ...]:
    """Return the numbers of slices into which the model's layers can be cut, ascending, from 1.

    Raises UnsupportedArchitecture for a model that cannot be sliced.
    """
    if isinstance(model, ModelFile):
        check_splittable(model)
    return _possible(sizes_of(model))


def slices_of(model: ModelFile | ModelDir, shares: Sequence[float]) -> tuple[Slice, ...]:
    """Return one slice per share, in order; together they cover the model.

    shares: each slice's share of the work, in any unit; equal numbers for equal slices
    Each slice is as near to its share as blocks and heads allow, and has a part of everything.
    Raises PlanError for a number of slices that the file does not allow, UnsupportedArchitecture
    for a model that cannot be sliced.
    """
    if isinstance(model, ModelFile):
        check_splittable(model)
    return cut(sizes_of(model), shares, model.path.name)


def cut(sizes: Sizes, shares: Sequence[float], name: str) -> tuple[Slice, ...]:
    """Return one slice per share of layers of these sizes. Raises PlanError, which names `name`."""
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise PlanError(f"shares of {list(shares)}: give each slice a number above 0")
    possible = _possible(sizes)
    if len(shares) not in possible:
        raise PlanError(
            f"{name} cannot be cut into {len(shares)} slices: {_counted(possible)} "
            f"({_why(sizes, possible[-1])}); lower --slices and use more stages"
            + _finer(sizes, possible[-1]))
    total = math.fsum(shares)
    parts = [share / total for share in shares]
    mixture = sizes.mixture
    among: Sequence[tuple[int, int] | None] = [None] * len(parts)
    if mixture is not None and len(parts) > most_by_columns(sizes):
        ff, among = _deal_experts(mixture, most_by_columns(sizes), parts)
    else:
        ff = _columns(sizes.ff, sizes.ff_block, parts)
    vocab = _ranges(sizes.vocab, _TILE, 1, parts)
    experts: Sequence[tuple[int, int] | None] = [None] * len(parts)
    shared: Sequence[tuple[int, int] | None] = experts
    if mixture is not None and sizes.both:
        experts = _columns(mixture.columns, mixture.block, parts)
    delta: Sequence[tuple[int, int] | None] = [None] * len(parts)
    if sizes.delta is not None:
        delta = _ranges(sizes.delta.keys, sizes.delta.step, sizes.delta.step, parts)
    if mixture is not None and mixture.apart:
        # where the experts are divided, the slices of the first ones have the shared one, too
        count = 1 + max(k for k, own in enumerate(among) if own == among[0])
        first = parts[:count]
        shared = [*_columns(mixture.apart, mixture.shared_block,
                            [share / sum(first) for share in first]),
                  *[None] * (len(parts) - count)]
    return tuple(Slice(heads, columns, rows, queries, *more)
                 for (heads, queries), columns, rows, *more in
                 zip(_deal_heads(sizes, parts), ff, vocab, experts, shared, among, delta,
                     strict=True))


# --- how many slices --------------------------------------------------------------------------


def _head_step(sizes: Sizes, tile: int) -> int:
    """The number of KV heads whose attention columns end at a block and a multiple of `tile`."""
    columns = sizes.group * sizes.value
    return math.lcm(sizes.head_block, tile, columns) // columns


def _query_step(sizes: Sizes, tile: int) -> int:
    """The number of query heads whose attention columns end at a block and a multiple of `tile`,
    in each layer with whole KV heads or a part of one.
    """
    step = math.lcm(sizes.head_block, tile, sizes.value) // sizes.value
    return math.lcm(step, sizes.least_group) if sizes.layers else step


def _units(size: int, step: int) -> int:
    """The number of parts of at least `step` into which something can be cut; the last has the
    rest.
    """
    return max(1, size // step)


def _most_by_heads(sizes: Sizes) -> int:
    """The most slices with some attention heads each."""
    step = _head_step(sizes, 1)
    if step > 1:  # blocks span several KV heads, so no part of a KV head can be taken
        return _units(sizes.kv_heads, step)
    return sizes.kv_heads * _units(sizes.group, _query_step(sizes, 1))


def _possible(sizes: Sizes) -> tuple[int, ...]:
    """The possible numbers of slices."""
    columns = most_by_columns(sizes)
    groups = 1 if sizes.mixture is None else sizes.mixture.groups
    most = min(_most_by_heads(sizes), sizes.vocab)
    if sizes.delta is not None:
        most = min(most, sizes.delta.most)
    return tuple(n for n in range(1, most + 1)
                 if layout(n, columns, groups)[0])


def _counted(possible: Sequence[int]) -> str:
    """The possible numbers as text, shortened where there are many."""
    if len(possible) == 1:
        return "only 1 is possible"
    numbers = [*map(str, possible)]
    if len(numbers) > 8:
        numbers = [f"{', '.join(numbers[:3])}, ...", numbers[-1]]
    return f"possible are {', '.join(numbers)} slices".replace("...,", "...")


def _why(sizes: Sizes, widest: int) -> str:
    mixture = sizes.mixture
    if sizes.delta is not None and sizes.delta.most == widest:
        return f"{sizes.delta.keys} key heads or groups of heads of layers with a state"
    if _most_by_heads(sizes) > widest:
        if _units(sizes.ff, sizes.ff_block) > widest and mixture is not None:
            return f"{mixture.columns} columns of each expert in blocks of {mixture.block}"
        return f"{sizes.ff} FFN columns in blocks of {sizes.ff_block}"
    blocks = f" in blocks of {sizes.head_block} columns" if sizes.head_block > 1 else ""
    return (f"{sizes.kv_heads} KV heads of {sizes.group} query heads of {sizes.value} "
            f"elements{blocks}")


def _finer(sizes: Sizes, widest: int) -> str:
    """A hint at another quantisation, where that would allow more slices."""
    block = sizes.head_block if _most_by_heads(sizes) == widest else max(
        sizes.ff_block, sizes.mixture.block if sizes.mixture is not None else 1)
    return ", or a file of the model in Q8_0 or Q4_0, whose blocks are smaller" if block > 32 \
        else ""


# --- who gets what ----------------------------------------------------------------------------


def _deal(units: int, shares: Sequence[float]) -> list[int]:
    """Distribute `units` by shares (which sum to 1).

    Whole numbers from 1, each as near to its share as the others allow. A remainder goes to the one
    furthest below its share, the first of several.
    """
    ideal = [share * units for share in shares]
    sizes = [max(1, math.floor(x)) for x in ideal]
    while (missing := units - sum(sizes)) != 0:
        some = [i for i, size in enumerate(sizes) if missing > 0 or size > 1]
        sign = 1 if missing > 0 else -1
        sizes[max(some, key=lambda i: (sign * (ideal[i] - sizes[i]), -i))] += sign
    return sizes


def _ranges(size: int, wide: int, narrow: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Divide `[0, size)` by shares, at multiples of `wide`, or of `narrow` if those are too few."""
    step = wide if _units(size, wide) >= len(shares) else narrow
    return _bounds(size, step, _deal(_units(size, step), shares))


def _deal_experts(mixture: Mixture, most: int, shares: Sequence[float]
                  ) -> tuple[list[tuple[int, int]], list[tuple[int, int] | None]]:
    """Each slice's columns, and the experts of which it has them; most: slices of an expert."""
    width, groups = layout(len(shares), most, mixture.groups)
    teams = [shares[k * width:(k + 1) * width] for k in range(groups)]
    experts = _ranges(mixture.count, 1, 1, [sum(team) for team in teams])
    if any(high - low < mixture.drawn for low, high in experts):  # llama.cpp needs as many
        experts = _ranges(mixture.count, 1, 1, [1 / groups] * groups)
    columns = [own for team in teams for own in _columns(
        mixture.columns, mixture.block, [share / sum(team) for share in team])]
    return columns, [own for own in experts for _ in range(width)]


def _columns(size: int, block: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    return _ranges(size, math.lcm(block, _TILE), block, shares)


def _bounds(size: int, step: int, units: Sequence[int]) -> list[tuple[int, int]]:
    ends = [step * sum(units[:i + 1]) for i in range(len(units))]
    ends[-1] = size
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _deal_heads(sizes: Sizes, shares: Sequence[float]
                ) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
    """Each slice's KV heads, and its query heads where it does not have all of theirs."""
    n, kv_heads = len(shares), sizes.kv_heads
    for tile in (_TILE, 1):
        step = _head_step(sizes, tile)
        if n <= _units(kv_heads, step):
            units = _deal(_units(kv_heads, step), shares)
            return [(heads, None) for heads in _bounds(kv_heads, step, units)]
    steps = [_query_step(sizes, tile) for tile in (_TILE, 1)]
    step = next(step for step in steps if sizes.group % step == 0
                and n <= kv_heads * (sizes.group // step))
    out: list[tuple[tuple[int, int], tuple[int, int] | None]] = []
    for head, units in enumerate(_repeat(kv_heads, sizes.group // step, shares)):
        first = head * sizes.group
        for low, high in _bounds(sizes.group, step, units):
            part = None if len(units) == 1 else (first + low, first + high)
            out.append(((head, head + 1), part))
    return out


def _repeat(kv_heads: int, units: int, shares: Sequence[float]) -> list[list[int]]:
    """Distribute KV heads of `units` parts each over more slices than there are KV heads.

    Returns for each KV head how many parts each of its slices takes: at least one slice per KV
    head, at most one per unit. The sum of squared distances to the shares is least (the first such
    solution).
    """
    best: dict[int, tuple[float, list[list[int]]]] = {0: (0.0, [])}
    for _ in range(kv_heads):
        found: dict[int, tuple[float, list[list[int]]]] = {}
        for used, (cost, dealt) in best.items():
            for count in range(1, min(units, len(shares) - used) + 1):
                mine = shares[used:used + count]
                sizes = _deal(units, [share / sum(mine) for share in mine])
                whole = cost + sum((size - share * kv_heads * units) ** 2
                                   for size, share in zip(sizes, mine, strict=True))
                if used + count not in found or whole < found[used + count][0]:
                    found[used + count] = (whole, [*dealt, sizes])
        best = found
    return best[len(shares)][1]
