"""Loads a job's proposers, on rank 0 or on draft ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipeinfer.backends.base import Backend
from pipeinfer.cluster.draft_ranks import PlacedProposer, setup_of
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import UsageError
from pipeinfer.host import Place
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import NodeSettings, RankInfo, settle
from pipeinfer.runtime.draft_team import DraftTeam
from pipeinfer.runtime.draft_worker import Drafts, DraftWorker
from pipeinfer.runtime.remote_draft import DraftPosts, RemoteDraft, SlicedDraft
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.resources import CacheSizes, class_of
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec
from pipeinfer.transport.base import Port


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
