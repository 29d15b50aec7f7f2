"""The best grid of a job's own ranks, from the model's file and the measured ranks and links.

Links are measured between neighbours in the order of ranks. Two ranks further apart are assumed to
have the worst link between them. Loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import structs

from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer.models.slice_parts import Sizes, is_whole, most_by_columns, sizes_of
from pipeinfer.planning.grids import Cluster, GridPlan, best_grid, even_grid
from pipeinfer.planning.judge import LoadMix
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.teams import Network, SumCost, TeamCut, Wire

_ROWS = (2, 4, 8)  #: points of the curve that is made of a measured row cost


def cut_from(model: ModelFile | ModelDir, load: Load | None = None) -> TeamCut:
    """Return how a file's layers can be cut.

    load: of the model, for the memory of members; None: as the cost, which leaves out the cache and
        what a row does not read.
    Raises UnsupportedArchitecture.
    """
    sizes = sizes_of(model)
    group = sizes.heads // sizes.kv_heads
    step = math.lcm(sizes.head_block, group * sizes.value) // (group * sizes.value)
    parts = 0
    if step == 1:
        parts = group // (math.lcm(sizes.head_block, sizes.value) // sizes.value)
    groups, heads_pieces = max(1, sizes.kv_heads // step), sizes.kv_heads * parts
    if sizes.delta is not None:
        groups, heads_pieces = (min(count, sizes.delta.most) for count in (groups, heads_pieces))
    heads, keys, whole, columns = _read_bytes(model, sizes)
    total, stored = heads + whole + columns, None
    if load is not None and sizes.mixture is not None:
        size, plain, everywhere = (sum(values) / model.n_layers for values in (
            load.sizes, model.layer_bytes, load.whole))
        # the cache is divided as the heads are, but for what every member stores
        stored = (heads + size - plain - everywhere) / size, (whole + everywhere) / size
    return TeamCut(model.n_embd, groups, most_by_columns(sizes), heads / total, keys / total,
                   heads_pieces, whole / total,
                   (1, 0) if sizes.mixture is None else (sizes.mixture.groups, sizes.mixture.drawn),
                   stored)


def _read_bytes(model: ModelFile | ModelDir, sizes: Sizes) -> tuple[float, float, float, float]:
    """Return the bytes of a layer that a row reads: of the attention, of its keys and values
    alone, of what every slice has whole, and of the feed forward.

    Of models whose layers differ much, an average.
    """
    mixture = sizes.mixture
    every = mixture is not None or sizes.delta is not None
    drawn = model.arch_get("expert_used_count")
    heads = keys = whole = columns = 0.0
    for tensor in model.tensors.values():
        if tensor.layer is None or tensor.layer >= model.n_layers or (
                not every and tensor.layer != model.n_layers // 2):
            continue
        size = float(tensor.nbytes)
        if mixture is not None and "_exps." in tensor.name and isinstance(drawn, int):
            size *= drawn / mixture.count
        if every and is_whole(tensor.name.split(".", 2)[2]):
            whole += size
        elif any(part in tensor.name for part in (".attn_", ".self_attn.", ".ssm_")):
            heads += size
        else:
            columns += size
        if any(f".{name}." in tensor.name for name in ("attn_k", "attn_v", "k_proj", "v_proj")):
            keys += size
    count = model.n_layers if every else 1
    return heads / count, keys / count, whole / count, columns / count


def network_of(ranks: Sequence[int], links: Sequence[Mapping[str, float]]) -> Network:
    """Return the wires between ranks, by their indices in `ranks`.

    links: source, dest, latency (seconds), bandwidth (bytes/s) of neighbours.
    """
    steps = {int(link["source"]): Wire(link["latency"], link["bandwidth"]) for link in links}
    special: dict[frozenset[int], Wire] = {}
    for a, first in enumerate(ranks):
        for b in range(a + 1, len(ranks)):
            way = [steps[rank] for rank in range(first, ranks[b]) if rank in steps]
            if way:
                special[frozenset((a, b))] = Wire(max(wire.latency for wire in way),
                                                  min(wire.bandwidth for wire in way))
    usual = max(special.values(), key=lambda wire: wire.latency, default=Wire(50e-6, 1e9))
    return Network(usual, special)


def grids_of_ranks(
    model: ModelFile | ModelDir, load: Load, members: Sequence[Member],
    figures: Sequence[Figures | None], network: Network, mixes: Sequence[LoadMix],
    sums: SumCost, groups: Sequence[str] = (),
) -> tuple[GridPlan, GridPlan]:
    """Return the best grid of these ranks, and the plain pipeline of all of them.

    figures: of each rank, None if not measured. mixes: the loads. sums: the cost of a sum.
    groups: of the ranks, see `Cluster`.
    Raises UnsupportedArchitecture for a model that cannot be sliced, PlanError for one that does
    not fit.
    """
    hosts = tuple(structs.replace(member, curve=() if one is None else tuple(
        (rows, 1 + one.row_cost * (rows - 1)) for rows in _ROWS))
        for member, one in zip(members, figures, strict=True))
    cluster = Cluster(hosts, network, load, cut_from(model, load), sums, tuple(mixes),
                      groups=tuple(groups))
    return best_grid(cluster), even_grid(cluster, (1,) * min(len(hosts), model.n_layers))
