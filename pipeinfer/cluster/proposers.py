"""Loads the proposers that the options request, on rank 0 or on draft ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeinfer.backends.base import Backend
from pipeinfer.cluster.draft_ranks import (
    cache_sizes,
    draft_ranks_of,
    load_draft,
    paths_of,
    setups_of,
)
from pipeinfer.cluster.heads import HeadPlan, head_paths, load_head
from pipeinfer.config import JobConfig
from pipeinfer.host import Place
from pipeinfer.models.locate import open_model
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import RankInfo
from pipeinfer.runtime.draft_team import DraftTeam
from pipeinfer.runtime.draft_worker import Drafts, DraftWorker
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.spec import Need, ProposerSetup
from pipeinfer.transport.base import Port


def load_proposers(
    config: JobConfig, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int, port: Port,
    hosts: list[RankInfo], vocabulary: Vocabulary | None = None, head: HeadPlan | None = None,
) -> Drafts | None:
    """Load the proposers that `--proposer` names; None if none of them needs a worker.

    drafts: paths of the draft models. If there are draft ranks, the last one is loaded there, and
        is not ready when this returns.
    cells: of each stage's KV cache. n_vocab: of the target. vocabulary: for grammars. head: of the
    target, if a proposer needs one.
    """
    remote = None
    if drafts and draft_ranks_of(hosts):
        remote = RemoteDraft(port, setups_of(config, drafts[-1], hosts, cells, n_vocab, vocabulary))
        drafts = drafts[:-1]
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
            if spec.needs & {Need.MTP, Need.EAGLE3} and head is not None:
                loaded, paths = [load_head(config, place, head, cells)], head_paths(config)
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
