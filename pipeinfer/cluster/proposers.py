"""Loads the proposers that the options request, on rank 0 or on draft ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from msgspec import structs

from pipeinfer.backends.base import Backend
from pipeinfer.cluster.draft_ranks import (
    cache_sizes,
    draft_ranks_of,
    load_draft,
    paths_of,
    setups_of,
)
from pipeinfer.cluster.heads import (
    MTP,
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
from pipeinfer.host import Place, threads_of
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_model
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import NodeSettings, RankInfo, settle
from pipeinfer.runtime.draft_team import DraftTeam
from pipeinfer.runtime.draft_worker import Drafts, DraftWorker
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.strategies.proposers.target_head import Head, TargetHead
from pipeinfer.strategies.spec import HEADS, Need, ProposerSetup
from pipeinfer.transport.base import Port


def load_proposers(
    config: JobConfig, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int, port: Port,
    hosts: list[RankInfo], vocabulary: Vocabulary | None = None, head: HeadPlan | None = None,
) -> Drafts | None:
    """Load the proposers that `--proposer` names; None if none of them needs a worker.

    drafts: paths of the draft models. If there are draft ranks, the last one is loaded there, or
        the head if there are none; it is not ready when this returns.
    cells: of each stage's KV cache. n_vocab: of the target. vocabulary: for grammars. head: of the
    target, if a proposer needs one.
    """
    remote = None
    if drafts and draft_ranks_of(hosts):
        remote = RemoteDraft(port, setups_of(config, drafts[-1], hosts, cells, n_vocab, vocabulary))
        drafts = drafts[:-1]
    elif head is not None and draft_ranks_of(hosts) and proposers_of(config):
        remote = RemoteDraft(port, [setup_of(config, head, hosts, cells, n_vocab, vocabulary)])
        head = None
    local = _local(config, place, drafts, cells, n_vocab, port.wake, vocabulary, head)
    if remote is None or local is None:
        return remote or local
    return DraftTeam(local, remote)


def _local(
    config: JobConfig, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int,
    notify: Callable[[], None], vocabulary: Vocabulary | None, head: HeadPlan | None,
) -> DraftWorker | None:
    """Return the thread of rank 0 that computes proposals, None if there is nothing for it."""
    found: list[Proposer] = []
    for spec in registry.named(config.speculation) or (registry.proposers()["draft"],):
        if spec.worker is not None:
            models = [open_model(path) for path in drafts if Need.DRAFT in spec.needs]
            loaded: list[Backend] = [
                load_draft(config, place, model.path, (0, model.n_layers),
                           cache_sizes(config, cells, model))[0] for model in models]
            paths = paths_of(config, models)
            if spec.needs & HEADS and head is not None:
                paths = head_paths(config)
                loaded = [load_head(config, place, head, head_sizes(config, cells))]
            if spec.needs and not loaded:
                continue
            found += spec.worker(ProposerSetup(
                registry.values_of(spec, config.speculation), n_vocab, loaded, paths, vocabulary))
    if not found:
        return None
    return DraftWorker(found[0] if len(found) == 1 else Cascade(found), notify)


def remote_of(drafts: Drafts | None) -> RemoteDraft | None:
    """Return the draft that has ranks of its own, or None."""
    found = drafts.better if isinstance(drafts, DraftTeam) else drafts
    return found if isinstance(found, RemoteDraft) else None


class DraftLoader:
    """Loads on a draft rank what a DraftSetup names."""

    def __init__(self, config: JobConfig, place: Place, hooks: Hooks | None = None) -> None:
        self._config, self._place, self._hooks = config, place, hooks or Hooks()

    def layers(self, setup: DraftSetup) -> tuple[Backend, int]:
        """See `Loader.layers`. Raises ModelError, MismatchError and BackendError."""
        config = settle(self._config, self._place, NodeSettings(**setup.settings))
        sizes = {"n_ctx": setup.n_ctx, "n_seq_max": setup.n_seq_max, "n_batch": setup.n_batch}
        backend: Backend
        if setup.head:
            model = ModelFile(own_model(structs.replace(
                setup, model=setup.target, fingerprint=setup.target_fingerprint)))
            plan = HeadPlan(setup.head, ModelFile(own_model(setup)), model,
                            small=small_of(config, model) if setup.head == MTP else None)
            backend = load_head(config, self._place, plan, sizes)
            threads = threads_of(config.model.threads_draft, self._place)
        else:
            backend, threads = load_draft(config, self._place, _own_file(setup),
                                          (setup.start, setup.stop), sizes)
        return self._hooks.draft(backend), threads

    def proposer(self, setup: DraftSetup, backend: Backend) -> Proposer:
        """See `Loader.proposer`."""
        vocabulary = Vocabulary.from_json(setup.vocabulary) if setup.vocabulary else None
        if setup.head:
            return TargetHead(cast("Head", backend), setup.n_vocab, paths=setup.paths,
                              vocabulary=vocabulary)
        return DraftModel(backend, setup.n_vocab, paths=setup.paths, vocabulary=vocabulary)


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
