"""How the ranks of a job come to a plan, before any port exists.

    head        asks one rank of each host and kind to measure itself, plans, tells all their places
    rank k      answers, then learns which rank holds which node; a rank without a node is spare

Every wait has a deadline. A measurement that fails is a note, never the end of a job. Knows no
policies beyond what the planner asks, and no requests.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from pipeinfer.cluster.grid_choice import auto_plan, teams_asked, wide_plan, would_gain
from pipeinfer.config import ClusterConfig, JobConfig
from pipeinfer.core.control import Measure, Measured, Meeting, Placed, TestLinks
from pipeinfer.core.policy import Policy
from pipeinfer.errors import ProtocolError, RankLost, UsageError
from pipeinfer.host import Place
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.nodes import load as load_nodes
from pipeinfer.planning.judge import Curve, Judge, LoadMix, Seat, expected
from pipeinfer.planning.measure import Figures, Hollow, from_json, try_figures
from pipeinfer.planning.partition import Load, Member, Split, level
from pipeinfer.planning.planner import (
    Plan,
    asked_counts,
    estimate,
    load_of,
    make_plan,
    replicate,
    torch_item_bytes,
    with_head,
)

Hosts = Sequence[RankInfo]


class Survey(Struct, frozen=True):
    """What the head knows when it has planned.

    plan: which rank holds which layers
    load: costs and bytes of the model's layers
    members: what the planner knows of each rank that may hold layers
    figures: measurements by rank
    notes: for the user
    """

    plan: Plan
    load: Load
    members: Mapping[int, Member]
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
    auto = config.cluster.grid == "auto"
    teams = None if auto else teams_asked(config, candidates, hosts)
    counts: list[int | None] = [None] * len(candidates)
    if teams is None:
        counts = asked_counts(config.cluster, model, candidates, hosts,
                              nodes.layers if nodes is not None else None)
        counts = leave_spares(config.cluster, counts)
    counts = [0 if hosts[rank].dead else count
              for rank, count in zip(candidates, counts, strict=True)]
    free = [rank for rank, count in zip(candidates, counts, strict=True) if count is None]
    figures: dict[int, Figures] = {}
    notes: list[str] = []
    if place.comm is not None and config.cluster.split == "planned" and len(free) > 1 and not whole:
        figures, notes = _ask(config, place, model, path, hosts, free)
    members = dict(zip(candidates, members_of(candidates, counts, hosts, figures, head_bytes),
                       strict=True))
    load = with_head(load, figures.values())
    judge = judge_of(hosts, expected(policy, config.speculation.parallel))

    def predict(split: Split) -> float:
        return judge(split, candidates) if figures else estimate(split, policy)

    if whole:
        plan = replicate(load, list(members.values()), candidates)
    elif auto and (chosen := auto_plan(config, place, model, load, members, figures, hosts, policy,
                                       expected(policy, config.speculation.parallel)[0], notes)):
        plan = chosen
    elif teams is not None:
        plan = wide_plan(config, model, load, members, hosts, teams, policy, timed=bool(figures))
    else:
        plan = make_plan(config.cluster, load, list(members.values()), candidates, hosts, predict,
                         timed=bool(figures))
        # where ranks take turns, each has all cores that members would have together
        if figures and not auto and config.cluster.turns == "off":
            notes += would_gain(config, place, model, load, members, figures, hosts,
                                expected(policy, config.speculation.parallel)[0])
    if place.comm is not None:
        from pipeinfer.transport import mpi_startup

        ranks = (0, *(holding.rank for holding in plan.held))
        placed = Placed(ranks, meeting, tuple(rank.bell for rank in hosts))
        for rank in range(1, place.size):
            with contextlib.suppress(RankLost):  # found out again, where it can be mended
                mpi_startup.say(place.comm, rank, placed)
    return Survey(plan, load, members, figures, notes)


def judge_of(hosts: Hosts, mixes: tuple[LoadMix, ...], curve: Curve = (), drafts: float = 0.0,
             *, grows: bool = False, turns: bool = False) -> Judge:
    """What tells plans on these ranks apart; GPUs are not shared as cores are.

    drafts: the share of time in which a draft keeps rank 0's cores busy. curve, grows: see `Judge`.
    turns: see `takes_turns`.
    """
    seats = {one.rank: Seat(one.host, max(one.settings.threads, 0)
                            or (one.cores_host if turns else one.cores))
             for one in hosts if not one.settings.on_gpu}
    cores = {one.host: float(max(one.cores_host, 1)) for one in hosts}
    first = hosts[0].host
    cores[first] = max(cores[first] - drafts * hosts[0].cores, 1.0)
    return Judge(seats, cores, mixes, curve, grows=grows)


def leave_spares(config: ClusterConfig, counts: list[int | None]) -> list[int | None]:
    """The counts with the last `--spares` candidates holding nothing. Raises UsageError."""
    if not config.spares:
        return counts
    if config.spares >= len(counts):
        raise UsageError(f"--spares {config.spares} leaves no rank for a stage: only {len(counts)} "
                         "ranks can hold layers; start more ranks, or lower --spares")
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
        host, memory = hosts[rank].host, hosts[rank].memory
        if host == hosts[0].host:
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
        one = hosts[rank].settings
        kinds.setdefault((hosts[rank].host, hosts[rank].cores, one.threads, one.device,
                          one.gpu_layers, one.numa, one.backend), []).append(rank)
    asked = [group[0] for group in kinds.values()]
    hollow = Hollow.of(model).to_json() if config.cluster.distribute else None
    for rank in asked:
        if rank != 0:
            with contextlib.suppress(RankLost):  # the answer will not come either
                mpi_startup.say(place.comm, rank, Measure(
                    structs.asdict(hosts[rank].settings), str(path), model.fingerprint, hollow))
    answers: dict[int, Measured] = {}
    if 0 in asked:
        answers[0] = _answer(config, place, hosts[0].settings, path, model.fingerprint)
    for rank in asked:
        if rank != 0:
            try:
                heard = mpi_startup.hear(place.comm, rank, config.cluster.timeout)
                answers[rank] = heard if isinstance(heard, Measured) else Measured(
                    error=f"it answered with the unexpected message {type(heard).__name__}")
            except RankLost as lost:
                answers[rank] = Measured(error=str(lost))
    figures: dict[int, Figures] = {}
    notes = []
    for group in kinds.values():
        answer = answers[group[0]]
        try:
            found = from_json(answer.figures)
        except ValueError:
            notes.append(f"rank {group[0]} on {hosts[group[0]].host} could not measure itself: "
                         f"{answer.error or 'its answer is unreadable'}")
            continue
        figures |= dict.fromkeys(group, found)
    return figures, notes


def _answer(
    config: JobConfig, place: Place, settings: NodeSettings, path: Path, fingerprint: str,
    hollow: Mapping[str, Any] | None = None,
) -> Measured:
    from pipeinfer.host import threads_of
    from pipeinfer.llama.library import ensure_llama
    from pipeinfer.nodes import settle

    config = settle(config, place, settings)
    ensure_llama(config.model.numa)
    return try_figures(config, path, fingerprint, threads_of(config.model.threads, place), hollow)


def await_place(config: JobConfig, place: Place) -> Placed:
    """Rank k: answer the head until it says who holds which node. Raises ProtocolError for what is
    neither."""
    from pipeinfer.transport import mpi_startup

    while True:
        match mpi_startup.hear(place.comm, 0, config.cluster.timeout):
            case Placed() as placed:
                return placed
            case Measure(settings, model, fingerprint, hollow):
                mpi_startup.say(place.comm, 0, _answer(
                    config, place, NodeSettings(**settings), Path(model), fingerprint, hollow))
            case TestLinks():
                links = [structs.asdict(one) for one in mpi_startup.measure_links(place.comm)]
                mpi_startup.say(place.comm, 0, Measured({"links": links}))
            case other:
                raise ProtocolError(f"rank 0 sent {type(other).__name__} before the job began")
