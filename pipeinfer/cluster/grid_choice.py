"""Chooses the ranks of each stage of a grid, and its slices: as requested, or by measurement.

Slices follow measured speeds, which differ a little between starts, and other slices round
differently. So the choice of --grid auto (also that of one rank per stage) is stored next to the
ranks' measurements, on rank 0's host, and is valid as long as it fits. This module runs before any
port exists; `placement` calls it. It has no runs and no requests.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from pipeinfer.backends.factory import check_teams
from pipeinfer.config import JobConfig
from pipeinfer.core.control import Measured, TestLinks
from pipeinfer.core.policy import Policy
from pipeinfer.errors import (
    PlanError,
    RankLost,
    UnsupportedArchitecture,
    UsageError,
)
from pipeinfer.host import Place
from pipeinfer.models.shard_cache import cache_directory, recall, remember
from pipeinfer.nodes import RankInfo, group_of
from pipeinfer.planning.grids import GridPlan, shape
from pipeinfer.planning.judge import LoadMix
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.measured_grid import grids_of_ranks, network_of
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.planner import Plan, asked_counts, make_plan
from pipeinfer.planning.teams import SumCost
from pipeinfer.planning.wide import Teams, combined, stages_of, teams_of, widths_of

Hosts = Sequence[RankInfo]
_FORMAT = 2  #: raise it when layers are cut otherwise
_GAIN_WORTH_SAYING = 1.1  #: times the plain pipeline's speed


class GridChoice(Struct, frozen=True):
    """The stages, with the number of layers and the names of the slices of each if decided.

    teams: None for one rank per stage. day: of a stored choice, such as 2026-11-23.
    """

    teams: Teams | None
    layers: tuple[int, ...] = ()
    cuts: tuple[tuple[str, ...], ...] | None = None
    day: str = ""


def teams_asked(config: JobConfig, candidates: Sequence[int], hosts: Hosts) -> Teams | None:
    """Return the requested wide stages, None if none are requested. Raises UsageError."""
    cluster = config.cluster
    if not (cluster.grid or cluster.slices):
        return None
    usable = usable_ranks(config, candidates, hosts)
    try:
        return teams_of(cluster.grid, cluster.slices, usable,
                        {rank: group_of(hosts[rank]) for rank in usable})
    except UsageError as error:
        if not (dead := [str(one.rank) for one in hosts if one.dead]):
            raise
        raise UsageError(f"{error}; rank {', '.join(dead)} died while the job started") from None


def usable_ranks(config: JobConfig, candidates: Sequence[int], hosts: Hosts) -> list[int]:
    """Return the ranks that may be members; spares may not. Raises UsageError if none is left."""
    spares = config.cluster.spares
    usable = [rank for rank in candidates if not hosts[rank].dead
              and not hosts[rank].settings.waits]
    if spares >= len(usable):
        raise UsageError(f"--spares {spares} leaves no rank for a stage: only {len(usable)} ranks "
                         "can hold layers; start more, or lower --spares")
    return usable[:len(usable) - spares]


def users_of(config: JobConfig) -> int:
    """Return for how many users at a time a grid is chosen: one, unless --parallel is given."""
    return config.speculation.parallel if "parallel" in config.given else 1


class GridPlanner(Struct, frozen=True):
    """Plans grids over the ranks of a job.

    members, figures: what each rank may hold and has measured, by rank.
    mixes: the loads to plan for; those of several requests at a time want narrower stages.
    """

    config: JobConfig
    model: Any
    load: Load
    members: Mapping[int, Member]
    figures: Mapping[int, Figures]
    hosts: Hosts
    policy: Policy
    mixes: tuple[LoadMix, ...] = (LoadMix(),)

    def auto(self, place: Place, notes: list[str]) -> Plan | None:
        """Return the plan for --grid auto, None for one rank per stage.

        It is the remembered choice as long as that fits, else the fastest grid by measurement.
        Appends the choice and its reason to `notes`.
        """
        ranks, model, hosts = self._free, self.model, self.hosts
        users = users_of(self.config)
        if place.comm is None or len(ranks) < 2:
            return None
        if not self.config.cluster.remeasure:
            try:
                known = recall_grid(model, hosts, ranks, users)
                if known is not None:
                    plan = None if known.teams is None else self.plan(known)
                    what = "one rank to a stage" if plan is None else \
                        f"grid {shape(widths_of(plan.held))} and its slices"
                    notes.append(f"{what}, as chosen on {known.day} for this model and these "
                                 "hosts, so that answers stay the same; --set remeasure=true "
                                 "chooses again")
                    return plan
            except (PlanError, UsageError) as error:
                notes.append(f"the grid that was chosen before does not fit any more ({error}), "
                             "so one is chosen anew: answers may differ in near-ties")
        try:
            best, gain = self._best(ranks, place)
        except (PlanError, UnsupportedArchitecture, UsageError, RankLost) as error:
            notes.append(f"no grid is chosen: {error}")
            return None
        if max(best.widths) == 1:
            notes.append("no grid of wide stages would be faster than one rank to a stage; "
                         "remembered for the next start")
            keep_grid(model, hosts, ranks, None, users)
            return None
        teams = tuple(tuple(ranks[i] for i in stage.hosts) for stage in best.stages)
        plan = self.plan(GridChoice(Teams(teams, tuple(
            tuple(1 / self.members[rank].per_cost for rank in team) if len(team) > 1 else ()
            for team in teams)), best.layers))
        notes.append(f"{best.why()} ({gain:.2f} times one rank to a stage); remembered for the "
                     "next start")
        keep_grid(model, hosts, ranks, plan, users)
        return plan

    def would_gain(self, place: Place) -> list[str]:
        """Return a note on the speed that a grid would have, if none was requested and it
        pays."""
        ranks, hosts = self._free, self.hosts
        crowd = Counter(hosts[rank].host for rank in ranks)
        if self.config.model.gpu_layers or any(hosts[rank].settings.on_gpu for rank in ranks):
            return []  # slices need the processor
        if place.comm is None or len(ranks) < 2 or any(  # ranks that share a core are not measured
                crowd[hosts[rank].host] > hosts[rank].cores_host for rank in ranks):
            return []
        try:
            best, gain = self._best(ranks, place)
        except (PlanError, UnsupportedArchitecture, UsageError, RankLost):
            return []  # the plain pipeline does without
        if max(best.widths) == 1 or gain < _GAIN_WORTH_SAYING:
            return []
        return [f"--grid {best.name} would be about {gain:.1f} times as fast, by what these ranks "
                "measured (docs/wide.md)"]

    def plan(self, choice: GridChoice) -> Plan:
        """Return the plan that assigns the layers to teams and cuts them into slices.

        choice: with teams. Raises PlanError, UsageError, UnsupportedArchitecture.
        """
        from pipeinfer.models.slices import slices_of

        teams, model, cluster = choice.teams, self.model, self.config.cluster
        assert teams is not None
        check_teams(model, teams.ranks, self.hosts, [*self.members])
        counts: Sequence[int | None] = choice.layers or asked_counts(
            cluster, model, teams.leaders, self.hosts, None)
        leaders = [structs.replace(one, layers=count)
                   for one, count in zip(combined(self.members, teams), counts, strict=True)]
        load = self.load.cut_in(max(len(own) for own in (*teams.shares, (1.0,))))
        plan = make_plan(cluster, load, leaders, teams.leaders, self.hosts,
                         lambda _: 0.0, timed=bool(self.figures))  # no stage is left out for speed
        if plan.left_out:
            raise UsageError("every stage of a grid needs layers: give --layers a count above 0 "
                             "for each")
        cuts = choice.cuts
        if cuts is None:
            cuts = tuple(tuple(one.name for one in slices_of(model, shares)) if shares else ()
                         for shares in teams.shares)
        return structs.replace(plan, teams=teams, cuts=cuts)

    @property
    def _free(self) -> list[int]:
        """Ranks without a fixed number of layers."""
        return [rank for rank, member in self.members.items() if member.layers is None]

    def _best(self, ranks: Sequence[int], place: Place) -> tuple[GridPlan, float]:
        """Return the best grid of these ranks, and its speed relative to one rank per stage.

        Raises PlanError, UnsupportedArchitecture, UsageError, RankLost.
        """
        check_teams(self.model, [ranks], self.hosts, [*self.members])
        best, plain = grids_of_ranks(
            self.model, self.load, [self.members[rank] for rank in ranks],
            [self.figures.get(rank) for rank in ranks],
            network_of(ranks, _links(self.config, place)), self.mixes,
            SumCost(4 if self.config.cluster.sum_type == "f32" else 2),
            [group_of(self.hosts[rank]) for rank in ranks])
        return best, best.tokens / plain.tokens


def _links(config: JobConfig, place: Place) -> list[dict[str, float]]:
    """Measure the links between neighbours, in which all ranks take part. Raises RankLost."""
    from pipeinfer.transport import mpi_job

    for rank in range(1, place.size):
        mpi_job.say(place.comm, rank, TestLinks())
    found = [structs.asdict(link) for link in mpi_job.measure_links(place.comm)]
    for rank in range(1, place.size):
        heard = mpi_job.hear(place.comm, rank, config.cluster.start_timeout)
        if isinstance(heard, Measured) and heard.figures:
            found += heard.figures["links"]
    return found


# --- the choice for the next start ------------------------------------------------------------


class _Stage(Struct, frozen=True):
    """One stage of the choice.

    places: of its members, as indices into the candidate ranks. layers: how many.
    """

    places: tuple[int, ...]
    layers: int
    cut: tuple[str, ...]


class _Note(Struct, frozen=True):
    """The stored choice. when: seconds since the epoch; stages: none for one rank per stage."""

    when: float
    stages: tuple[_Stage, ...]


def recall_grid(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int], users: int = 1
                ) -> GridChoice | None:
    """Return the stored choice for this model and this number of users on the hosts of these ranks,
    None if there is none."""
    value = recall(_path(model, hosts, ranks, users))
    try:
        note = msgspec.convert(value, _Note)
    except msgspec.ValidationError:
        return None
    day = time.strftime("%Y-%m-%d", time.localtime(note.when))
    if not note.stages:
        return GridChoice(None, day=day)
    teams = Teams(tuple(tuple(ranks[place] for place in one.places) for one in note.stages),
                  tuple((1.0,) * len(one.cut) for one in note.stages))
    return GridChoice(teams, tuple(one.layers for one in note.stages),
                      tuple(one.cut for one in note.stages), day)


def keep_grid(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int], plan: Plan | None,
              users: int = 1) -> None:
    """Store a choice. plan: None for one rank per stage."""
    places = {rank: place for place, rank in enumerate(ranks)}
    stages = () if plan is None else tuple(
        _Stage(tuple(places[one.rank] for one in team), team[0].stop - team[0].start, team[0].cut)
        for team in stages_of(plan.held))
    remember(_path(model, hosts, ranks, users), msgspec.to_builtins(_Note(time.time(), stages)))


def _path(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int], users: int = 1
          ) -> Path:
    """Return the file for this model, the hosts of these ranks and the number of users."""
    identity = (_FORMAT, model.fingerprint, users,
                [(hosts[rank].host, group_of(hosts[rank])) for rank in ranks])
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    return cache_directory() / f"grid-{digest}.json"
