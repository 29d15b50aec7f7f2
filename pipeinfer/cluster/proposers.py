"""Loading what makes guesses, on rank 0 or on ranks of the draft's own, by what the options say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeinfer.cluster.draft_ranks import (
    cache_sizes,
    draft_ranks_of,
    load_draft,
    paths_of,
    setups_of,
)
from pipeinfer.config import JobConfig
from pipeinfer.host import Place
from pipeinfer.models.locate import open_model
from pipeinfer.models.text.grammar import Vocabulary
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
    hosts: list[RankInfo], vocabulary: Vocabulary | None = None,
) -> Drafts | None:
    """What names guesses, by what `--proposer` says; None without work for any. The last draft is
    loaded by ranks of its own where there are some, and is not ready yet."""
    remote = None
    if drafts and draft_ranks_of(hosts):
        remote = RemoteDraft(port, setups_of(config, drafts[-1], hosts, cells, n_vocab, vocabulary))
        drafts = drafts[:-1]
    local = _local(config, place, drafts, cells, n_vocab, port.wake, vocabulary)
    if remote is None or local is None:
        return remote or local
    return DraftTeam(local, remote)


def _local(
    config: JobConfig, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int,
    notify: Callable[[], None], vocabulary: Vocabulary | None,
) -> DraftWorker | None:
    """The thread of rank 0 that names guesses."""
    found: list[Proposer] = []
    for spec in registry.named(config.speculation) or (registry.proposers()["draft"],):
        if spec.worker is not None:
            loaded = [load_draft(config, place, path, (0, open_model(path).n_layers),
                                 cache_sizes(config, cells))[0]
                      for path in drafts if Need.DRAFT in spec.needs]
            if Need.DRAFT in spec.needs and not loaded:
                continue
            found += spec.worker(ProposerSetup(
                registry.values_of(spec, config.speculation), n_vocab, loaded, paths_of(config),
                vocabulary))
    if not found:
        return None
    return DraftWorker(found[0] if len(found) == 1 else Cascade(found), notify)


def remote_of(drafts: Drafts | None) -> RemoteDraft | None:
    """The draft on ranks of its own, if there is one."""
    found = drafts.better if isinstance(drafts, DraftTeam) else drafts
    return found if isinstance(found, RemoteDraft) else None
