"""Proposers and their places: which rank runs which one, and how rank 0 and draft ranks load them.

Uses options, strategies and models' headers. How proposals travel is in `runtime.draft_rank` and
`runtime.drafts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, structs

from pipeinfer.backends.base import Backend
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup, Ready
from pipeinfer.errors import ModelError, PipeinferError, PlanError, UsageError
from pipeinfer.host import Place
from pipeinfer.models.locate import find
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import NodeSettings, RankInfo, settle
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.replan import Holding
from pipeinfer.runtime.drafts import (
    DraftPosts,
    Drafts,
    DraftTeam,
    DraftWorker,
    RemoteDraft,
    SlicedDraft,
)
from pipeinfer.strategies import registry, resources
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.resources import Asked, CacheSizes, Resource, class_of
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec
from pipeinfer.transport.base import Port

STEP = 0.5e-3  #: seconds of a step of a head in slices besides it and sums (two busy cores)
#: least time, as a share of a run of one row, that slices save of a head's step: where rank 0 would
#: compute it during runs, and where rank 0 is a member itself (emulated: more loses nothing)
_WORTH_BESIDE, _WORTH = 1 / 20, 1 / 50
_DRAFT = "draft"  #: the proposer of a rank for which the nodes file names a draft and no proposer


def with_draft_ranks(config: JobConfig, hosts: list[RankInfo]) -> list[RankInfo]:
    """Return the ranks, with the role "draft" for those of --draft-ranks.

    A rank with a proposer or a draft of its own (nodes file) is none of them, and no spare.
    Raises UsageError if too few ranks are left for the stages.
    """
    count, spares = config.cluster.draft_ranks, config.cluster.spares
    if not count:
        return hosts
    free = [one.rank for one in hosts
            if not one.rank or not (one.settings.proposer or one.settings.draft)]
    last, least = len(free) - spares, 1 if config.cluster.head_stage else 2
    if last - count < least:
        raise UsageError(
            f"--draft-ranks {count} leaves no rank for a stage: {len(hosts)} ranks were started; "
            f"start at least {count + spares + least + len(hosts) - len(free)}")
    chosen = free[last - count : last]
    return [structs.replace(one, settings=structs.replace(one.settings, role="draft"))
            if one.rank in chosen else one for one in hosts]


def draft_ranks_used(found: Sequence[PlacedProposer], hosts: Sequence[RankInfo]) -> int:
    """Return how many ranks of --draft-ranks have a draft. hosts: before they got that role."""
    return sum(bool(one.rank) and not hosts[one.rank].settings.drafts for one in found)


def check_memory(found: Sequence[PlacedProposer], config: JobConfig, hosts: Sequence[RankInfo]
                 ) -> None:
    """Raise PlanError where a draft does not fit the memory of its rank's host."""
    for one in found:
        rank = hosts[one.rank]
        if one.rank and one.resource is not None and not rank.drafts_on_gpu(config) \
                and rank.memory < one.resource.held:
            raise PlanError(
                f"{one.name} takes {one.resource.held / 1e9:.1f} GB, and rank {one.rank} on "
                f"{rank.host} may fill {rank.memory / 1e9:.1f} GB: a draft is on one rank, so use "
                "a smaller one, or let a rank with more memory draft (role = \"draft\" in the "
                "nodes file)")


class PlacedProposer(Struct, frozen=True):
    """A proposer of a job that a thread calls, and where.

    resource: what it evaluates; None: nothing
    rank: its own, or 0
    cut: the slices of the target's layers, where the members of its only stage have it
    """

    spec: ProposerSpec
    resource: Resource | None
    rank: int = 0
    cut: tuple[str, ...] = ()

    @property
    def elsewhere(self) -> bool:
        """Whether other ranks than rank 0 load it."""
        return bool(self.rank or self.cut)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.spec.name if self.resource is None else self.resource.name

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads."""
        return () if self.resource is None else self.resource.taps

    @property
    def quality(self) -> tuple[bool, int]:
        """By what proposers are ordered, the best last: heads, then drafts by their sizes."""
        return bool(self.taps), 0 if self.resource is None else self.resource.held


def placed(asked: Asked, hosts: Sequence[RankInfo]) -> tuple[PlacedProposer, ...]:
    """Return the proposers of a job that threads call, by --proposer and the nodes file.

    Ranks that draft for the job get a draft each: draft models first, then the head. Raises
    UsageError, with the reason, for a proposer that cannot run or has no rank, ModelError for a bad
    file.
    """
    config, own = asked.config, []
    if config.speculation.speculation == "off":
        return ()
    shared: tuple[int, ...] = ()
    for (name, path), ranks in _places(hosts).items():
        if name:
            if len(ranks) > 1:
                raise UsageError(f"ranks {', '.join(map(str, ranks))} would draft alike (nodes "
                                 "file): a draft is on one rank, so let one of them draft")
            own.append(_own(asked, name, path, ranks[0]))
        else:
            shared = ranks
    elsewhere = {one.spec.name for one in own if one.resource is None or one.taps}
    found = [
        PlacedProposer(spec, _found(spec, asked, f"--proposer {spec.name}"))
        for spec in registry.named(config.speculation)
        if spec.worker is not None and spec.name not in elsewhere]
    evaluated = sorted((one for one in found if one.resource is not None),
                       key=lambda one: bool(one.taps))
    models = [one.spec.name for one in evaluated if not one.taps]
    if shared and len(shared) < len(models):
        raise UsageError(f"--proposer {' and '.join(models)}: a rank drafts for one of them: give "
                         f"--draft-ranks {len(models)}, or leave one out")
    rank_of = dict(zip((one.spec.name for one in evaluated), shared, strict=False))
    found = [structs.replace(one, rank=rank_of.get(one.spec.name, 0)) for one in found]
    if len(heads := [one for one in (*found, *own) if one.taps]) > 1:
        raise UsageError(f"rank {heads[-1].rank} (nodes file) computes {heads[-1].name}, and "
                         f"the job uses {heads[0].name}: a job uses one prediction head")
    return (*found, *own)


def sliced(found: Sequence[PlacedProposer], config: JobConfig, held: Sequence[Holding],
           ready: Mapping[int, Ready], measured: Mapping[int, tuple[Figures, float]], run: float
           ) -> tuple[PlacedProposer, ...]:
    """Return the proposers, a head that would be on rank 0 now in slices at a stage's members.

    Unless the user decides, that needs measured times by which it is faster, and memory.
    held: the members of all stages
    ready: what they reported, by rank
    measured: the figures of ranks that have some, and their free memory in bytes
    run: measured seconds of a run of one row, without sums; 0: unknown
    Raises UsageError or PlanError where the user wants it and it cannot be.
    """
    way = config.cluster.slice_head
    head = next((one for one in found if one.taps and not one.elsewhere), None)
    if way == "off" or head is None or not isinstance(head.resource, resources.PredictionHead):
        return tuple(found)
    try:
        if len({one.start for one in held}) > 1 or not held[0].cut:
            raise UsageError("--set slice_head=on needs a job of one stage with several members: "
                             "give --grid 1x2")
        head.resource.check_cut(held[0].cut)
    except PipeinferError:
        if way == "on":
            raise
        return tuple(found)
    if way == "auto" and (config.cluster.distribute
                          or not _gains(head.resource, held, ready, measured, run)):
        return tuple(found)
    return tuple(structs.replace(one, cut=held[0].cut) if one is head else one for one in found)


def _gains(head: resources.PredictionHead, held: Sequence[Holding], ready: Mapping[int, Ready],
           measured: Mapping[int, tuple[Figures, float]], run: float) -> bool:
    """Whether a step of the head gets enough faster for members that compute no run meanwhile."""
    members, slices = [ready[one.rank] for one in held], len(held[0].cut)
    if run <= 0 or any(
            one.gpu or one.rank not in measured or one.weight_bytes + one.cache_bytes + head.held
            > measured[one.rank][1] for one in members):
        return False
    per_byte = max(measured[one.rank][0].per_byte for one in members)
    exchange, (start, stop) = max(one.sum_seconds for one in members), members[0].layers
    most = max(len(one.slices) for one in held)
    saved = per_byte * (head.reads - most * head.reads_on(slices)) - 2 * exchange - STEP
    least = _WORTH_BESIDE if all(one.rank for one in held) else _WORTH
    return saved > least * (run + 2 * (stop - start) * exchange)


def _found(spec: ProposerSpec, asked: Asked, subject: str) -> Resource | None:
    """Find what a proposer evaluates. subject: of the error."""
    kind = class_of(spec)
    try:
        return None if kind is None else kind.find(spec, asked)
    except UsageError as error:
        raise UsageError(f"{subject}: {error}") from error


def _places(hosts: Sequence[RankInfo]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the ranks that draft, by proposer and draft model; empty names: the job's own."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for one in hosts:
        own = one.settings
        if one.rank and own.drafts and not one.dead:
            key = (own.proposer or (_DRAFT if own.draft else ""), own.draft)
            key = ("", "") if key == (_DRAFT, "") else key
            found[key] = (*found.get(key, ()), one.rank)
    return found


def _own(asked: Asked, name: str, path: str, rank: int) -> PlacedProposer:
    """Return the proposer that the nodes file gives to a rank of its own.

    path: its draft model; empty: the job's, if it needs one
    """
    known, config = registry.proposers(), asked.config
    which = f"the proposer {name} of rank {rank} (nodes file)"
    if (spec := known.get(name)) is None:
        raise UsageError(f"{which} does not exist: choose from {', '.join(known)}")
    if spec.worker is None:
        raise UsageError(f"{which} adds rows to the target's own runs, so the stages compute "
                         f"it: give --proposer {name} instead")
    if path and not ((kind := class_of(spec)) and kind.movable):
        raise UsageError(f"{which} evaluates no draft: remove draft = \"{path}\"")
    try:
        draft = find(path, offline=config.model.offline).path if path else asked.draft
        resource = _found(spec, structs.replace(asked, draft=draft), which)
    except ModelError as error:
        raise ModelError(f"{which}: {error}") from error
    return PlacedProposer(spec, resource, rank)


def setup_of(one: PlacedProposer, config: JobConfig, settings: NodeSettings, cells: int,
             n_vocab: int, vocabulary: Vocabulary | None) -> DraftSetup:
    """Return what a rank of a proposer loads.

    settings: of that rank. cells: of each stage's cache. n_vocab: of the target.
    vocabulary: for grammars.
    """
    resource = one.resource
    sizes = CacheSizes() if resource is None else resource.sizes(one.spec, config, cells)
    files: dict[str, Any] = {"model": "", "fingerprint": ""} if resource is None else resource.files
    return DraftSetup(
        one.spec.name, **files, **structs.asdict(sizes), n_vocab=n_vocab,
        settings=structs.asdict(settings), cut=one.cut,
        options=registry.values_of(one.spec, config.speculation),
        vocabulary=None if vocabulary is None else vocabulary.to_json())


def load_proposers(
    found: Sequence[PlacedProposer], config: JobConfig, place: Place, cells: int, n_vocab: int,
    port: Port, hosts: list[RankInfo], vocabulary: Vocabulary | None = None,
    members: Callable[[], tuple[int, ...]] = tuple,
) -> Drafts | None:
    """Load proposers; None for none. Those of draft ranks are not ready when this returns.

    cells: of each stage's KV cache. n_vocab: of the target. vocabulary: for grammars.
    members: returns the present ranks of the stage that has slices of a head.
    """
    posts = DraftPosts(port)

    def setups(one: PlacedProposer) -> dict[int, DraftSetup]:
        return {rank: setup_of(one, config, hosts[rank].settings, cells, n_vocab, vocabulary)
                for rank in (members() if one.cut else (one.rank,))}

    remotes: list[Drafts] = [
        SlicedDraft(posts, partial(setups, one), one.name) if one.cut else
        RemoteDraft(posts, setups(one), one.name, free=one.resource is None)
        for one in sorted((one for one in found if one.elsewhere), key=lambda one: one.quality)]
    local: list[Proposer] = []
    for one in found:
        if not one.elsewhere:
            sizes, backend = CacheSizes(), None
            if one.resource is not None:
                sizes = one.resource.sizes(one.spec, config, cells)
                backend, _ = one.resource.load(config, place, sizes.of_backend)
            local.append(_made(one.spec, ProposerSetup(
                registry.values_of(one.spec, config.speculation), n_vocab, backend, sizes.paths,
                vocabulary)))
    free = sum(one.free for one in remotes)
    worker = [] if not local else [DraftWorker(
        local[0] if len(local) == 1 else Cascade(local), port.wake)]
    drafts = [*remotes[:free], *worker, *remotes[free:]]
    return DraftTeam(drafts) if len(drafts) > 1 else drafts[0] if drafts else None


def _made(spec: ProposerSpec, setup: ProposerSetup) -> Proposer:
    assert spec.worker is not None
    return spec.worker(setup)


def sources_of(drafts: Drafts | None) -> tuple[Drafts, ...]:
    """Return the sources of proposals, the best one last."""
    if isinstance(drafts, DraftTeam):
        return drafts.members
    return () if drafts is None else (drafts,)


def remotes_of(drafts: Drafts | None) -> tuple[RemoteDraft, ...]:
    """Return the proposers that have ranks of their own."""
    return tuple(one for one in sources_of(drafts) if isinstance(one, RemoteDraft))


class DraftLoader:
    """Loads on a draft rank what a DraftSetup names."""

    def __init__(self, config: JobConfig, place: Place, hooks: Hooks | None = None) -> None:
        self._config, self._place, self._hooks = config, place, hooks or Hooks()

    def backend(self, setup: DraftSetup) -> tuple[Backend, int]:
        """Load the draft; return it and its number of threads. Raises ModelError, MismatchError,
        BackendError and UsageError."""
        config = settle(self._config, self._place, NodeSettings(**setup.settings))
        kind = class_of(_spec(setup))
        assert kind is not None
        backend, threads = kind.named(setup).load(
            config, self._place,
            {"n_ctx": setup.n_ctx, "n_seq_max": setup.n_seq_max, "n_batch": setup.n_batch})
        return self._hooks.draft(backend), threads

    def proposer(self, setup: DraftSetup, backend: Backend | None) -> Proposer:
        """Return the proposer. Raises UsageError for a plug-in that this host lacks."""
        vocabulary = Vocabulary.from_json(setup.vocabulary) if setup.vocabulary else None
        return _made(_spec(setup), ProposerSetup(
            setup.options, setup.n_vocab, backend, setup.paths, vocabulary))


def _spec(setup: DraftSetup) -> ProposerSpec:
    spec = registry.proposers().get(setup.proposer)
    if spec is None or spec.worker is None:
        raise UsageError(f"the proposer {setup.proposer} is not installed there: install its "
                         "package on that host as well")
    return spec
