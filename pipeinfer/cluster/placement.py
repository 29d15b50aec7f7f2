"""How the ranks of a job come to a plan, before any port exists.

    head        asks one rank of each host and kind to measure itself, plans, tells all their places
    rank k      answers, then learns which rank holds which node; a rank without a node is spare

Every wait has a deadline. A measurement that fails is a note, never the end of a job. Knows no
policies beyond what the planner asks, and no requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.cluster.heartbeat import Meeting
from pipeinfer.config import ClusterConfig, JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.errors import RankLost, UsageError
from pipeinfer.host import Place
from pipeinfer.nodes import load as load_nodes
from pipeinfer.planning.measure import Figures, Hollow, from_json, try_figures
from pipeinfer.planning.partition import Load, Member, level
from pipeinfer.planning.planner import (
    Plan,
    asked_counts,
    estimate,
    load_of,
    make_plan,
    replicate,
    torch_item_bytes,
)

Hosts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Survey:
    """What the head knows when it has planned: the plan, what it rests on, notes for the user."""

    plan: Plan
    load: Load
    members: list[Member]
    figures: Mapping[int, Figures]
    notes: list[str]


def agree(
    config: JobConfig, place: Place, model: Any, path: Path, hosts: Hosts, policy: Policy,
    n_cells: int, n_batch: int, head_bytes: int, meeting: Meeting | None = None,
) -> Survey:
    """Head: plan, and tell every rank.

    head_bytes: what the draft takes of rank 0's memory. meeting: where heartbeats go. Raises
    PlanError and UsageError.
    """
    load = load_of(model, n_cells, n_batch, torch_item_bytes(config, model, hosts))
    candidates = list(range(0 if config.cluster.head_stage or place.size == 1 else 1, place.size))
    whole = config.speculation.layout == "replicate"
    nodes = load_nodes(config.cluster)
    counts = asked_counts(config.cluster, model, candidates, hosts,
                          nodes.layers if nodes is not None else None)
    counts = leave_spares(config.cluster, counts)
    counts = [0 if "dead" in hosts[rank] else count
              for rank, count in zip(candidates, counts, strict=True)]
    free = [rank for rank, count in zip(candidates, counts, strict=True) if count is None]
    figures: dict[int, Figures] = {}
    notes: list[str] = []
    if place.comm is not None and config.cluster.split == "planned" and len(free) > 1 and not whole:
        figures, notes = _ask(config, place, model, path, hosts, free)
    members = members_of(candidates, counts, hosts, figures, head_bytes)
    plan = replicate(load, members, candidates) if whole else make_plan(
        config.cluster, load, members, candidates, hosts, lambda split: estimate(split, policy),
        timed=bool(figures))
    if place.comm is not None:
        from pipeinfer.transport import mpi_startup

        text = json.dumps({"kind": "start", "rank_of": [0, *plan.ranks],
                           "meeting": meeting and dataclasses.asdict(meeting),
                           "bells": [rank["bell"] for rank in hosts]})
        for rank in range(1, place.size):
            with contextlib.suppress(RankLost):  # found out again, where it can be mended
                mpi_startup.send_json(place.comm, rank, text)
    return Survey(plan, load, members, figures, notes)


def leave_spares(config: ClusterConfig, counts: list[int | None]) -> list[int | None]:
    """The counts with the last `--spares` candidates holding nothing. Raises UsageError."""
    if not config.spares:
        return counts
    if config.spares >= len(counts):
        raise UsageError(f"--spares {config.spares} leaves no rank for a stage: {len(counts)} can "
                         "hold one; start more ranks")
    return [*counts[:-config.spares], *[0] * config.spares]


def members_of(
    candidates: Sequence[int], counts: Sequence[int | None], hosts: Hosts,
    figures: Mapping[int, Figures], head_bytes: int = 0,
) -> list[Member]:
    """What the planner sees of the ranks; a rank without figures is taken for a middling one."""
    speeds = level({rank: found.per_byte for rank, found in figures.items()})
    middling = statistics.median(speeds.values()) if speeds else 1.0
    members = []
    for rank, count in zip(candidates, counts, strict=True):
        host = str(hosts[rank]["host"])
        memory = float(hosts[rank]["memory_available"])
        if host == hosts[0]["host"]:
            memory = max(0.0, memory - head_bytes)
        members.append(Member(f"rank {rank} on {host}", speeds.get(rank, middling),
                              memory=memory, layers=count))
    return members


def _ask(
    config: JobConfig, place: Place, model: Any, path: Path, hosts: Hosts, ranks: Sequence[int]
) -> tuple[dict[int, Figures], list[str]]:
    """Figures by rank: ranks of one host and kind share one measurement."""
    from pipeinfer.transport import mpi_startup

    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank in ranks:
        settings = hosts[rank]["settings"]
        kinds.setdefault((hosts[rank]["host"], hosts[rank]["cores"], *(
            settings[key] for key in ("threads", "device", "gpu_layers", "numa", "backend"))),
            []).append(rank)
    asked = [group[0] for group in kinds.values()]
    hollow = Hollow.of(model).to_json() if config.cluster.distribute else None
    for rank in asked:
        if rank != 0:
            with contextlib.suppress(RankLost):  # the answer will not come either
                mpi_startup.send_json(place.comm, rank, json.dumps({
                    "kind": "measure", "settings": hosts[rank]["settings"], "model": str(path),
                    "fingerprint": model.fingerprint, "hollow": hollow}))
    answers = {}
    if 0 in asked:
        answers[0] = _answer(config, place, hosts[0]["settings"], path, model.fingerprint)
    for rank in asked:
        if rank != 0:
            try:
                answers[rank] = json.loads(
                    mpi_startup.receive_json(place.comm, rank, config.cluster.timeout))
            except RankLost as lost:
                answers[rank] = {"error": str(lost)}
    figures: dict[int, Figures] = {}
    notes = []
    for group in kinds.values():
        answer = answers[group[0]]
        try:
            found = from_json(answer.get("figures"))
        except ValueError:
            notes.append(f"rank {group[0]} on {hosts[group[0]]['host']} could not measure itself: "
                         f"{answer.get('error', 'no answer that can be read')}")
            continue
        figures |= dict.fromkeys(group, found)
    return figures, notes


def _answer(
    config: JobConfig, place: Place, settings: dict[str, Any], path: Path, fingerprint: str,
    hollow: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    from pipeinfer.host import threads_of
    from pipeinfer.models.llama import ensure_llama
    from pipeinfer.nodes import settle

    config = settle(config, place, settings)
    ensure_llama(config.model.numa)
    return try_figures(config, path, fingerprint, threads_of(config.model.threads, place), hollow)


@dataclass(frozen=True, slots=True)
class Called:
    """Who holds which node (`rank_of[node]`), where heartbeats go, every rank's doorbell."""

    rank_of: tuple[int, ...]
    meeting: Meeting | None
    bells: list[dict[str, str]]


def await_place(config: JobConfig, place: Place) -> Called:
    """Rank k: answer the head until it says who holds which node."""
    from pipeinfer.transport import mpi_startup

    while True:
        message = json.loads(mpi_startup.receive_json(place.comm, 0, config.cluster.timeout))
        if message["kind"] == "start":
            meeting = message["meeting"]
            return Called(tuple(map(int, message["rank_of"])), meeting and Meeting(**meeting),
                          message["bells"])
        answer = _answer(config, place, message["settings"], Path(message["model"]),
                         message["fingerprint"], message["hollow"])
        mpi_startup.send_json(place.comm, 0, json.dumps(answer))
