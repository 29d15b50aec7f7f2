"""Chooses the ranks of each stage of a grid, and its slices: as requested, or by measurement.

It runs before any port exists; `placement` calls it. It has no runs and no requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from pipeinfer.backends.factory import check_teams
from pipeinfer.cluster.remembered_grid import GridChoice, keep_grid, recall_grid
from pipeinfer.config import JobConfig
from pipeinfer.core.control import Measured, TestLinks
from pipeinfer.core.policy import Policy
from pipeinfer.errors import PlanError, RankLost, UnsupportedArchitecture, UsageError
from pipeinfer.host import Place
from pipeinfer.nodes import RankInfo, group_of
from pipeinfer.planning.grids import GridPlan, shape
from pipeinfer.planning.judge import LoadMix
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.measured_grid import grids_of_ranks, network_of
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.planner import Plan, asked_counts, estimate, make_plan
from pipeinfer.planning.teams import SumCost
from pipeinfer.planning.wide import Teams, combined, teams_of, widths_of

Hosts = Sequence[RankInfo]
_GAIN_WORTH_SAYING = 1.1  #: times the plain pipeline's speed


def teams_asked(config: JobConfig, candidates: Sequence[int], hosts: Hosts) -> Teams | None:
    """Return the requested wide stages, None if none are requested. Raises UsageError."""
    cluster = config.cluster
    if not (cluster.grid or cluster.slices):
        return None
    usable = usable_ranks(config, candidates, hosts)
    return teams_of(cluster.grid, cluster.slices, usable,
                    {rank: group_of(hosts[rank]) for rank in usable})


def usable_ranks(config: JobConfig, candidates: Sequence[int], hosts: Hosts) -> list[int]:
    """Return the ranks that may be members; spares may not. Raises UsageError if none is left."""
    spares = config.cluster.spares
    usable = [rank for rank in candidates if not hosts[rank].dead
              and hosts[rank].settings.role not in ("spare", "draft")]
    if spares >= len(usable):
        raise UsageError(f"--spares {spares} leaves no rank for a stage: only {len(usable)} ranks "
                         "can hold layers; start more, or lower --spares")
    return usable[:len(usable) - spares]


def auto_plan(
    config: JobConfig, place: Place, model: Any, load: Load, members: Mapping[int, Member],
    figures: Mapping[int, Figures], hosts: Hosts, policy: Policy, mix: LoadMix, notes: list[str],
) -> Plan | None:
    """Return the plan for --grid auto, None for one rank per stage.

    It is the remembered choice as long as that fits, else the fastest grid by measurement. Appends
    the choice and its reason to `notes`.
    figures: measurements by rank. mix: the load to plan for.
    """
    ranks = [rank for rank, member in members.items() if member.layers is None]
    if place.comm is None or len(ranks) < 2:
        return None

    def planned(choice: GridChoice) -> Plan:
        return wide_plan(config, model, load, members, hosts, choice.teams, policy,
                         timed=bool(figures), layers=choice.layers, cuts=choice.cuts)

    if not config.cluster.remeasure:
        try:
            known = recall_grid(model, hosts, ranks)
            if known is not None:
                plan = None if known.choice is None else planned(known.choice)
                what = "one rank to a stage" if plan is None else \
                    f"grid {shape(widths_of(plan.held))} and its slices"
                notes.append(f"{what}, as chosen on {known.day} for this model and these hosts, so "
                             "that answers stay the same; --remeasure chooses again")
                return plan
        except (PlanError, UsageError) as error:
            notes.append(f"the grid that was chosen before does not fit any more ({error}), so one "
                         "is chosen anew: answers may differ in near-ties")
    try:
        best, plain = _compared(config, place, model, load, members, figures, hosts, mix, ranks)
    except (PlanError, UnsupportedArchitecture, UsageError, RankLost) as error:
        notes.append(f"no grid is chosen: {error}")
        return None
    if max(best.widths) == 1:
        notes.append("no grid of wide stages would be faster than one rank to a stage; remembered "
                     "for the next start")
        keep_grid(model, hosts, ranks, None)
        return None
    shares = tuple(tuple(1 / members[ranks[i]].per_cost for i in stage.hosts) if stage.width > 1
                   else () for stage in best.stages)
    plan = planned(GridChoice(Teams(
        tuple(tuple(ranks[i] for i in stage.hosts) for stage in best.stages), shares), best.layers))
    notes.append(f"{best.why()} ({best.tokens / plain.tokens:.2f} times one rank to a stage); "
                 "remembered for the next start")
    keep_grid(model, hosts, ranks, plan)
    return plan


def _compared(
    config: JobConfig, place: Place, model: Any, load: Load, members: Mapping[int, Member],
    figures: Mapping[int, Figures], hosts: Hosts, mix: LoadMix, ranks: Sequence[int],
) -> tuple[GridPlan, GridPlan]:
    """Return the best grid of these ranks, and one rank per stage.

    Raises PlanError, UnsupportedArchitecture, UsageError, RankLost.
    """
    check_teams(model.path, [ranks], hosts)
    return grids_of_ranks(
        model, load, [members[rank] for rank in ranks], [figures.get(rank) for rank in ranks],
        network_of(ranks, _links(config, place)), mix,
        SumCost(4 if config.cluster.sum_type == "f32" else 2),
        [group_of(hosts[rank]) for rank in ranks])


def would_gain(
    config: JobConfig, place: Place, model: Any, load: Load, members: Mapping[int, Member],
    figures: Mapping[int, Figures], hosts: Hosts, mix: LoadMix,
) -> list[str]:
    """Return a note on the speed that a grid would have, if none was requested and it pays."""
    ranks = [rank for rank, member in members.items() if member.layers is None]
    crowd = Counter(hosts[rank].host for rank in ranks)
    if place.comm is None or len(ranks) < 2 or any(  # ranks that share a core were never measured
            crowd[hosts[rank].host] > hosts[rank].cores_host for rank in ranks):
        return []
    try:
        best, plain = _compared(config, place, model, load, members, figures, hosts, mix, ranks)
    except (PlanError, UnsupportedArchitecture, UsageError, RankLost):
        return []  # the plain pipeline does without
    gain = best.tokens / plain.tokens
    if max(best.widths) == 1 or gain < _GAIN_WORTH_SAYING:
        return []
    name = ",".join(map(str, best.widths))
    return [f"--grid {name} would be about {gain:.1f} times as fast, by what these ranks measured "
            "(docs/wide.md)"]


def _links(config: JobConfig, place: Place) -> list[dict[str, float]]:
    """Measure the links between neighbours, in which all ranks take part. Raises RankLost."""
    from pipeinfer.transport import mpi_startup

    for rank in range(1, place.size):
        mpi_startup.say(place.comm, rank, TestLinks())
    found = [structs.asdict(link) for link in mpi_startup.measure_links(place.comm)]
    for rank in range(1, place.size):
        heard = mpi_startup.hear(place.comm, rank, config.cluster.timeout)
        if isinstance(heard, Measured) and heard.figures:
            found += heard.figures["links"]
    return found


def wide_plan(
    config: JobConfig, model: Any, load: Load, members: Mapping[int, Member], hosts: Hosts,
    teams: Teams, policy: Policy, *, timed: bool, layers: Sequence[int] = (),
    cuts: Sequence[tuple[str, ...]] | None = None,
) -> Plan:
    """Return the plan that assigns the layers to teams and cuts them into slices.

    layers: of each stage, if already decided.
    cuts: names of the slices of each stage, if already decided.
    Raises PlanError, UsageError, UnsupportedArchitecture.
    """
    from pipeinfer.models.slices import cut_of

    check_teams(model.path, teams.ranks, hosts)
    counts: Sequence[int | None] = layers or asked_counts(
        config.cluster, model, teams.leaders, hosts, None)
    leaders = [structs.replace(one, layers=count)
               for one, count in zip(combined(members, teams), counts, strict=True)]
    plan = make_plan(config.cluster, load, leaders, teams.leaders, hosts,
                     lambda split: estimate(split, policy), timed=timed)
    if plan.left_out:
        raise UsageError("every stage of a grid needs layers: give --layers a count above 0 for "
                         "each")
    if cuts is None:
        cuts = [tuple(one.name for one in cut_of(model, shares)) if shares else ()
                for shares in teams.shares]
    return structs.replace(plan, teams=teams, cuts=tuple(cuts))
