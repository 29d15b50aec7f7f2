"""Draft ranks: which ranks they are, which proposer each of them runs, and which layers of a draft
model it loads.

Uses options, strategies and models' headers. How proposals travel is in `runtime.draft_rank` and
`runtime.remote_draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import find
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, BlockHead, CacheSizes, Draft, Resource, class_of
from pipeinfer.strategies.spec import ProposerSpec

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


class PlacedProposer(Struct, frozen=True):
    """A proposer of a job that a thread calls, and where.

    resource: what it evaluates; None: nothing
    ranks: its own, in the order of the resource's layers; none: rank 0
    """

    spec: ProposerSpec
    resource: Resource | None
    ranks: tuple[int, ...] = ()

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

    Where ranks draft for the job, the draft model is theirs, else the head. Raises UsageError, with
    the reason, for a proposer that cannot run, ModelError for a bad file.
    """
    config, own = asked.config, []
    if config.speculation.speculation == "off":
        return ()
    shared: tuple[int, ...] = ()
    for (name, path), ranks in _places(hosts).items():
        if name:
            own.append(_own(asked, name, path, ranks))
        else:
            shared = ranks
    elsewhere = {one.spec.name for one in own if one.resource is None or one.taps}
    found = [
        PlacedProposer(spec, _found(spec, asked, f"--proposer {spec.name}"))
        for spec in registry.named(config.speculation)
        if spec.worker is not None and spec.name not in elsewhere]
    evaluated = [one for one in found if one.resource is not None]
    if shared and evaluated:
        few = [one for one in evaluated if not one.taps] or evaluated
        if len(few) > 1:
            names = " and ".join(one.spec.name for one in few)
            raise UsageError(f"--proposer {names}: draft ranks run one of them: leave one out")
        found = [structs.replace(one, ranks=shared) if one is few[0] else one for one in found]
    if len(heads := [one for one in (*found, *own) if one.taps]) > 1:
        raise UsageError(f"rank {heads[-1].ranks[0]} (nodes file) computes {heads[-1].name}, and "
                         f"the job uses {heads[0].name}: a job uses one prediction head")
    return (*found, *own)


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


def _own(asked: Asked, name: str, path: str, ranks: tuple[int, ...]) -> PlacedProposer:
    """Return the proposer that the nodes file gives to ranks of their own.

    path: its draft model; empty: the job's, if it needs one
    """
    known, config = registry.proposers(), asked.config
    which = f"the proposer {name} of rank {', '.join(map(str, ranks))} (nodes file)"
    if (spec := known.get(name)) is None:
        raise UsageError(f"{which} does not exist: choose from {', '.join(known)}")
    if spec.worker is None:
        raise UsageError(f"{which} adds rows to the target's own runs, so the stages compute "
                         f"it: give --proposer {name} instead")
    if path and class_of(spec) not in (Draft, BlockHead):
        raise UsageError(f"{which} evaluates no draft: remove draft = \"{path}\"")
    try:
        draft = find(path, offline=config.model.offline).path if path else asked.draft
        resource = _found(spec, structs.replace(asked, draft=draft), which)
    except ModelError as error:
        raise ModelError(f"{which}: {error}") from error
    if not isinstance(resource, Draft) and len(ranks) > 1:
        raise UsageError(f"{which} takes one rank: give that setting to one of them")
    return PlacedProposer(spec, resource, ranks)


def setups_of(one: PlacedProposer, config: JobConfig, hosts: Sequence[RankInfo], cells: int,
              n_vocab: int, vocabulary: Vocabulary | None) -> list[DraftSetup]:
    """Return what each rank of a proposer loads, in the order of the layers.

    cells: of each stage's cache. n_vocab: of the target.
    vocabulary: for grammars; only the last draft rank gets it.
    Raises UsageError for more ranks than may hold it.
    """
    resource, ranks = one.resource, one.ranks
    ends = [0, 0] if resource is None else resource.ends(len(ranks))
    sizes = CacheSizes() if resource is None else resource.sizes(one.spec, config, cells)
    files: dict[str, Any] = {"model": "", "fingerprint": "", "n_layers": 0}
    files |= {} if resource is None else resource.files
    words = None if vocabulary is None else vocabulary.to_json()
    return [DraftSetup(
        ranks, one.spec.name, start=start, stop=stop, **files, n_ctx=sizes.n_ctx,
        n_seq_max=sizes.n_seq_max, n_batch=sizes.n_batch, paths=sizes.paths, n_vocab=n_vocab,
        settings=structs.asdict(hosts[rank].settings),
        vocabulary=words if stop == ends[-1] else None,
        options=registry.values_of(one.spec, config.speculation))
        for rank, start, stop in zip(ranks, ends[:-1], ends[1:], strict=True)]
