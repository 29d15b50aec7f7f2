"""A running cluster as rank 0 uses it: ready stages, a head, and the settings of the scheduler.

    begin       load stages and draft concurrently; then make a scheduler and a head
    use         change policy, proposers and limits over the same stages
    a loss      the assembly assigns the layers to other ranks, and requests are replayed

What the stages were loaded for (`LoadedCluster`) stays as it is; the scheduler's settings
(`SchedulerSetup`) are computed again after each change. This module has no prompts and no HTTP;
how ranks find each other is in `launch`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import Struct, structs

from pipeinfer.cluster import notes, sizing
from pipeinfer.cluster.assembly import Assembly, ProgressHook, Terms
from pipeinfer.cluster.draft_ranks import load_proposers, remotes_of, sliced, sources_of
from pipeinfer.cluster.placement import Job, judge_of
from pipeinfer.cluster.resolve import Drafting, choose, for_chains
from pipeinfer.cluster.shard_transfer import source_of
from pipeinfer.cluster.shutdown import fatal, survivable
from pipeinfer.cluster.stored_prompts import no_disk, peers_of, stored_by
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftReady, PortName, Setup
from pipeinfer.core.messages import Tag
from pipeinfer.core.policy import Policy
from pipeinfer.errors import ClusterError, Loss, RankLost, StageFailed, UsageError
from pipeinfer.host import Place
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.layers import (
    has_two_rotations,
    keeps_state,
    no_embeddings,
    original_context,
)
from pipeinfer.models.local_stores import label
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.judge import Judge, expected
from pipeinfer.planning.pace import Seen, Share, StagePace
from pipeinfer.planning.planner import Plan
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import cut_layers, is_cut
from pipeinfer.runtime.drafts import Drafts, DraftTeam, SlicedDraft
from pipeinfer.runtime.head import Head
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import InlineProposer
from pipeinfer.transport.base import Port


class LoadedCluster(Struct, frozen=True):
    """The sizes and files for which the stages were loaded.

    cells: of each stage's KV cache, of which `spare` are for speculative tokens.
    chunk: rows of a prompt in one run.
    prompt_id: the first sequence id beyond those of requests.
    vocabulary: for grammars; None if requests may not have one.
    """

    job: Job
    place: Place
    port: Port
    hosts: list[RankInfo]
    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    cells: int
    spare: int
    chunk: int
    prompt_id: int

    @classmethod
    def of(
        cls, config: JobConfig, place: Place, job: Job, port: Port, hosts: list[RankInfo], *,
        grammars: bool
    ) -> LoadedCluster:
        """Compute the sizes from a config and a plan. grammars: whether requests may have one."""
        credit = config.speculation.credit or len(job.plan.ranks) + 1
        spare = sizing.spare_cells(job.width, credit)
        tokenizer = open_tokenizer(job.target)
        return cls(
            job,
            place,
            port,
            hosts,
            tokenizer,
            Vocabulary.of(tokenizer) if grammars and tokenizer.eog_ids else None,
            sizing.cells_for(config.speculation, job.n_ctx) + spare
            + sizing.hint_cells(config.speculation),
            spare,
            sizing.chunk_of(config),
            sizing.ids_for(config.speculation, credit, chains=job.chains),
        )

    def assembly(self, config: JobConfig, progress: ProgressHook | None) -> Assembly:
        """Return the assembly of this cluster; nothing has loaded yet."""
        job, model = self.job, self.job.model
        source = GapModel(model) if job.gaps else model

        learned = bool(registry.adapter(config.speculation))

        def setup_of(holding: Holding) -> Setup:
            last = holding.stop == model.n_layers
            return Setup(
                PortName(0), (), str(job.target), model.fingerprint, model.n_layers, holding.start,
                holding.stop, n_ctx=self.cells, n_seq_max=self.prompt_id + learned,
                n_batch=job.n_batch, prompt_id=self.prompt_id, gaps=job.gaps, settings={},
                exact=job.tried,
                stream=sizing.stream_cells(job.n_ctx) if job.chains else 0,
                cores=self.hosts[holding.rank].cores_host if job.time_sharing else 0,
                taps=job.taps,
                text=job.n_ctx,
                half_taps=config.cluster.hidden_type == "f16",
                vocabulary=self.vocabulary.to_json() if self.vocabulary and last else None)

        return Assembly(
            config, self.port, job.plan, job.survey.load,
            job.survey.members, self.hosts, setup_of,
            partial(source_of, source), progress, survives=survivable(self.place))

    def proposers(self, chosen: Drafting, assembly: Assembly | None = None) -> Drafts | None:
        """Load proposers. A draft on ranks of its own may not be ready yet.

        assembly: started, so that its members may get slices of a head; None: they do not
        Raises MismatchError for a draft with another vocabulary.
        """
        if chosen.policy is Policy.ITERATIVE:
            return None
        for one in chosen.proposers:
            if one.resource is not None:
                one.resource.check(self.tokenizer)
        found, job = chosen.proposers, self.job
        if assembly is not None:
            ready = {one.rank: one for one in assembly.ready.values()}
            measured = {rank: (job.survey.figures[rank], one.memory)
                        for rank, one in job.survey.members.items() if rank in job.survey.figures}
            timed = job.plan.timed and not job.time_sharing
            found = sliced(found, chosen.config, assembly.held, ready, measured,
                           job.plan.split.slowest if timed else 0.0)
        return load_proposers(found, chosen.config, self.place, self.cells, self.tokenizer.n_vocab,
                              self.port, self.hosts, self.vocabulary,
                              lambda: tuple(one.rank for one in assembly.held) if assembly else ())


_FEW = 64  #: tokens from which on the observed load counts
_POISON = 3  #: stages that fail one after the other without a token between them


class SchedulerSetup(Struct, frozen=True):
    """The scheduler's settings for one config: limits, row proposer and controller."""

    limits: Limits
    rows: InlineProposer | None
    controller: Controller | None


@dataclass(slots=True)
class Session:
    """A running cluster; see the module docstring.

    first: the terms of the stages at the start.
    fatal: why a rank's death ends the job; "" if it does not.
    reports: the stages' final reports, by node.
    on_loss: called with the loss before the others take over.
    on_change: called with what happened when other stages have taken over, or ranks were lost.
    """

    config: JobConfig
    loaded: LoadedCluster
    assembly: Assembly
    hosts: list[RankInfo]
    head: Head
    limits: Limits
    draft: Drafts | None
    draft_name: str
    notes: list[str]
    load_seconds: float
    first: Terms
    draft_share: float
    fatal: str
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    on_loss: Callable[[Loss], None] = lambda _: None
    on_change: Callable[[str], None] = lambda _: None
    _failures: list[int] = field(default_factory=list)  # tokens accepted by then, while the same

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.loaded.tokenizer

    @property
    def plan(self) -> Plan:
        """The assignment of layers at the start."""
        return self.loaded.job.plan

    @property
    def model_name(self) -> str:
        """The name of the target's file or folder."""
        path = self.loaded.job.target
        return path.resolve().name if path.is_dir() else label(path)

    @property
    def stages(self) -> dict[int, dict[str, Any]]:
        """The figures that each member of a stage reported when it was ready, by node."""
        grid = self.assembly.grid
        return {node: {"stage": grid.name(node).stage, "member": grid.name(node).member,
                       **ready.figures()} for node, ready in self.assembly.ready.items()}

    @property
    def draft_ranks(self) -> list[DraftReady]:
        """The reports of the draft ranks when they were ready; empty if rank 0 holds the draft."""
        return [ready for one in remotes_of(self.draft) for ready in one.ready.values()]

    @property
    def n_stages(self) -> int:
        """The number of stages that hold the target."""
        return self.assembly.grid.n_stages

    @property
    def looks_up(self) -> bool:
        """Whether a proposer looks tokens up in texts."""
        return any(one.free for one in sources_of(self.draft)) or (registry.free(
            self.config.speculation) and self.draft is not None)

    @property
    def no_embeddings(self) -> str:
        """Why the session computes no embeddings; "" if it does."""
        model = self.loaded.job.model
        if any(ready.backend != "llamacpp" for ready in self.assembly.ready.values()):
            return "embeddings need the llama.cpp backend"
        if is_cut(self.assembly.held):
            return ("stages of several members compute no embeddings: leave out --grid, and name "
                    "-np for `pipeinfer up`")
        if keeps_state(model):
            return "models whose layers keep a state give no embeddings here"
        return no_embeddings(model)

    @property
    def bits(self) -> str:
        """A digest of everything that tokens depend on. Jobs with equal digests return the same
        tokens."""
        model, assembly = self.config.model, self.assembly
        parts = (self.loaded.job.model.fingerprint, self.loaded.chunk, llama_identity(),
                 model.exact, model.cache_type_k, model.cache_type_v, model.flash_attn,
                 _rotates_far(self.loaded.job), cut_layers(assembly.held),
                 is_cut(assembly.held) and self.config.cluster.sum_type,
                 sorted({ready.backend for ready in assembly.ready.values()}),
                 *self._devices(),
                 *(ready.padded for _, ready in sorted(assembly.ready.items())
                   if ready.padded))
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def _devices(self) -> list[Any]:
        """Return the GPUs that compute; with the layers of each, where one kind is not for all."""
        stages = []
        for _, ready in sorted(self.assembly.ready.items()):
            every = ready.layers[1] - ready.layers[0] + 1  # llama.cpp counts the output
            own = self.hosts[ready.rank].gpu_layers(self.config) if ready.gpu else 0
            stages.append((ready.gpu, ready.layers, own if own < every else "all"))
        kinds = {(gpu, own) for gpu, _, own in stages}
        if kinds <= {("", 0)}:
            return []
        alike = len(kinds) == 1 and all(own == "all" for _, own in kinds)
        return [gpu for gpu, _ in kinds] if alike else stages

    def use(self, config: JobConfig) -> None:
        """Change policy, proposers and limits to those of another config, while nothing runs.

        Stages stay loaded as they are, so their sequence ids and cells must suffice. Draft ranks
        that are dead propose nothing. Raises UsageError.
        """
        self.head.drain(config.cluster.timeout)
        job = self.loaded.job
        chosen = choose(config, job.facts, job.backends, time_sharing=job.time_sharing,
                        heads=bool(job.taps))
        heads, before = ({one.name for one in found.proposers if one.taps}
                         for found in (chosen, job))
        if heads - before or (heads and chosen.taps != job.taps):
            raise UsageError("the stages give no rows for that head: start a job with this "
                             "--proposer")
        config, policy = chosen.config, chosen.policy
        worker = self.loaded.proposers(
            chosen, self.assembly if chosen.taps and is_cut(self.assembly.held) else None)
        try:
            for one in remotes_of(worker):
                with contextlib.suppress(RankLost):
                    one.await_ready(config.cluster.timeout)
            setup = self._settings(config, policy)
        except BaseException:
            if worker is not None:
                worker.close(timeout=5.0)
            raise
        stored = self.head.scheduler.state.stored
        self.head.replace(
            Scheduler(setup.limits, setup.rows, drafts=worker is not None), worker,
                          setup.controller)
        self.head.scheduler.state.stored = stored
        self.limits, self.config, self.draft = setup.limits, config, self.head.draft
        self.watch_draft()

    def go_on(self, loss: Loss) -> None:
        """Continue without a lost rank. Raises the error if the job cannot continue."""
        self.on_loss(loss)
        accepted = self.head.scheduler.totals.accepted
        same = [count for count in self._failures if count == accepted]
        self._failures = [*same, accepted] if isinstance(loss, StageFailed) else []
        if self.assembly.recover(loss):
            # A request that made several stages fail would make the next one fail, too.
            self.resume("poison" if len(self._failures) >= _POISON else "")
        else:
            self.on_change(str(self.assembly.changes[-1]))

    def learn_stored(self) -> None:
        """Give the scheduler the names of the pieces of prompts that all stages keep on disks."""
        config, job = self.loaded.job.config, self.loaded.job
        ready = self.assembly.ready.values()
        why = no_disk(config, gaps=job.gaps, chains=job.chains, cut=is_cut(self.assembly.held))
        kept = not why and all(one.stored is not None for one in ready)
        self.head.scheduler.state.stored = stored_by(
            config.cluster, self.bits, ready, job.model) if kept else None
        if kept and any(one.peers for one in ready):
            self.loaded.port.send(1, Tag.TRANSACTION, peers_of(
                self.assembly.grid, self.assembly.ready))
        if config.cluster.kv_disk and not kept:
            why = why or "not every stage can"
            self.notes.append(f"no prompts are kept on disks (--kv-disk): {why}")

    def resume(self, reason: str = "") -> None:
        """Replay open requests over the present stages; or, with a reason, end them with it."""
        setup = self._settings(self.config, self.limits.policy)
        self.limits = setup.limits
        for remote in remotes_of(self.draft):
            if isinstance(remote, SlicedDraft):
                remote.move()
        self.learn_stored()
        self.head.restart(self.assembly.grid, setup.limits, setup.controller, reason)
        self.watch_pace()
        self._tell(str(self.assembly.changes[-1]))

    def _tell(self, what: str) -> None:
        self.notes.append(what)
        self.on_change(what)

    def watch_draft(self) -> None:
        """Add a note when a draft rank is lost, and give a `DraftTeam` access to the stages'
        times."""
        for one in sources_of(self.draft):
            one.on_lost = lambda why: self._tell(f"{why}: decoding continues without this draft")
        if isinstance(self.draft, DraftTeam):
            self.draft.slot = self._slot

    def _slot(self) -> float:
        """The seconds of the slowest stage; 0 where a tree waits for the guesses of all drafts."""
        if self.limits.synchronous and self.limits.max_branches > 1:
            return 0.0
        return max(self.head.times.pace.seconds, default=0.0)

    def watch_pace(self) -> None:
        """Begin to compare the times of the stages with their best times."""
        assembly, times = self.assembly, self.head.times
        threads = {node: one.threads for node, one in assembly.ready.items()}
        leaders = {node: assembly.held[node - 1].rank for node in assembly.grid.leaders}
        assembly.judge = judge = self.judge()[0]
        shares = [Share(judge.seats[rank].host if rank in judge.seats else f"rank {rank}",
                        threads.get(node, 1)) for node, rank in leaders.items()]
        times.pace = StagePace(assembly.grid, self.first.curve, shares, judge.cores,
                               self.plan.seconds_of(assembly.held))
        times.load.restart(self.head.scheduler.totals.accepted)

    def judge(self) -> tuple[Judge, Seen]:
        """Return the judge that compares assignments, and the observed load.

        Before enough tokens are counted, the judge assumes the load that is expected of the
        policy.
        """
        scheduler, load, policy = self.head.scheduler, self.head.times.load, self.limits.policy
        seen, acceptance = load.lately(scheduler.totals.accepted), scheduler.calibration.acceptance
        mixes = (seen.mix(policy, acceptance),) if seen.tokens >= _FEW else expected(
            policy, self.config.speculation.parallel, acceptance)
        drafting = 0.0 if self.draft is None or not self.draft.local or not load.worked else min(
            1.0, self.draft.busy_seconds / load.worked)
        judge = judge_of(self.hosts, mixes, self.first.curve, drafting,
                         grows=self.assembly.grows, time_sharing=self.limits.same_cores)
        return structs.replace(judge, using=self.assembly.threads), seen

    def _settings(self, config: JobConfig, policy: Policy) -> SchedulerSetup:
        return scheduler_setup(self.loaded, self.assembly, self.first, config, policy,
                     self.draft_share)


def begin(place: Place, job: Job, port: Port, hosts: list[RankInfo],
          progress: ProgressHook | None, started: float, *, grammars: bool) -> Session:
    """Load stages and draft; return the session.

    started: when the job started, by `time.monotonic`. grammars: whether requests may have one.
    progress: called with the states of the stages while they load.
    Raises errors of stages that the job cannot recover from.
    """
    config = job.config
    loaded = LoadedCluster.of(config, place, job, port, hosts, grammars=grammars)
    assembly = loaded.assembly(config, progress)
    waits = job.taps and is_cut(assembly.held)  # the times of sums decide where a head is
    worker = None if waits else loaded.proposers(job)
    assembly.start()
    worker, further = settled(loaded, loaded.proposers(job, assembly) if waits else worker)
    remotes = remotes_of(worker)
    used = [] if worker is None else [one for one in job.proposers if one.resource or one.rank]
    name = min(used, key=lambda one: (bool(one.taps), bool(one.rank))).name if used else ""
    share = _draft_share(job, assembly, hosts, worker)
    first = assembly.terms
    setup = scheduler_setup(loaded, assembly, first, config, job.policy, share)
    scheduler = Scheduler(setup.limits, setup.rows, drafts=worker is not None)
    head = Head(port, assembly.grid, scheduler, worker, cancel_path=sizing.cancel_path(config),
                trace=bool(config.cluster.trace), timeout=config.cluster.timeout,
                controller=setup.controller)
    session = Session(
        config, loaded, assembly, hosts, head, setup.limits, worker,
        name, notes.at_start(job, assembly, hosts, remotes, further, bool(setup.limits.costs)),
        time.monotonic() - started, first,
        share, fatal(place))
    session.learn_stored()
    head.on_loss = session.go_on
    session.watch_pace()
    session.watch_draft()
    return session


def _rotates_far(job: Job) -> bool:
    """Whether positions are rotated as in long texts, which the context decides."""
    return has_two_rotations(job.model) and job.n_ctx > original_context(job.model)


def settled(loaded: LoadedCluster, worker: Drafts | None) -> tuple[Drafts | None, list[str]]:
    """Wait until ranks that draft have loaded; return the sources of proposals, and notes.

    A head that a member cannot load, as it lacks the file, is on rank 0 as before, unless the user
    wants slices. Raises what `RemoteDraft.await_ready` does.
    """
    config = loaded.job.config.cluster
    for one in remotes_of(worker):
        try:
            one.await_ready(config.timeout)
        except ClusterError as error:
            if worker is None or not isinstance(one, SlicedDraft) or config.slice_head == "on":
                raise
            worker.close(timeout=5.0)
            again, further = settled(loaded, loaded.proposers(loaded.job))
            return again, [f"the head is on rank 0 alone: {error}", *further]
    return worker, []


def scheduler_setup(
    loaded: LoadedCluster,
    assembly: Assembly,
    first: Terms,
    config: JobConfig,
    policy: Policy,
    draft_share: float,
) -> SchedulerSetup:
    """Compute the scheduler's settings for the present stages. first: see `Session`."""
    job = loaded.job
    config = for_chains(config) if job.chains else config
    states = keeps_state(job.model)
    off = config.model.exact == "off"
    group_max = job.tried if off else assembly.terms.exact
    exact = 0 if off else min(group_max, job.width)
    # ids were made for so many; where ranks take turns there is no pipeline to fill
    n_stages = 1 if job.time_sharing else min(assembly.grid.n_stages, len(job.plan.ranks))
    rows = None if policy is Policy.ITERATIVE else sizing.row_proposer(
        config.speculation, loaded.tokenizer.n_vocab, loaded.prompt_id, first.curve, exact)
    alone = rows is None and not config.speculation.decomposer
    draft_share = draft_share if alone else 0.0
    limits, pinned = sizing.limits_for(
        config.speculation, policy, sizing.sizes_for(first.row_cost), n_ctx=job.n_ctx,
        chunk=loaded.chunk, exact=exact or job.width,
        n_stages=n_stages, curve=first.curve, spare=loaded.spare, draft_share=draft_share)
    limits = sizing.grouped(limits, group_max, n_stages, first.curve)
    limits = structs.replace(limits, same_cores=job.time_sharing, states=states,
                             together=job.n_batch)
    if job.chains:
        limits = structs.replace(limits, chains=True, partitions=0,
                                 kept=sizing.kept_for(config.speculation, chains=True))
    controller = sizing.controller_for(
        config.speculation, limits, pinned, first.curve, loaded.spare, draft_share)
    return SchedulerSetup(limits if controller is None else controller.limits, rows, controller)


def _draft_share(job: Job, assembly: Assembly, hosts: list[RankInfo],
                 worker: Drafts | None) -> float:
    """Return the draft's bytes of weights relative to those of rank 0's only stage (or part of
    it), or of all stages where all ranks take turns: about the time of a proposal relative to a
    token. 0 where they do not compute on the same cores in turn."""
    config = job.config.model
    stages, remotes = assembly.ready.values(), remotes_of(worker)
    where = {hosts[rank].host for one in remotes if not one.free for rank in one.ranks}
    if worker is not None and worker.local:
        where.add(hosts[0].host)
    inside = [one for one in remotes if isinstance(one, SlicedDraft)]
    alone = job.time_sharing or inside or (not remotes and assembly.grid.n_stages == 1 and any(
        holding.rank == 0 for holding in assembly.held))
    if not (alone and any(one.host in where for one in stages)) or config.gpu_layers \
            or config.device not in ("", "auto", "cpu"):
        return 0.0
    weights = sum(one.weight_bytes for one in stages if job.time_sharing or inside or one.rank == 0)
    own = sum(one.reads for one in job.evaluated)  # of slices as of the whole: all have a part
    return max(own / max(weights, 1), sizing.NO_MODEL)
