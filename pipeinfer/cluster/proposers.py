"""Loads the proposers that the options request, on rank 0 or on draft ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from msgspec import structs

from pipeinfer.backends.base import Backend
from pipeinfer.cluster.draft_ranks import (
    DRAFT,
    OwnProposer,
    cache_sizes,
    draft_ranks_of,
    load_draft,
    paths_of,
    setups_of,
)
from pipeinfer.cluster.heads import (
    EAGLE3,
    MTP,
    HeadKind,
    HeadPlan,
    head_paths,
    head_sizes,
    load_head,
    proposers_of,
    setup_of,
    small_of,
)
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.cluster.shard_transfer import own_model
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import UsageError
from pipeinfer.host import Place, threads_of
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_model
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import NodeSettings, RankInfo, settle
from pipeinfer.runtime.draft_team import DraftTeam
from pipeinfer.runtime.draft_worker import Drafts, DraftWorker
from pipeinfer.runtime.remote_draft import DraftPosts, RemoteDraft
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.spec import HEADS, Need, ProposerSetup
from pipeinfer.transport.base import Port


def load_proposers(
    config: JobConfig, place: Place, draft: Path | None, cells: int, n_vocab: int, port: Port,
    hosts: list[RankInfo], vocabulary: Vocabulary | None = None, head: HeadPlan | None = None,
    own: Sequence[OwnProposer] = (),
) -> Drafts | None:
    """Load the proposers that `--proposer` and the nodes file name; None if none of them needs a
    worker.

    draft: path of the draft model. If there are draft ranks, it is loaded there, or the head if
        there is none; it is not ready when this returns.
    cells: of each stage's KV cache. n_vocab: of the target. vocabulary: for grammars. head: of the
    target, if a proposer needs one. own: see `own_proposers`.
    """
    posts, shared, known = DraftPosts(port), draft_ranks_of(hosts), registry.proposers()
    away = list(own)
    if draft is not None and shared:
        asked = [one for one in registry.named(config.speculation) if Need.DRAFT in one.needs]
        if len(asked) > 1:
            raise UsageError(f"--proposer {' and '.join(one.name for one in asked)}: draft ranks "
                             "run one of them: leave one out")
        away.append(OwnProposer((*asked, known[DRAFT])[0], shared, draft))
        draft = None
    elif head is not None and shared and proposers_of(config):
        away.append(OwnProposer(known[head.kind], shared))
    remotes: list[Drafts] = []
    for one in sorted(away, key=_quality):
        if one.has_head and head is not None:
            name = head.name
            setups = [setup_of(config, head, one.ranks, hosts, cells, n_vocab, vocabulary)]
        else:
            name, setups = one.name, setups_of(config, one, hosts, cells, n_vocab, vocabulary)
        remotes.append(RemoteDraft(posts, setups, name, free=not one.spec.needs))
    if any(one.has_head for one in away):
        head = None
    local = _local(config, place, draft, cells, n_vocab, port.wake, vocabulary, head,
                   {one.spec.name for one in own if not one.spec.needs})
    free = sum(one.free for one in remotes)
    found = [*remotes[:free], *([] if local is None else [local]), *remotes[free:]]
    return DraftTeam(found) if len(found) > 1 else found[0] if found else None


def _quality(one: OwnProposer) -> tuple[bool, float]:
    """Return by what proposers are ordered, the best last: heads, then drafts by their sizes."""
    return one.has_head, sum(open_model(one.draft).layer_bytes) if one.draft else 0.0


def _local(
    config: JobConfig, place: Place, draft: Path | None, cells: int, n_vocab: int,
    notify: Callable[[], None], vocabulary: Vocabulary | None, head: HeadPlan | None,
    elsewhere: Collection[str],
) -> DraftWorker | None:
    """Return the thread of rank 0 that computes proposals, None if there is nothing for it.

    elsewhere: names of proposers that other ranks run instead.
    """
    found: list[Proposer] = []
    for spec in registry.named(config.speculation) or (registry.proposers()[DRAFT],):
        if spec.worker is not None and spec.name not in elsewhere:
            loaded: list[Backend] = []
            paths = 1
            if Need.DRAFT in spec.needs and draft is not None:
                model = open_model(draft)
                paths = paths_of(config, model)
                loaded = [load_draft(config, place, draft, (0, model.n_layers),
                                     cache_sizes(config, cells, model, spec))[0]]
            if spec.needs & HEADS and head is not None:
                paths = head_paths(config)
                loaded = [load_head(config, place, head, head_sizes(config, cells))]
            if spec.needs and not loaded:
                continue
            found += spec.worker(ProposerSetup(
                registry.values_of(spec, config.speculation), n_vocab, loaded, paths, vocabulary))
    return DraftWorker(_one(found), notify) if found else None


def _one(found: Sequence[Proposer]) -> Proposer:
    return found[0] if len(found) == 1 else Cascade(found)


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

    def layers(self, setup: DraftSetup) -> tuple[Backend, int]:
        """See `Loader.layers`. Raises ModelError, MismatchError and BackendError."""
        config = settle(self._config, self._place, NodeSettings(**setup.settings))
        sizes = {"n_ctx": setup.n_ctx, "n_seq_max": setup.n_seq_max, "n_batch": setup.n_batch}
        backend: Backend
        if setup.target:
            model = ModelFile(own_model(structs.replace(
                setup, model=setup.target, fingerprint=setup.target_fingerprint)))
            kind: HeadKind = MTP if setup.proposer == MTP else EAGLE3
            plan = HeadPlan(kind, ModelFile(own_model(setup)), model,
                            small=small_of(config, model) if kind == MTP else None)
            backend = load_head(config, self._place, plan, sizes)
            threads = threads_of(config.model.threads_draft, self._place)
        else:
            backend, threads = load_draft(config, self._place, _own_file(setup),
                                          (setup.start, setup.stop), sizes)
        return self._hooks.draft(backend), threads

    def proposer(self, setup: DraftSetup, backend: Backend | None) -> Proposer:
        """See `Loader.proposer`. Raises UsageError for a plug-in that this host lacks."""
        spec = registry.proposers().get(setup.proposer)
        if spec is None or spec.worker is None:
            raise UsageError(f"the proposer {setup.proposer} is not installed there: install its "
                             "package on that host as well")
        vocabulary = Vocabulary.from_json(setup.vocabulary) if setup.vocabulary else None
        return _one(spec.worker(ProposerSetup(
            setup.options, setup.n_vocab, () if backend is None else (backend,), setup.paths,
            vocabulary)))


def _own_file(setup: DraftSetup) -> Path:
    """Return the draft's path on this host: rank 0's path, or the same file of this
    installation.

    Raises what `own_model` does.
    """
    asked = Path(setup.model)
    bundled = EMBEDDED / asked.name
    if not asked.exists() and bundled.exists():
        setup = structs.replace(setup, model=str(bundled))
    return own_model(setup)
