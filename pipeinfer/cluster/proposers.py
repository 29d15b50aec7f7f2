"""Loading what makes guesses on rank 0, by what the options say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeinfer.backends.base import Backend
from pipeinfer.backends.factory import llama_options, load_torch
from pipeinfer.backends.thread_count import settle_threads
from pipeinfer.config import JobConfig
from pipeinfer.host import Place, threads_of
from pipeinfer.models.locate import open_model
from pipeinfer.models.text.grammar import Vocabulary
from pipeinfer.runtime.draft_worker import DraftWorker
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.spec import Need, ProposerSetup

DRAFT_PATHS = 8  #: paths that a draft keeps in its cache


def load_proposers(
    config: JobConfig, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int,
    notify: Callable[[], None], vocabulary: Vocabulary | None = None,
) -> DraftWorker | None:
    """The thread that names guesses, by what `--proposer` says; None without work for one."""
    paths = DRAFT_PATHS + config.speculation.parallel - 1
    found: list[Proposer] = []
    for spec in registry.named(config.speculation) or (registry.proposers()["draft"],):
        if spec.worker is not None:
            loaded = [_load(config, place, path, cells, paths) for path in drafts
                      if Need.DRAFT in spec.needs]
            found += spec.worker(ProposerSetup(
                registry.values_of(spec, config.speculation), n_vocab, loaded, paths, vocabulary))
    if not found:
        return None
    return DraftWorker(found[0] if len(found) == 1 else Cascade(found), notify)


def _load(config: JobConfig, place: Place, path: Path, cells: int, paths: int) -> Backend:
    threads = threads_of(config.model.threads_draft, place)
    n_layers = open_model(path).n_layers
    sizes = {"n_ctx": cells + 64 * paths, "n_seq_max": paths + config.speculation.branches,
             "n_batch": 256}
    if path.is_dir():
        return load_torch(
            dataclasses.replace(config.model, exact="off"), path, (0, n_layers), sizes, threads)
    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend

    backend = LlamaCppBackend.load(
        path, layers=(0, n_layers), n_layers_total=n_layers, first=True, last=True,
        n_threads=threads, options=llama_options(config.model, draft=True), **sizes)
    if not config.model.threads_draft:
        settle_threads(backend, threads)
    return backend
