"""Loading what makes guesses on rank 0, by what the options say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeinfer.backends.base import Backend
from pipeinfer.backends.factory import llama_options, load_torch
from pipeinfer.config import JobConfig
from pipeinfer.host import Place, threads_of
from pipeinfer.models.locate import open_model
from pipeinfer.models.text.grammar import Vocabulary
from pipeinfer.runtime.draft_worker import DraftWorker
from pipeinfer.strategies.proposers.base import Proposer

DRAFT_PATHS = 8  #: paths that a draft keeps in its cache


def load_proposers(
    config: JobConfig, place: Place, drafts: Sequence[Path], cells: int, n_vocab: int,
    notify: Callable[[], None], vocabulary: Vocabulary | None = None,
) -> DraftWorker | None:
    """The thread that names guesses, by what `--proposer` says; None without work for one."""
    from pipeinfer.strategies.proposers.cascade import Several
    from pipeinfer.strategies.proposers.prompt_lookup import PromptLookup

    proposers: list[Proposer] = []
    for name in config.speculation.proposer or ("draft",):
        if name == "prompt-lookup":
            proposers.append(PromptLookup())
        elif name == "draft":
            proposers += [_draft(config, place, path, cells, n_vocab, vocabulary)
                          for path in drafts]
    if not proposers:
        return None
    return DraftWorker(proposers[0] if len(proposers) == 1 else Several(proposers), notify)


def _draft(config: JobConfig, place: Place, path: Path, cells: int, n_vocab: int,
           vocabulary: Vocabulary | None) -> Proposer:
    from pipeinfer.strategies.proposers.draft_model import DraftModel

    threads = threads_of(config.model.threads_draft, place)
    n_layers = open_model(path).n_layers
    paths = DRAFT_PATHS + config.speculation.parallel - 1
    sizes = {"n_ctx": cells + 64 * paths, "n_seq_max": paths + config.speculation.branches,
             "n_batch": 256}
    backend: Backend
    if path.is_dir():
        backend = load_torch(
            dataclasses.replace(config.model, exact="off"), path, (0, n_layers), sizes, threads
        )
    else:
        from pipeinfer.backends.llamacpp.backend import LlamaCppBackend

        backend = LlamaCppBackend.load(
            path, layers=(0, n_layers), n_layers_total=n_layers, first=True, last=True,
            n_threads=threads, options=llama_options(config.model, draft=True), **sizes)
    return DraftModel(backend, n_vocab, paths=paths, vocabulary=vocabulary)
