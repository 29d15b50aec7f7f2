"""The memory that the next job would need on each of its hosts, and the free memory there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeinfer import host
from pipeinfer.backends.factory import EXACT_LIMIT
from pipeinfer.cli import doctor_hosts
from pipeinfer.cluster.policy_choice import choose_policy, draft_models, for_state
from pipeinfer.cluster.sizing import rows_and_cells, states_for
from pipeinfer.config import JobConfig
from pipeinfer.errors import PipeinferError
from pipeinfer.models.locate import context_size, model_paths, open_model
from pipeinfer.nodes import ranks_of, read_nodes
from pipeinfer.planning.planner import load_of
from pipeinfer.supervise.hosts import Roster
from pipeinfer.supervise.overlap import Room

HERE = "this host"
RANK = 300 << 20  #: bytes of a rank without any layer: Python, libraries, buffers
_UNEVEN = 1.5  #: times an equal share that a plan may give to one host of several
_TORCH_BYTES = 4  #: of a weight there, at most


def rooms(config: JobConfig, ranks: int, roster: Roster | None) -> tuple[list[Room], str]:
    """Return the memory of a job's hosts; or [] and the reason why it is unknown.

    Reads the models' headers and contacts the hosts. roster: the hosts, None for this one.
    """
    names: Sequence[str]
    if roster is None:
        names, free = [HERE] * ranks, {HERE: host.free_memory()}
    else:
        names = ranks_of(roster.used, ranks, roster.hostfile)
        free = doctor_hosts.free_memory(roster.used)
    try:
        if trouble := _unknown(config, names, roster.nodes if roster else config.cluster.nodes):
            return [], trouble
        found = needs(config, names)
    except PipeinferError as error:
        return [], str(error)
    return [Room(name, float(free.get(name, 0)), need) for name, need in found.items()], ""


def needs(config: JobConfig, names: Sequence[str]) -> dict[str, float]:
    """Return the most bytes by host for ranks on hosts of these names.

    Raises PipeinferError if a model is not on this host.
    """
    target, draft = model_paths(config)
    model = open_model(target)
    config = for_state(config, model)
    alone = len(names) == 1
    stages = list(names) if config.cluster.head_stage or alone else list(names[1:])
    _, n_batch, cells = rows_and_cells(
        config, context_size(config.model, model), EXACT_LIMIT, len(stages))

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
    for name, count in Counter(stages).items():
        need[name] += min(count * share, max(whole, share)) + count * scratch
    for path in draft_models(config, draft, choose_policy(config, draft)):
        need[names[0]] += sum(bytes_of(path))
    return need


def _unknown(config: JobConfig, names: Sequence[str], nodes: str) -> str:
    """Return why the needed memory is unknown, "" if it is known. nodes: path of a nodes file,
    or ""."""
    model = config.model
    found = [(model.gpu_layers, model.device, model.backend)]
    if nodes:
        settings = read_nodes(nodes)
        found += [(one.gpu_layers or 0, one.device or model.device, one.backend or model.backend)
                  for one in map(settings.of, set(names))]
    for layers, device, backend in found:
        if layers or device.startswith("gpu") or (backend == "torch" and device != "cpu"):
            return "memory of GPUs is not asked for"
    return ""
