"""What a cluster would do: layers, memory and speed by profiles, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeinfer import nodes
from pipeinfer.config import ClusterConfig, JobConfig, ModelConfig
from pipeinfer.core.policy import PRACTICAL, Policy
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.emulation.profiles import (
    ClusterProfile,
    ModelProfile,
    NodeProfile,
    Profiles,
)
from pipeinfer.emulation.synthetic import SyntheticPair
from pipeinfer.emulation.virtual import Scenario, VirtualStage, Wire, simulate
from pipeinfer.emulation.wide import part_of
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.models import local_stores, locate
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import HEADS
from pipeinfer.models.layers import row_width
from pipeinfer.models.shard import check_splittable
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning import planner
from pipeinfer.planning.judge import Judge, LoadMix
from pipeinfer.planning.partition import Load, Member, Split, size_text
from pipeinfer.planning.planner import Plan
from pipeinfer.scheduler.controller import Controller, cutoff
from pipeinfer.scheduler.settings import Limits

_SYSTEM = 1 << 30  #: memory that a machine of a profile keeps for itself, at least
_SYSTEM_SHARE = 0.05
_SCRATCH = 64 << 20
_MOST_NODES = 64
PROMPT, TOKENS = 128, 256
_HEADS = 4  #: kinds of machines that are tried as rank 0
_BETTER = 1.02  #: what another rank 0 must bring to be named
_FURTHER = 16  #: machines that a plan looks for where a model does not fit
_TREES = (2, 4, 7)  #: drafted tokens of a synchronous tree that are tried
#: llama.cpp's numbers of file types
_FILE_TYPES = {1: "F16", 7: "Q8_0", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 14: "Q4_K_M",
               15: "Q4_K_M", 16: "Q5_K_M", 17: "Q5_K_M", 18: "Q6_K"}


@dataclass(frozen=True, slots=True)
class View:
    """A target or draft, from a file or a profile. cells: tokens of context that `load` holds.

    row_width: floats that cross a link for each row.
    moved: for a number of rows, bytes that a run reads over those that one row uses. path: of the
    file, None for a profile. alone: whether it computes one sequence at a time.
    """

    title: str
    quantisation: str
    row_width: int
    load: Load
    weight_bytes: float
    cells: int
    profile: str = ""
    moved: Callable[[int], float] = field(default=lambda rows: 1.0 + 0 * rows)
    path: Path | None = None
    alone: bool = False

    @property
    def n_layers(self) -> int:
        """How many layers the model has."""
        return len(self.load.costs)

    @property
    def cost(self) -> float:
        """Weights that one row uses on its way through all layers."""
        return self.load.stage_cost(0, self.n_layers)


@dataclass(frozen=True, slots=True)
class Machine:
    """A rank. seconds: time of (model, weights that a row uses, rows).

    memory: bytes that it may fill. room: their name, if they are a GPU's and not its host's.
    beside: bytes of its host that it does not fill then; 0: unknown
    """

    rank: int
    host: str
    kind: str
    memory: float
    seconds: Callable[[View, float, int], float]
    settings: NodeSettings = field(default_factory=NodeSettings)
    room: str = ""
    beside: float = 0.0

    @property
    def for_draft(self) -> float:
        """Bytes that a draft on this rank may fill: of the GPU if it computes there."""
        return self.memory if self.shares_memory else self.beside or math.inf

    @property
    def shares_memory(self) -> bool:
        """Whether a draft on this rank and layers of stages fill the same memory."""
        return not self.room or bool(self.settings.gpu_layers_draft)


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds one way, bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that is printed. speeds: policy -> tokens/s; drafts: one dict per draft considered.

    drafter: the rank that computes the draft
    """

    target: View
    draft: View | None
    acceptance: float
    machines: list[Machine]
    plan: Plan
    link: str
    speeds: dict[str, float]
    drafts: list[dict[str, Any]]
    notes: list[str]
    drafter: int


def dry(model: str, profiles: Profiles, **given: Any) -> Report:
    """A report from profiles alone. Raises UsageError and PlanError."""
    target = view(model, profiles, given["ctx"], given["length"])
    machines, link_name, whole = _machines(profiles, given)
    if target.path is not None and len(machines) > 1 and not target.path.is_dir():
        check_splittable(ModelFile(target.path))
    notes = []
    if target.path is not None and (shown := locate.projector(
            JobConfig.of(model=str(target.path)), target.path)):
        machines[0] = dataclasses.replace(machines[0], memory=machines[0].memory - shown.memory)
        notes.append(f"{shown.note}; `pipeinfer doctor -m {target.path} --mmproj auto` measures "
                     "how long a picture takes")
    if not link_name:
        link_name = "gigabit"
        notes.append("no link was given (--link, or link in the nodes file): gigabit is assumed")
    link = profiles.link(link_name)
    return report_of(target, machines, [Link(link.latency, link.bandwidth)], link.title, profiles,
                   given, notes, whole=whole)


def _machines(profiles: Profiles, given: Mapping[str, Any]
              ) -> tuple[list[Machine], str, tuple[int, ...] | None]:
    """Machines, the link's name, and the nodes file's list of layers."""
    if bool(given["cluster"]) == bool(given["hostfile"]):
        raise UsageError("--dry-run needs either --hostfile FILE or --cluster NAME (known "
                         f"clusters: {', '.join(profiles.clusters)})")
    if given["cluster"]:
        launch = profiles.cluster(given["cluster"])
        ranks = [(f"{name}-{i}", profiles.node(name), turn) for i, name in enumerate(launch.nodes)
                 for turn in range(_numa_nodes(profiles.node(name)))]
        found = [_machine(rank, name, profile, NodeSettings(), profile.numa_nodes, turn)
                 for rank, (name, profile, turn) in enumerate(ranks)]
        return found, given["link"] or launch.link, None
    settings, hosts = _read(profiles, given)
    machines = [_machine(rank, name, profiles.node(settings.of(name, rank).profile),
                         settings.of(name, rank), hosts.count(name), hosts[:rank].count(name))
                for rank, name in enumerate(hosts)]
    return machines, given["link"] or settings.link, settings.layers


def _numa_nodes(profile: NodeProfile) -> int:
    if not 1 <= profile.numa_nodes <= _MOST_NODES:
        raise UsageError(f"[nodes.{profile.name}] numa_nodes is {profile.numa_nodes}: give 1 to "
                         f"{_MOST_NODES}")
    return profile.numa_nodes


def cluster_of_file(profiles: Profiles, given: Mapping[str, Any]
                    ) -> tuple[Profiles, tuple[str, ...]]:
    """Profiles with the cluster of a hostfile, by the file's name; and the groups of its ranks, see
    `NodeSettings`, none where the nodes file names none. Raises UsageError."""
    settings, hosts = _read(profiles, given)
    path = str(given["hostfile"])
    parts: dict[str, NodeProfile] = {}
    names = []
    for rank, name in enumerate(hosts):
        own, count = profiles.node(settings.of(name, rank).profile), hosts.count(name)
        names.append(own.name if count == 1 else f"{own.name}/{count}")
        parts[names[-1]] = own if count == 1 else dataclasses.replace(
            part_of(own, 1 / count), name=names[-1], memory=own.memory // count)
    cluster = ClusterProfile(path, path, tuple(names), settings.link or "gigabit")
    groups = tuple(nodes.group_of(RankInfo(rank, name, settings=settings.of(name, rank)))
                   for rank, name in enumerate(hosts))
    return dataclasses.replace(
        profiles, nodes={**profiles.nodes, **parts},
        clusters={**profiles.clusters, path: cluster}), groups if any(groups) else ()


def _read(profiles: Profiles, given: Mapping[str, Any]) -> tuple[nodes.Nodes, tuple[str, ...]]:
    """The nodes file, with a profile for each host, and the host of each rank."""
    path = given["hostfile"]
    entries = nodes.read_hostfile(path)
    beside = given["nodes_file"] or nodes.nodes_file_beside(path)
    if not beside:
        raise UsageError(f"{path} has no nodes file: write {path}.toml with a profile "
                         "for each host, or give --nodes (known profiles: "
                         f"{', '.join(profiles.nodes)})")
    settings = nodes.read_nodes(beside)
    hosts = nodes.ranks_of(entries, sum(entry.slots for entry in entries), path)
    nodes.check_head(settings, hosts)
    for rank, name in enumerate(hosts):
        if not settings.of(name, rank).profile:
            raise UsageError(f"{beside} names no profile for {name}: add profile = \"...\" to its "
                             f"table (known profiles: {', '.join(profiles.nodes)})")
    return settings, hosts


def _machine(rank: int, name: str, profile: NodeProfile, settings: NodeSettings, sharers: int,
             turn: int) -> Machine:
    """A rank, the `turn`-th of the `sharers` of a machine, with the nodes file's limits. One that
    stays on a NUMA node has that node's name and memory."""
    apart = settings.numa == "per-rank" or (not settings.numa and _numa_nodes(profile) > 1)
    nodes = profile.numa_nodes if profile.numa_nodes > 1 else sharers
    own_gpu = settings.on_gpu and not settings.device.startswith("gpu")  # a turn of the host's
    sharers = 1 if own_gpu else sharers
    part = 1 / sharers
    if settings.threads and not settings.device.startswith("gpu"):
        part = min(part, settings.threads / profile.cores)
    node = dataclasses.replace(
        profile, bandwidth=profile.bandwidth / sharers,
        rates={k: v * part for k, v in profile.rates.items()},
        first={k: v * part for k, v in profile.first.items()})
    memory = profile.memory - max(_SYSTEM, _SYSTEM_SHARE * profile.memory)
    if settings.memory is not None:
        memory = float(min(settings.memory, profile.memory))
    if apart and 1 < nodes <= sharers and not settings.on_gpu:
        name, memory = f"{name}, NUMA node {turn % nodes}", memory / nodes

    def seconds(model: View, cost: float, rows: int) -> float:
        return node.seconds(cost, model.quantisation, rows, cost * model.moved(rows))

    machine = Machine(rank, name, profile.name, memory, seconds, settings)
    if settings.gpu_memory is None or not settings.on_gpu:
        return machine
    gpu = f"{name}, GPU of rank {rank}" if own_gpu else f"{name}, its GPU"
    return dataclasses.replace(machine, memory=float(settings.gpu_memory), room=gpu,
                               beside=float(settings.memory or 0))


def view(model: str, profiles: Profiles, ctx: int, length: int = 0) -> View:
    """A profile by name, or a GGUF file. length: tokens of the text behind which a row is computed.
    Raises UsageError and ModelError."""
    if model in profiles.models:
        return _profile_view(profiles.models[model], ctx or 4096, length)
    if not model:
        return file_view(locate.model_paths(JobConfig())[0], ctx, length)
    if model in locate.names() or "/" in model or Path(model).exists() or (
            model.endswith(".gguf") or local_stores.find(model) is not None):
        return file_view(locate.find(model).path, ctx, length)
    profiles.model(model)
    raise AssertionError(model)


def _profile_view(profile: ModelProfile, cells: int, length: int) -> View:
    n = profile.n_layers
    cache = profile.kv_bytes_per_token / n * cells
    text = profile.kv_bytes_per_token / n * length
    load = Load(
        (profile.active_layer_bytes + text,) * n, (profile.layer_bytes + cache,) * n,
        first_bytes=profile.embedding_bytes, last_cost=profile.output_bytes,
        last_bytes=profile.output_bytes, scratch=_SCRATCH)
    return View(f"{profile.title} {profile.quantisation}", profile.quantisation, profile.n_embd,
                load, profile.total_bytes, cells, profile.name,
                lambda rows: profile.moved_layer_bytes(rows) / profile.active_layer_bytes)


def file_view(path: Path, ctx: int, length: int = 0) -> View:
    """Return the view of a GGUF file. length: tokens of the text behind which a row is computed.
    Raises UsageError for a prediction head."""
    model = locate.open_model(path)
    if model.architecture in HEADS:
        raise UsageError(f"{path} is a prediction head, whose gain is not predicted: leave it out")
    cells = locate.context_size(ModelConfig(ctx=ctx), model)
    load = planner.load_of(model, cells, 64)
    kind = _FILE_TYPES.get(int(model.get("general.file_type", -1) or -1), "Q8_0")
    whole, drawn = float(sum(model.layer_bytes)), sum(load.costs)
    experts, used = (int(model.arch_get(f"expert_{name}count", 0) or 0) for name in ("", "used_"))

    def moved(rows: int) -> float:
        """Each row draws its experts as if at random."""
        if not 0 < used < experts or drawn >= whole:
            return 1.0
        share = used / experts
        bank = (whole - drawn) / (1 - share)  # bytes of all experts
        return (whole - bank + bank * (1 - (1 - share) ** rows)) / drawn

    load = planner.with_text(load, model, length)
    return View(path.name, kind, row_width(model), load,
                whole + load.first_bytes + load.last_bytes, cells, moved=moved, path=path,
                alone=declared(model.architecture).one_sequence)


def report_of(
    target: View, machines: list[Machine], links: Sequence[Link], link: str, profiles: Profiles,
    given: Mapping[str, Any], notes: list[str], plan: Plan | None = None, draft_path: str = "",
    whole: Sequence[int] | None = None,
) -> Report:
    """Choose a draft, plan unless `plan` is given, predict."""
    asked = draft_path or given["draft"]
    asked = [asked] if asked else sorted({one.settings.draft for one in machines} - {""})
    options = _drafts(target, profiles, asked, given, notes)
    mean = Link(statistics.fmean(one.latency for one in links),
                statistics.fmean(one.bandwidth for one in links))
    ranked: list[tuple[float, Plan, _Scene, dict[str, Any]]] = []
    for draft, acceptance in options:
        scene = _Scene(target, draft, acceptance, machines, mean)
        found = plan or _plan_or_lack(scene, given, whole)
        speed = scene.predict(found.split, found.candidates)
        ranked.append((speed, found, scene, scene.draft_facts(found, speed)))
    speed, best, scene, _ = max(ranked, key=lambda entry: entry[0])
    speeds = {policy.value: scene.speed(best.split, best.candidates, policy)
              for policy in PRACTICAL if policy is Policy.ITERATIVE or scene.draft is not None}
    drafts = [facts for *_, facts in ranked if facts]
    if not (given["layers"] or whole):
        notes += _other_heads(scene, given, speed) if plan is None and scene.draft else []
        if mean.latency:  # else no link is known
            _note_further(scene, given, notes)
    return Report(target, scene.draft, scene.acceptance, machines, best, link, speeds, drafts,
                  notes, scene.drafter.rank)


def _other_heads(scene: _Scene, given: Mapping[str, Any], speed: float) -> list[str]:
    """Which other machine would better be rank 0: a draft may be slow, a stage may not."""
    machines, kinds, found = scene.machines, {scene.machines[0].kind}, []
    for index, machine in enumerate(machines):
        if machine.kind in kinds or given["head_stage"] or len(kinds) > _HEADS:
            continue
        kinds.add(machine.kind)
        order = [machine, *machines[:index], *machines[index + 1 :]]
        other = dataclasses.replace(scene, machines=order)
        try:
            plan = _make_plan(other, given, None)
            found.append((other.predict(plan.split, plan.candidates), machine,
                          other.draft_seconds(1)))
        except PlanError:
            continue
    best = max(found, key=lambda entry: entry[0], default=None)
    if best is None or best[0] < _BETTER * speed:
        return []
    return [f"{best[0]:.2f} tokens/s with {best[1].host} as rank 0 (list it first): a draft token "
            f"takes {1e3 * best[2]:.0f} ms there, and {machines[0].host} would hold layers"]


def _note_further(scene: _Scene, given: Mapping[str, Any], notes: list[str]) -> None:
    """Say what a further machine like the last one would bring."""
    last, both = scene.machines[-1], (scene, scene.with_further(1))
    with contextlib.suppress(PlanError):
        now, then = (one.predict(plan.split, plan.candidates)
                     for one in both for plan in [_make_plan(one, given, None)])
        notes.append(f"a further machine like {last.host} would bring {then / now:.2f} times the "
                     f"speed and {size_text(last.memory)} for layers")


def _plan_or_lack(scene: _Scene, given: Mapping[str, Any], whole: Sequence[int] | None) -> Plan:
    """Plan. Raises PlanError with how many further machines would do, if they are missing."""
    try:
        return _make_plan(scene, given, whole)
    except PlanError as error:
        for count in range(1, (0 if whole or given["layers"] else _FURTHER) + 1):
            with contextlib.suppress(PlanError):
                _make_plan(scene.with_further(count), given, None)
                break
        else:
            raise
        raise PlanError(f"{error}; {count} further machine{'s' * (count > 1)} like "
                        f"{scene.machines[-1].host} would do") from None


def _drafts(target: View, profiles: Profiles, asked: Sequence[str], given: Mapping[str, Any],
            notes: list[str]) -> list[tuple[View | None, float]]:
    """Drafts to weigh, each with its acceptance. asked: by options or the nodes file."""
    pairs = {pair.draft: pair for pair in sorted(
        profiles.pairs.values(), key=lambda pair: not pair.assumed)
        if pair.target == target.profile}
    names = [] if target.alone else asked or list(pairs)
    if not names:
        notes.append(("one sequence is computed at a time" if target.alone else "no draft was "
                      "given (-md) and no pair is known") + ": only iterative is predicted")
        return [(None, 0.0)]
    found: list[tuple[View | None, float]] = []
    for name in names:
        share = given["acceptance"]
        if share is None and name in pairs:
            share = pairs[name].acceptance
            if pairs[name].assumed:
                notes.append(f"acceptance of {name}: {share:.0%} is assumed")
        if share is None:
            share = planner.ACCEPTANCE
            notes.append(f"acceptance of {Path(name).name}: {share:.0%} is assumed (--acceptance)")
        found.append((view(name, profiles, target.cells, given["length"]), share))
    return found


@dataclass(frozen=True, slots=True)
class _Scene:
    """A target and a draft on machines: predictions in virtual time."""

    target: View
    draft: View | None
    acceptance: float
    machines: list[Machine]
    link: Link

    @property
    def drafter(self) -> Machine:
        """The machine that computes the draft: the first that the nodes file lets evaluate one."""
        return next((one for one in self.machines[1:] if one.settings.draft or (
            one.settings.drafts and one.settings.proposer in ("", "draft"))), self.machines[0])

    def with_further(self, count: int) -> _Scene:
        """This with further machines like the last one."""
        last, n = self.machines[-1], len(self.machines)
        more = [dataclasses.replace(last, rank=n + i, host=f"{last.host} ({i + 2})")
                for i in range(count)]
        return dataclasses.replace(self, machines=self.machines + more)

    def member(self, machine: Machine, count: int | None) -> Member:
        """What the planner sees of a machine."""
        fixed = machine.seconds(self.target, 0.0, 1)
        size = self.target.cost
        per_cost = (machine.seconds(self.target, size, 1) - fixed) / size
        memory = machine.memory
        if machine.host == self.drafter.host and self.draft is not None \
                and (not machine.room or self.drafter.shares_memory):
            memory -= self.draft.load.stage_bytes(0, self.draft.n_layers)
        return Member(f"rank {machine.rank} on {machine.room or machine.host}", per_cost, fixed,
                      max(0.0, memory), count, room=machine.room)

    @property
    def draft_seconds(self) -> Callable[[int], float]:
        """Return the time of a draft's decode, in seconds, by its rows."""
        if self.draft is None:
            return lambda _: 1.0
        return partial(self.drafter.seconds, self.draft, self.draft.cost)

    def predict(self, split: Split, candidates: Sequence[int]) -> float:
        """Tokens per second of the best policy that there is a draft for."""
        policy = Policy.ITERATIVE if self.draft is None else Policy.PIPEINFER
        return self.speed(split, candidates, policy)

    def speed(self, split: Split, candidates: Sequence[int], policy: Policy) -> float:
        """Tokens per second: pipeinfer tunes itself, speculative takes the best of a few trees."""
        trees = _TREES if policy is Policy.SPECULATIVE else (1,)
        return max(self._simulate(split, candidates, policy, tree) for tree in trees)

    def _simulate(self, split: Split, candidates: Sequence[int], policy: Policy, tree: int
                  ) -> float:
        stages, row_cost = [], 0.0
        for index, start, stop in split.ranges():
            machine = self.machines[candidates[index]]
            cost = self.target.load.stage_cost(start, stop)
            seconds = partial(machine.seconds, self.target, cost)
            row_cost = max(row_cost, (seconds(4) / seconds(1) - 1) / 3)
            stages.append(VirtualStage(seconds, layers=stop - start))
        wire = Wire(self.link.latency, self.link.bandwidth)
        slowest = {rows: max(stage.seconds(rows) for stage in stages) for rows in (1, *CURVE_ROWS)}
        curve = tuple((rows, slowest[rows] / slowest[1]) for rows in CURVE_ROWS)
        credit = len(stages) + 1
        limits = Limits(
            n_ctx=PROMPT + TOKENS + 64, policy=policy, exact_width=16, credit=credit,
            partitions=max(16, 2 * credit), tree_max=tree, draft_max=1 if row_cost > 0.3 else 3,
            path_min=cutoff(credit), p_min=0.4 if policy is Policy.SPECULATIVE else 0.0)
        controller = Controller(limits, (), curve) if policy is Policy.PIPEINFER else None
        return simulate(Scenario(
            tuple(stages), (wire,) * (len(stages) + 1), self.draft_seconds, limits,
            SyntheticPair(self.acceptance), 4 * self.target.row_width, PROMPT, TOKENS,
            direct_cancel=True,
        ), controller).tokens_per_second

    def draft_facts(self, plan: Plan, speed: float) -> dict[str, Any]:
        """How this draft suits the cluster; empty without one."""
        if self.draft is None:
            return {}
        return {"draft": self.draft.profile or self.draft.title, "title": self.draft.title,
                "acceptance": self.acceptance, "seconds": self.draft_seconds(1),
                "slowest_stage": plan.split.slowest, "tokens_per_second": speed,
                "fits": self.draft.weight_bytes <= self.drafter.for_draft}


def _make_plan(scene: _Scene, given: Mapping[str, Any], whole: Sequence[int] | None) -> Plan:
    machines = scene.machines
    config = ClusterConfig(
        split=given["split"], layers=given["layers"], head_stage=given["head_stage"]
    )
    candidates = list(range(0 if config.head_stage or len(machines) == 1 else 1, len(machines)))
    facts = [RankInfo(machine.rank, machine.host, settings=machine.settings)
             for machine in machines]
    counts = planner.asked_counts(config, scene.target, candidates, facts, whole)
    members = [scene.member(machines[rank], count)
               for rank, count in zip(candidates, counts, strict=True)]
    policy = Policy.ITERATIVE if scene.draft is None else Policy.PIPEINFER
    judge = Judge({}, {}, (LoadMix(policy, acceptance=scene.acceptance),), link=scene.link.latency)
    return planner.make_plan(
        config, scene.target.load, members, candidates, facts,
        lambda split: judge(split, candidates), timed=True)
