"""What ranks tell of themselves at the start, and whether they can work together.

Knows versions, options and host facts; no model, no plan and no request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pipeinfer import __version__, host
from pipeinfer.backends.pytorch.options import missing_packages
from pipeinfer.config import JobConfig
from pipeinfer.core.codec import VERSION
from pipeinfer.errors import MismatchError, RankLost
from pipeinfer.host import Place
from pipeinfer.models.llama import llama_version
from pipeinfer.nodes import Nodes, check_head
from pipeinfer.nodes import load as load_nodes

_PER_NODE_FIELDS = frozenset({"threads", "threads_draft", "gpu_layers", "gpu_layers_draft", "numa",
                              "keep_binding", "trace", "nodes", "backend", "device"})


def hello(config: JobConfig, place: Place) -> dict[str, Any]:
    """What this rank tells the head: versions, config digest, host facts."""
    shared = {k: v for k, v in config.values().items() if k not in _PER_NODE_FIELDS}
    digest = hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=8)
    return {
        "rank": place.rank, "version": __version__, "protocol": VERSION,
        "backend": llama_version(), "config": digest.hexdigest(),
        "asked_backend": config.model.backend, "torch_missing": missing_packages(),
        "values": {k: repr(v)[:80] for k, v in shared.items()},
        **host.facts(place.cores, place.local_rank, place.local_size).to_json(),
        "bell": _bell(place),
    }


def _bell(place: Place) -> dict[str, str]:
    if place.comm is None:
        return {"name": "", "host": ""}
    from pipeinfer.transport import mpi_job

    return mpi_job.own_bell()


def compare(config: JobConfig, place: Place) -> list[dict[str, Any]]:
    """Every rank's hello; raises MismatchError when they can not work together."""
    mine = hello(config, place)
    if place.comm is None:
        return [mine]
    from pipeinfer.transport import mpi_job, mpi_startup

    texts = mpi_startup.gather_json(place.comm, json.dumps(mine), instead=json.dumps(
        mine | {"dead": True, "host": "a dead host", "memory_available": 0,
                "bell": {"name": "", "host": ""}}))
    assert texts is not None
    hellos = [json.loads(text) | {"rank": rank} for rank, text in enumerate(texts)]
    dead = [one["rank"] for one in hellos if "dead" in one]
    if dead and not mpi_job.survivable():
        raise RankLost(dead[0], "died while the job started")
    for other in hellos[1:]:
        who = f"rank {other['rank']} on {other['host']}"
        for key, what in (("version", "pipeinfer"), ("protocol", "protocol"),
                          ("backend", "llama-cpp-python")):
            if other[key] != mine[key]:
                raise MismatchError(
                    f"{who} runs {what} {other[key]}, rank 0 on {mine['host']} runs {mine[key]}: "
                    "install the same version on every host"
                )
        if other["config"] != mine["config"]:
            names = [k for k, v in mine["values"].items() if other["values"].get(k) != v]
            raise MismatchError(
                f"{who} has other values than rank 0 for {', '.join(names)}: give every rank the "
                "same options (PIPEINFER_* variables and config files differ between hosts?)"
            )
    return hellos


def take_settings(config: JobConfig, hosts: list[dict[str, Any]]) -> None:
    """Put each rank's settings of the nodes file into its hello, and bound its memory by them.

    Raises UsageError when the file can not be used or names another host as the head.
    """
    nodes = load_nodes(config.cluster) or Nodes("")
    check_head(nodes, [rank["host"] for rank in hosts])
    for rank in hosts:
        settings = nodes.of(rank["host"])
        rank["settings"] = dataclasses.asdict(settings)
        rank["asked_backend"] = settings.options(config.given).get("backend",
                                                                   rank["asked_backend"])
        if settings.memory is not None:
            rank["memory_available"] = min(rank["memory_available"], settings.memory)
