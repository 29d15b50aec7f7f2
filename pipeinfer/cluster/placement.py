"""How the ranks of a job agree on a plan, before any port exists.

    head        sends one rank of each host and kind a request to measure itself, plans, and
                sends every rank the assignment of nodes to ranks
    rank k      answers, then receives the assignment; a rank without a node is a spare

Which layers are on a GPU, and whether they fit it, is decided here as well. Every wait has a
deadline. A failed measurement is a note, never the end of a job. This module has
no requests, and of policies only what the planner needs.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from pipeinfer.backends.factory import backend_for
from pipeinfer.cluster.grid_choice import GridChoice, GridPlanner, teams_asked, users_of
from pipeinfer.cluster.resolve import JobFacts, JobPlan
from pipeinfer.cluster.sizing import states_for
from pipeinfer.config import ClusterConfig, JobConfig
from pipeinfer.core.control import Assignment, Measure, Measured, Meeting, TestLinks
from pipeinfer.core.policy import Policy
from pipeinfer.errors import PlanError, ProtocolError, RankLost, UsageError
from pipeinfer.host import Place, visible_gpus
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.nodes import load as load_nodes
from pipeinfer.planning.judge import Curve, Judge, LoadMix, Seat, expected
from pipeinfer.planning.measure import Figures, Hollow, from_json, try_figures
from pipeinfer.planning.partition import Load, Member, by_slowest, level, size_text
from pipeinfer.planning.planner import (
    Plan,
    asked_counts,
    load_of,
    make_plan,
    torch_item_bytes,
    with_head,
)
from pipeinfer.planning.wide import share_of
from pipeinfer.waiting import unless_within

_QUIET = 3.0  #: seconds after which a wait is explained

Hosts = Sequence[RankInfo]


class Survey(Struct, frozen=True):
    """The result of planning.

    plan: the assignment of layers to ranks
    load: costs and bytes of the model's layers
    members: by rank, what it may hold
    figures: measurements by rank
    notes: for the user
    """

    plan: Plan
    load: Load
    members: Mapping[int, Member]
    figures: Mapping[int, Figures]
    notes: list[str]

    def located(self, hosts: Hosts) -> list[RankInfo]:
        """Return the ranks with the name of the memory that each fills."""
        return [structs.replace(one, room=self.members[one.rank].room)
                if one.rank in self.members else one for one in hosts]


class Job(JobPlan, frozen=True):
    """What is decided before any stage loads.

    facts: from which it was resolved
    target: the model's file
    n_ctx: tokens of a request. width: most rows of a verifying run. n_batch: of any run
    tried: rows of the widest decode that stages try for exactness
    notes: for the user
    """

    facts: JobFacts
    target: Path
    n_ctx: int
    width: int
    tried: int
    n_batch: int
    survey: Survey
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The assignment of layers at the start."""
        return self.survey.plan

    @property
    def model(self) -> Any:
        """The target's header."""
        return self.facts.model


def agree(  # noqa: PLR0913
    config: JobConfig, place: Place, model: Any, path: Path, hosts: Hosts, policy: Policy,
    n_cells: int, n_batch: int, head_bytes: int, meeting: Meeting | None = None, *,
    pictures: bool = False, foresee: bool = False,
) -> Survey:
    """Head: plan, and send every rank its place.

    path: of the model. n_cells: of each stage's KV cache. n_batch: rows of the widest run.
    head_bytes: memory on rank 0 that the draft and a projector take.
    meeting: where ranks send heartbeats.
    pictures: whether the first stage reads their rows.
    foresee: measure a rank that has all layers, too, to say how fast it will be.
    Raises PlanError and UsageError.
    """
    load = load_of(model, n_cells, n_batch, torch_item_bytes(config, model, hosts),
                   states_for(config.speculation, place.size), pictures=pictures)
    candidates = list(range(0 if config.cluster.head_stage or place.size == 1 else 1, place.size))
    with_gpus = offloading(config, model, hosts)
    if 0 not in candidates and not (head_bytes and hosts[0].drafts_on_gpu(config)):
        with_gpus = [rank for rank in with_gpus if rank]  # rank 0 alone would open no GPU
    auto = config.cluster.grid == "auto"
    teams = None if auto else teams_asked(config, candidates, hosts)
    counts = _counts(config, model, candidates, hosts, free=teams is not None)
    free = [rank for rank, count in zip(candidates, counts, strict=True) if count is None]
    figures: dict[int, Figures] = {}
    everyone, hosts = hosts, on_their_gpus(config, model, hosts, {})

    def seated() -> list[Member]:
        return members_of(candidates, counts, hosts, figures, head_bytes,
                          drafts_on_gpu=hosts[0].drafts_on_gpu(config))

    planned = config.cluster.split == "planned" and len(free) > (0 if foresee else 1)
    if planned and teams is None and not auto:  # what fits nowhere is refused before it is read
        make_plan(config.cluster, load, seated(), candidates, hosts,
                  by_slowest, timed=False)
    figures, notes, answers = _ask(
        config, place, model, path, everyone, free if planned else (), with_gpus)
    hosts = on_their_gpus(config, model, everyone, answers)
    members = dict(zip(candidates, seated(), strict=True))
    load = with_head(without_embedding(load, hosts[candidates[0]]), figures.values())
    judge = judge_of(hosts, expected(policy, config.speculation.parallel))

    grids = GridPlanner(config, model, load, members, figures, hosts, policy,
                        expected(policy, users_of(config)))
    if auto and (chosen := grids.auto(place, notes)):
        plan = chosen
    elif teams is not None:
        plan = grids.plan(GridChoice(teams))
    else:
        plan = make_plan(config.cluster, load, list(members.values()), candidates, hosts,
                         lambda split: judge(split, candidates), timed=bool(figures))
        # where ranks take turns, each has all cores that members would have together
        if figures and not auto and config.cluster.turns == "off":
            notes += grids.would_gain(place)
    check_devices(config, load, plan, hosts, head_bytes)
    notes += notes_on(plan, hosts, {rank: answers[rank] for rank in with_gpus})
    if place.comm is not None:
        _send_places(place, hosts, plan, meeting)
    return Survey(plan, load, members, figures, notes)


def _send_places(place: Place, hosts: Hosts, plan: Plan, meeting: Meeting | None) -> None:
    from pipeinfer.transport import mpi_job

    ranks = (0, *(holding.rank for holding in plan.held))
    placed = Assignment(ranks, meeting, tuple(rank.bell for rank in hosts))
    for rank in range(1, place.size):
        with contextlib.suppress(RankLost):  # detected again later, when it can be recovered
            mpi_job.say(place.comm, rank, placed)


def _counts(config: JobConfig, model: Any, candidates: Sequence[int], hosts: Hosts, *, free: bool
            ) -> list[int | None]:
    """The layers of each candidate that are set; 0 for spares and ranks that are gone.

    free: whether no layers can be set, and no spares.
    """
    nodes = load_nodes(config.cluster)
    counts: list[int | None] = [None] * len(candidates)
    if not free:
        whole = nodes.layers if nodes else None
        counts = leave_spares(config.cluster, asked_counts(
            config.cluster, model, candidates, hosts, whole), candidates, hosts)
    return [0 if hosts[rank].dead else count
            for rank, count in zip(candidates, counts, strict=True)]


def judge_of(hosts: Hosts, mixes: tuple[LoadMix, ...], curve: Curve = (), drafts: float = 0.0,
             *, grows: bool = False, time_sharing: bool = False) -> Judge:
    """Return the judge that compares plans on these ranks. GPUs are not shared as cores are.

    mixes: the loads to judge by.
    curve: see `Judge`.
    drafts: share of the time in which a draft keeps rank 0's cores busy.
    grows: see `Judge`.
    time_sharing: see `shares_cores`.
    """
    seats = {one.rank: Seat(one.host, max(one.settings.threads, 0)
                            or (one.cores_host if time_sharing else one.cores))
             for one in hosts if not (one.settings.on_gpu or one.room)}
    cores = {one.host: float(max(one.cores_host, 1)) for one in hosts}
    first = hosts[0].host
    cores[first] = max(cores[first] - drafts * hosts[0].cores, 1.0)
    return Judge(seats, cores, mixes, curve, grows=grows)


def leave_spares(config: ClusterConfig, counts: Sequence[int | None], candidates: Sequence[int],
                 hosts: Hosts) -> list[int | None]:
    """Return the counts with 0 for the last `--spares` candidates, of those that do not draft.

    Raises UsageError if none is left.
    """
    able = [k for k, rank in enumerate(candidates) if not hosts[rank].settings.drafts]
    if config.spares and config.spares >= len(able):
        raise UsageError(f"--spares {config.spares} leaves no rank for a stage: only {len(able)} "
                         "ranks can hold layers; start more ranks, or lower --spares")
    spares = able[len(able) - config.spares:]
    return [0 if k in spares else count for k, count in enumerate(counts)]


def members_of(
    candidates: Sequence[int], counts: Sequence[int | None], hosts: Hosts,
    figures: Mapping[int, Figures], head_bytes: int = 0, *, drafts_on_gpu: bool = False,
) -> list[Member]:
    """Return the ranks as the planner sees them; a rank without measurements gets the median
    speed.

    head_bytes: that rank 0's draft takes, of its host's memory or, with `drafts_on_gpu`, of its
        GPU's.
    """
    speeds = level({rank: found.per_byte for rank, found in figures.items()})
    middling = statistics.median(speeds.values()) if speeds else 1.0
    members = []
    for rank, count in zip(candidates, counts, strict=True):
        one, memory = hosts[rank], hosts[rank].memory
        if one.host == hosts[0].host and (one.device < memory or bool(one.room) == drafts_on_gpu):
            memory = max(0.0, memory - head_bytes)
        overhead = figures[rank].overhead if rank in figures else 0.0
        members.append(Member(f"rank {rank} on {one.room or one.host}", speeds.get(rank, middling),
                              overhead, memory=memory, layers=count, room=one.room))
    return members


@unless_within(_QUIET, lambda: sys.stderr.write(
    "pipeinfer: ranks measure how fast they are with this model, before each loads its layers\n"))
def _ask(
    config: JobConfig, place: Place, model: Any, path: Path, hosts: Hosts, ranks: Sequence[int],
    offloading: Sequence[int],
) -> tuple[dict[int, Figures], list[str], dict[int, Measured]]:
    """Request measurements of `ranks`; return them by rank, with notes on failures, and the
    answers. Ranks of one host and kind share one measurement; each of `offloading`, with layers on
    a GPU, reports its memory."""
    if place.comm is not None:
        from pipeinfer.transport import mpi_job
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank in ranks:
        one = hosts[rank].settings
        kinds.setdefault((hosts[rank].host, hosts[rank].cores, one.threads, one.device,
                          one.gpu_layers, one.numa, one.backend), []).append(rank)
    measured = {group[0] for group in kinds.values()}
    asked = sorted({*measured, *offloading})
    hollow = msgspec.to_builtins(Hollow.of(model)) if config.cluster.distribute else None
    for rank in asked:
        if rank != 0:
            with contextlib.suppress(RankLost):  # the answer will not come either
                mpi_job.say(place.comm, rank, Measure(
                    structs.asdict(hosts[rank].settings), str(path), model.fingerprint, hollow,
                    rank not in measured))
    answers: dict[int, Measured] = {}
    if 0 in asked:
        answers[0] = measure_here(config, place, hosts[0].settings, path, model.fingerprint,
                                  memory_only=0 not in measured)
    for rank in asked:
        if rank != 0:
            try:
                heard = mpi_job.hear(place.comm, rank, config.cluster.start_timeout)
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
    return figures, notes, answers


def measure_here(
    config: JobConfig, place: Place, settings: NodeSettings, path: Path, fingerprint: str,
    hollow: Mapping[str, Any] | None = None, *, memory_only: bool = False,
) -> Measured:
    """Measure the model's layers on this rank: its figures, or why there are none; memory_only: no
    figures."""
    from pipeinfer.host import threads_of
    from pipeinfer.llama.library import ensure_llama, gpus
    from pipeinfer.nodes import settle

    config = settle(config, place, settings)
    ensure_llama(config.model.numa)
    there = gpus() if config.model.gpu_layers else ()
    found = Measured() if memory_only else try_figures(
        config, path, fingerprint, threads_of(config.model.threads, place), hollow)
    return structs.replace(
        found, gpu=visible_gpus(), gpu_name=", ".join(one.description for one in there),
        gpu_free=float(sum(one.free for one in there)))


def await_place(config: JobConfig, place: Place) -> Assignment:
    """Rank k: answer the head's requests until it sends the assignment; return that.

    Raises ProtocolError for any other message.
    """
    from pipeinfer.transport import mpi_job

    # how many measurements rank 0 wants depends on what the ranks have told it
    while True:
        match mpi_job.hear(place.comm, 0, config.cluster.start_timeout):
            case Assignment() as placed:
                return placed
            case Measure(settings, model, fingerprint, hollow, memory_only):
                mpi_job.say(place.comm, 0, measure_here(
                    config, place, NodeSettings(**settings), Path(model), fingerprint, hollow,
                    memory_only=memory_only))
            case TestLinks():
                links = [structs.asdict(one) for one in mpi_job.measure_links(place.comm)]
                mpi_job.say(place.comm, 0, Measured({"links": links}))
            case other:
                raise ProtocolError(f"rank 0 sent {type(other).__name__} before the job began")


def offloading(config: JobConfig, model: Any, hosts: Sequence[RankInfo]) -> list[int]:
    """Return the living ranks whose layers of the model would be on a GPU, all or some."""
    return [one.rank for one in hosts if not one.dead and one.gpu_layers(config)
            and backend_for(one.asked_backend, model.path) == "llamacpp"]


def on_their_gpus(config: JobConfig, model: Any, hosts: Sequence[RankInfo],
                  answers: Mapping[int, Measured]) -> list[RankInfo]:
    """Return the ranks with the memory of their GPUs in the place of their hosts', without a bound
    where it is not known; with that of their hosts where there is no GPU.

    answers: by rank, of those that were asked.
    """
    ranks = offloading(config, model, hosts)
    return [_on_gpu(config, model, one, answers.get(one.rank)) if one.rank in ranks else one
            for one in hosts]


def _on_gpu(config: JobConfig, model: Any, one: RankInfo, answer: Measured | None) -> RankInfo:
    settings, room, free = one.settings, f"{one.host}, its GPUs", 0.0
    if answer is not None and not (answer.gpu_name or answer.error):
        return one
    if answer is not None and answer.gpu_name:
        which = f"GPU {answer.gpu}" if answer.gpu else "its GPUs"
        room, free = f"{one.host}, {which} ({answer.gpu_name})", answer.gpu_free
    bound = settings.memory if settings.gpu_memory is None else settings.gpu_memory
    device = min(free or math.inf, math.inf if bound is None else bound)
    memory = device
    if one.gpu_layers(config) < model.n_layers:  # the others stay in the host's
        memory += one.memory
        if settings.gpu_memory is None and bound is not None:
            memory = min(memory, bound)
    return structs.replace(one, memory=memory, room=room, device=device)


def without_embedding(load: Load, first: RankInfo) -> Load:
    """Return the load without the embedding where that is not in the memory that the first stage
    fills: llama.cpp leaves it to the processor.

    first: the rank of that stage.
    """
    whole = first.room and first.memory <= first.device
    return structs.replace(load, first_bytes=0.0) if whole else load


def check_devices(config: JobConfig, load: Load, plan: Plan, hosts: Sequence[RankInfo],
                  head_bytes: float = 0.0) -> None:
    """Raise PlanError where layers need more of a GPU's memory than is free there.

    hosts: from `on_their_gpus`. head_bytes: of rank 0's draft.
    """
    needs: dict[str, float] = {}
    if hosts[0].room and hosts[0].drafts_on_gpu(config):
        needs[hosts[0].room] = head_bytes
    users = ranks_by_gpu(plan, hosts)
    for one in plan.held:
        rank = hosts[one.rank]
        if not rank.room:
            continue
        # llama.cpp counts the output as a layer, and leaves the embedding to the processor
        first = max(one.start, one.stop + 1 - rank.gpu_layers(config))
        share, embedding = share_of(one), load.first_bytes * (first == 0)
        need = load.slices_bytes(first, one.stop, share, max(1, len(one.slices)))
        needs[rank.room] = needs.get(rank.room, 0.0) + need - share * embedding
    for room, ranks in users.items():
        free = min(hosts[rank].device for rank in ranks)
        if needs[room] > free * (1 + 1e-9):
            raise PlanError(
                f"{_named(ranks)} on {room}: layers there need {size_text(needs[room])} (weights, "
                f"cache, scratch), but {size_text(free)} are free: use a lower -ngl, a smaller "
                "context (-c) or quantisation, fewer ranks on it, or end what else runs there")


def ranks_by_gpu(plan: Plan, hosts: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Return the ranks with layers on each GPU, by its name."""
    found: dict[str, list[int]] = {}
    for one in plan.held:
        if room := hosts[one.rank].room:
            found.setdefault(room, []).append(one.rank)
    return found


def notes_on(plan: Plan, hosts: Sequence[RankInfo], answers: Mapping[int, Measured]) -> list[str]:
    """Return notes for the user: on ranks that were to use a GPU and have none, and on each GPU
    that several ranks use, whose speed together no rank measures."""
    held = {one.rank for one in plan.held}
    without = sorted(rank for rank, answer in answers.items()
                     if rank in held and not (hosts[rank].room or answer.error))
    found = [f"llama.cpp finds no GPU for {_named(without)}: all layers there are on the processor "
             "(pipeinfer doctor)"] if without else []
    return found + [
        f"{_named(ranks)} share the GPU of {room}: how fast they are together is unknown, each "
        "measured itself alone" for room, ranks in ranks_by_gpu(plan, hosts).items()
        if len(ranks) > 1]


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
