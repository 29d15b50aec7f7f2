"""The memory that the next job would need on each of its hosts and their GPUs, and what is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeinfer import host
from pipeinfer.backends.factory import EXACT_LIMIT
from pipeinfer.cli import doctor_hosts
from pipeinfer.cluster.draft_ranks import draft_ranks_of, own_proposers, with_draft_ranks
from pipeinfer.cluster.policy_choice import (
    choose_policy,
    draft_models,
    for_chains,
    for_state,
    on_gpus,
)
from pipeinfer.cluster.sizing import ids_for, rows_and_cells, states_for, stream_cells
from pipeinfer.config import JobConfig
from pipeinfer.errors import PipeinferError
from pipeinfer.models.locate import context_size, model_paths, open_model
from pipeinfer.nodes import HostEntry, Nodes, RankInfo, ranks_of, read_nodes
from pipeinfer.planning.planner import load_of
from pipeinfer.supervise.hosts import Roster
from pipeinfer.supervise.overlap import Room

HERE = "localhost"
GPUS = "the GPUs of {}"  #: names their memory; {}: the host
RANK = 300 << 20  #: bytes of a rank without any layer: Python, libraries, buffers
_UNEVEN = 1.5  #: times an equal share that a plan may give to one host of several
_TORCH_BYTES = 4  #: of a weight there, at most


def rooms(config: JobConfig, ranks: int, roster: Roster | None) -> tuple[list[Room], str]:
    """Return the memory of a job's hosts; or [] and the reason why it is unknown.

    Reads the models' headers and contacts the hosts. roster: the hosts, None for this one.
    """
    names: Sequence[str]
    if roster is None:
        names, free, used = [HERE] * ranks, {HERE: host.free_memory()}, [HostEntry(HERE, ranks, 0)]
    else:
        names, used = ranks_of(roster.used, ranks, roster.hostfile), roster.used
        free = doctor_hosts.free_memory(used)
    try:
        hosts = _hosts(config, names, roster.nodes if roster else config.cluster.nodes)
        if any(_torch_on_gpu(config, one) for one in hosts):
            return [], "memory of GPUs is not asked for where torch computes"
        found = needs(config, hosts)
    except PipeinferError as error:
        return [], str(error)
    if there := [one for one in used if GPUS.format(one.host) in found]:
        devices = {one.host: one.settings.device for one in hosts}
        free |= {GPUS.format(name): count for name, count in doctor_hosts.free_gpu_memory(
            there, devices).items()}
    return [Room(name, float(free.get(name, 0)), need) for name, need in found.items()], ""


def needs(config: JobConfig, hosts: Sequence[RankInfo]) -> dict[str, float]:
    """Return the most bytes of these ranks by host, and by `GPUS` of a host.

    Raises PipeinferError if a model is not on this host.
    """
    target, draft = model_paths(config)
    model = open_model(target)
    config, chains = for_state(config, model), on_gpus(config, model, hosts)
    config = for_chains(config) if chains else config
    hosts = with_draft_ranks(config, list(hosts))
    own, shared = own_proposers(config, hosts, draft), draft_ranks_of(hosts)
    names = [one.host for one in hosts]
    alone = len(names) == 1
    stages = [one.host for one in hosts if alone or (
        (one.rank or config.cluster.head_stage) and not one.settings.drafts)]
    _, n_batch, cells = rows_and_cells(
        config, context_size(config.model, model), EXACT_LIMIT, len(stages))
    if chains:
        cells = max(cells, ids_for(config.speculation, 0, chains=True) * stream_cells(
            context_size(config.model, model)))

    def bytes_of(path: Path) -> tuple[float, float]:
        """Return the bytes of all layers, and the scratch bytes on each rank that has some."""
        one = open_model(path)
        torch = config.model.backend == "torch" or path.is_dir()
        load = load_of(one, cells, n_batch, _TORCH_BYTES if torch else 0,
                       states_for(config.speculation, len(stages)))
        return load.stage_bytes(0, one.n_layers) - load.scratch, load.scratch

    whole, scratch = bytes_of(target)
    share = whole if config.speculation.layout == "replicate" else whole / max(
        1, len(stages) - config.cluster.spares)
    if len(set(stages)) > 1:
        share *= _UNEVEN
    need: dict[str, float] = {name: float(RANK * count) for name, count in Counter(names).items()}
    layers_on_gpu = {one.host: one.gpu_layers(config) for one in hosts}
    for name, count in Counter(stages).items():
        size = min(count * share, max(whole, share)) + count * scratch
        on_gpu = min(layers_on_gpu[name] / model.n_layers, 1.0)
        if on_gpu < 1:
            need[name] += size
        if on_gpu:  # a stage with few layers may have all of them there
            _add(need, GPUS.format(name), min(size, on_gpu * whole + count * scratch))
    drafts = draft_models(config, draft, choose_policy(config, draft, own=bool(own)))
    places = [(path, shared if shared and path is drafts[-1] else (0,)) for path in drafts]
    for path, ranks in (*places, *((one.draft, one.ranks) for one in own if one.draft)):
        for one in (hosts[rank] for rank in ranks):
            there = GPUS.format(one.host) if one.drafts_on_gpu(config) else one.host
            _add(need, there, sum(bytes_of(path)) / len(ranks))
    return need


def _add(need: dict[str, float], name: str, size: float) -> None:
    need[name] = need.get(name, 0.0) + size


def _hosts(config: JobConfig, names: Sequence[str], nodes: str) -> list[RankInfo]:
    """Return the ranks on hosts of these names. nodes: path of a nodes file, or ""."""
    settings = read_nodes(nodes) if nodes else Nodes("")
    own = [settings.of(name, rank) for rank, name in enumerate(names)]
    return [RankInfo(rank, name, settings=own[rank], asked_backend=str(
        own[rank].options(config.given).get("backend", config.model.backend)))
        for rank, name in enumerate(names)]


def _torch_on_gpu(config: JobConfig, one: RankInfo) -> bool:
    device = one.settings.options(config.given).get("device", config.model.device)
    return one.asked_backend == "torch" and device != "cpu"
