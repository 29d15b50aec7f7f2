"""`pipeinfer plan`: who would hold which layers, and how fast that would be, before weights move.

    pipeinfer plan dolphin-70b --dry-run --hostfile hostfiles/beowulf-hetero
    mpirun -np 5 --hostfile H pipeinfer plan model.gguf -md draft.gguf
    pipeinfer plan --grids --cluster c --hosts 8

A dry run takes machines from profiles and asks no host; under mpirun every rank measures itself
and its link; --grids compares wide stages on a cluster profile (`forecast.grids`). Layers come
from `planner`, speeds from the real scheduler in virtual time. Loads no model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from pipeinfer import host
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import Profiles, load_profiles
from pipeinfer.emulation.wide import ITEM_BYTES, WideExperiment
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.forecast import for_clients, grids
from pipeinfer.forecast.report import (
    Link,
    Machine,
    Report,
    View,
    cluster_of_file,
    dry,
    file_view,
    report_of,
)
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.partition import Member, size_text
from pipeinfer.planning.planner import with_text
from pipeinfer.text_table import aligned

if TYPE_CHECKING:
    from pipeinfer.host import Place


@click.command()
@click.argument("model", default="")
@click.option("--dry-run", is_flag=True, help="Use machine profiles and contact no host.")
@click.option("--hostfile", default="",
              help="File with the hosts, one rank per slot (with --dry-run or --grids).")
@click.option("--nodes", "nodes_file", default="",
              help="Settings per host [default: HOSTFILE.toml].")
@click.option("--cluster", default="", help="Use this cluster profile instead of a hostfile.")
@click.option("--link", default="", help="Link profile between neighbours.")
@click.option("-md", "--draft", default="", help="Draft model: a GGUF file or a model profile.")
@click.option("--acceptance", type=click.FloatRange(0, 1), default=None,
              help="Share of positions at which the first draft token is the target's "
                   "[default: as in the pair's profile].")
@click.option("--layers", default="", help="Number of layers of each stage, such as 10,12,12,6.")
@click.option("--split", type=click.Choice(["planned", "equal"]), default="planned")
@click.option("-c", "--ctx-size", "ctx", type=click.IntRange(0, 2**24), default=0,
              help="Context in tokens [default: 4096; for a file, the model's own up to 8192].")
@click.option("--length", type=click.IntRange(0, 2**24), default=0,
              help="Predict speeds behind a text of so many tokens [default: 0].")
@click.option("--head-stage", is_flag=True, help="Give rank 0 the first layers, too.")
@click.option("--profiles", "profiles_file", default="", help="TOML file with further profiles.")
@click.option("--remeasure", is_flag=True, help="Measure the ranks again (under mpirun).")
@click.option("--grids", "compared", is_flag=True,
              help="Compare grids of wide stages on a cluster profile.")
@click.option("--clients", type=click.IntRange(0, 1024), default=0,
              help="Compare arrangements for so many users at a time, on a cluster profile.")
@click.option("--pair", default="", help="With --grids: profile of a target and its draft.")
@click.option("--hosts", type=click.IntRange(0, 256), default=0,
              help="With --grids: number of the cluster's nodes [default: all].")
@click.option("--sum-type", type=click.Choice(list(ITEM_BYTES)), default="f32",
              help="With --grids: type of sums between the members of a stage [default: f32].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(model: str, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Show which layers go where, and the speed to expect. MODEL: a GGUF file or a profile's name.

    \b
    pipeinfer plan dolphin-70b --dry-run --hostfile hostfiles/beowulf-hetero
    mpirun -np 5 --hostfile H pipeinfer plan model.gguf
    """
    if given["acceptance"] is not None and math.isnan(given["acceptance"]):
        raise UsageError("--acceptance is not a number")
    profiles = load_profiles(Path(given["profiles_file"]) if given["profiles_file"] else None)
    if given["compared"] or given["clients"]:
        profiles, experiment = _grid_experiment(model, profiles, given)
        if said := wide.warning(profiles, experiment):
            click.echo(f"note: {said}", err=True)
        if given["clients"]:
            found = for_clients.compare(profiles, experiment, given["clients"])
            click.echo(json.dumps(for_clients.as_data(found)) if as_json
                       else for_clients.as_text(found))
            return
        table = grids.compare(profiles, experiment)
        click.echo(json.dumps(grids.as_data(table)) if as_json else grids.as_text(table))
        return
    make = dry if dry_run or (given["cluster"] and host.launched_size() == 1) else measured
    if (report := make(model, profiles, **given)) is not None:
        click.echo(json.dumps(as_data(report)) if as_json else as_text(report))


def _grid_experiment(model: str, profiles: Profiles, given: Mapping[str, Any]
                     ) -> tuple[Profiles, WideExperiment]:
    """What --grids compares, and profiles with its cluster. model: the target's profile. Raises
    UsageError."""
    cluster, groups = given["cluster"], tuple[str, ...]()
    if bool(cluster) == bool(given["hostfile"]):
        raise UsageError("--grids needs either --cluster NAME (known clusters: "
                         f"{', '.join(profiles.clusters)}) or --hostfile FILE")
    if not cluster:
        profiles, groups = cluster_of_file(profiles, given)
        cluster = given["hostfile"]
    pairs = [name for name, pair in profiles.pairs.items()
             if pair.target == model and given["draft"] in ("", pair.draft)]
    if model and not given["pair"] and not pairs:
        raise UsageError(f"no pair of {model} is known: give --pair NAME (known pairs: "
                         f"{', '.join(profiles.pairs)})")
    pair = given["pair"] or (pairs[0] if pairs else "dolphin-tinyllama")
    return profiles, WideExperiment(
        cluster, pair, nodes=given["hosts"], acceptance=given["acceptance"],
        link=given["link"], tokens=256, sum_type=given["sum_type"], groups=groups)


# --- where machines come from -----------------------------------------------------------------


def measured(model: str, profiles: Profiles, **given: Any) -> Report | None:
    """A report from what the ranks of this job measure; None on ranks but 0."""
    from pipeinfer.cluster import handshake, launch, placement
    from pipeinfer.nodes import settle

    if model in profiles.models:
        raise UsageError(f"{model} is a profile, but ranks can only be measured with a model file: "
                         "give a GGUF file, or use --dry-run with --hostfile or --cluster")
    config = JobConfig.of(
        model=model, draft_model=given["draft"], nodes=given["nodes_file"], ctx=given["ctx"],
        layers=given["layers"], split=given["split"], head_stage=given["head_stage"],
        remeasure=given["remeasure"])
    place = launch.find_place(config.cluster)
    if place.rank > 0:
        handshake.tell(config, place)
        placement.await_place(config, place)
        _measured_links(place)
        return None
    hosts = handshake.compare(config, place)
    job = launch.prepare(settle(config, place, hosts[0].settings), place, hosts, foresee=True)
    measured_links = _measured_links(place)
    links = [Link(one["latency"], one["bandwidth"]) for one in measured_links] or [
        Link(0.0, math.inf)]
    found, measures = job.survey, job.survey.figures
    target = dataclasses.replace(
        file_view(job.target, given["ctx"]),
        load=with_text(found.load, job.model, given["length"]))
    if not measures:
        raise PlanError("; ".join(found.notes) or "nothing was measured, so nothing can be "
                        "predicted: leave out --layers and --split equal")
    notes = list(found.notes)
    if not measured_links:
        notes.append("this is one process: mpirun -np N, or launch/run N, plans a pipeline of N "
                     "ranks")
    return report_of(target, _machines(hosts, measures, found.members), links,
                     "links as measured" if measured_links else "no links", profiles, given, notes,
                     job.plan if measured_links else None, str(job.facts.draft or ""))


def _machines(hosts: Sequence[RankInfo], measures: Mapping[int, Figures],
              members: Mapping[int, Member]) -> list[Machine]:
    """The ranks, those without figures as fast as the middle one of the others."""
    middling, machines = statistics.median(f.per_byte for f in measures.values()), []
    for rank, facts in enumerate(hosts):
        figures = measures.get(rank)
        per_byte = figures.per_byte if figures is not None else middling
        row_cost = figures.row_cost if figures is not None else 0.5

        def seconds(view: View, cost: float, rows: int, per_byte: float = per_byte,
                    row_cost: float = row_cost) -> float:
            del view
            return per_byte * cost * (1 + row_cost * (rows - 1))

        kind = "measured" if figures is not None else "not measured"
        machine = Machine(rank, facts.host, kind, facts.memory, seconds, facts.settings)
        if (member := members.get(rank)) is not None and member.room:
            machine = dataclasses.replace(machine, memory=member.memory, room=member.room,
                                          beside=facts.memory)
        machines.append(machine)
    return machines


def _measured_links(place: Place) -> list[dict[str, float]]:
    """Measure the links between neighbours with all other ranks, which part then; return them on
    rank 0. A single process has none."""
    if place.comm is None:
        return []
    from pipeinfer.cluster.shutdown import part
    from pipeinfer.transport import mpi_job

    own = [structs.asdict(link) for link in mpi_job.measure_links(place.comm)]
    texts = mpi_job.gather_json(place.comm, json.dumps(own)) or []
    part(place)
    return [one for text in texts for one in json.loads(text)]


# --- print ------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The report as lines of text, without a final newline."""
    target, plan = report.target, report.plan
    lines = [
        f"{target.title}: {target.n_layers} layers, {size_text(target.weight_bytes)} of weights, "
        f"context {target.cells}; {report.link}",
        "",
        *aligned([["rank", "host", "profile", "memory needed / there", "layers", "stage"],
                  *_rows(report)]),
        "",
    ]
    base = report.speeds[Policy.ITERATIVE.value]
    for name, speed in report.speeds.items():
        against = f"  x{speed / base:.2f}" if name != Policy.ITERATIVE.value else ""
        lines.append(f"{name:12}{speed:8.2f} tokens/s{against}")
    if report.drafts:
        lines += ["", *_draft_lines(report)]
    for rank, why in plan.left_out.items():
        if rank == report.drafter and report.draft is not None:
            continue
        lines.append(f"left out: rank {rank} on {report.machines[rank].host}, {why}")
    if plan.equal.slowest > plan.split.slowest:  # else equal shares do not fit
        lines.append("with equal shares the slowest stage would take "
                     f"{1e3 * plan.equal.slowest:.1f} ms instead of {1e3 * plan.split.slowest:.1f} "
                     "ms")
    return "\n".join(lines + [f"note: {note}" for note in report.notes])


def _rows(report: Report) -> list[list[str]]:
    """The table's rows."""
    split, rows = report.plan.split, []
    ranges = {report.plan.candidates[i]: (start, stop) for i, start, stop in split.ranges()}
    for machine in report.machines:
        need, layers, stage = 0.0, "", ""
        if machine.rank == 0:
            layers = "head"
        if machine.rank == report.drafter and report.draft is not None:
            layers = f"{layers} and draft" if layers else "draft"
            if machine.shares_memory:
                need = report.draft.load.stage_bytes(0, report.draft.n_layers)
        if machine.rank in ranges:
            start, stop = ranges[machine.rank]
            index = report.plan.candidates.index(machine.rank)
            need += split.sizes[index]
            share = f"{stop - start} ({start}-{stop - 1})"
            layers = f"{layers}, {share}" if layers else share
            stage = f"{1e3 * split.seconds[index]:.1f} ms"
        elif machine.rank in report.plan.left_out and not layers:
            layers = "left out"
        memory = f"{size_text(need)} / {size_text(machine.memory)}"
        if machine.room:
            memory += " of GPU" + bool(machine.beside) * f", {size_text(machine.beside)} of host"
        rows.append([str(machine.rank), machine.host, machine.kind, memory, layers, stage])
    return rows


def _draft_lines(report: Report) -> list[str]:
    lines = []
    for facts in sorted(report.drafts, key=lambda f: -f["tokens_per_second"]):
        share = facts["seconds"] / facts["slowest_stage"]
        verdict = ("free: hidden behind the slowest stage" if share <= 1 else
                   f"takes {share:.1f} times the slowest stage, so stages wait for it")
        where = "at the head" if report.drafter == 0 else f"on rank {report.drafter}"
        room = "" if facts["fits"] else "; does not fit the memory there"
        lines.append(
            f"draft {facts['title']}: {1e3 * facts['seconds']:.1f} ms per token {where}, "
            f"right at {facts['acceptance']:.0%} of positions, "
            f"{facts['tokens_per_second']:.2f} tokens/s; {verdict}{room}")
    if report.draft is not None:
        free = report.draft.cost * report.plan.split.slowest / min(
            facts["seconds"] for facts in report.drafts
            if facts["title"] == report.draft.title)
        first = "the first is the fastest; " if len(lines) > 1 else ""
        lines.append(f"{first}up to about {size_text(free)} of weights a draft costs nothing")
    return lines


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data for --json; sizes in bytes, times in seconds."""
    plan, split = report.plan, report.plan.split
    return {
        "model": report.target.title, "n_layers": report.target.n_layers,
        "weight_bytes": report.target.weight_bytes, "context": report.target.cells,
        "link": report.link, "acceptance": report.acceptance,
        "ranks": [{"rank": m.rank, "host": m.host, "profile": m.kind, "memory": m.memory,
                   **({"gpu": m.room, "host_memory": m.beside} if m.room else {})}
                  for m in report.machines],
        "stages": [{"rank": plan.candidates[i], "layers": [start, stop],
                    "seconds": split.seconds[i], "bytes": split.sizes[i]}
                   for i, start, stop in split.ranges()],
        "left_out": {str(rank): why for rank, why in plan.left_out.items()},
        "tokens_per_second": report.speeds, "drafts": report.drafts, "notes": report.notes,
    }
