"""Draft ranks: which ranks they are, which proposer each of them runs, and which layers of a draft
model it loads.

Uses options, strategies, models and backends. How proposals travel is in `runtime.draft_rank` and
`runtime.remote_draft`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from pipeinfer.backends import measuring
from pipeinfer.backends.base import Backend
from pipeinfer.backends.factory import llama_options, load_torch
from pipeinfer.backends.rewinding import RewindingBackend, ids_for
from pipeinfer.backends.thread_count import settle_threads
from pipeinfer.cluster.sizing import ALL_IDS
from pipeinfer.config import JobConfig
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.host import Place, threads_of
from pipeinfer.models.layers import keeps_state
from pipeinfer.models.local_stores import label
from pipeinfer.models.locate import find, open_model
from pipeinfer.models.shard import extract_shard
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry
from pipeinfer.strategies.spec import HEADS, Need, ProposerSpec

DRAFT = "draft"  #: the proposer that evaluates a draft model
DRAFT_PATHS = 8  #: paths in a draft's KV cache
_STATE_PATHS = 2  #: the same of a draft whose layers keep a state, which each path needs several of
BATCH = 256  #: most rows of one run of a draft


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


class OwnProposer(Struct, frozen=True):
    """A proposer with ranks of its own.

    ranks: in the order of the draft's layers
    draft: the model that it evaluates; None: none, or the target's head
    """

    spec: ProposerSpec
    ranks: tuple[int, ...]
    draft: Path | None = None

    @property
    def has_head(self) -> bool:
        """Whether it evaluates the prediction head of the job."""
        return bool(self.spec.needs & HEADS)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.spec.name if self.draft is None else label(self.draft)


def draft_ranks_of(hosts: Sequence[RankInfo]) -> tuple[int, ...]:
    """Return the ranks that hold the job's draft; none: rank 0 holds it."""
    return _places(hosts).get(("", ""), ())


def _places(hosts: Sequence[RankInfo]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the ranks that draft, by proposer and draft model; empty names: the job's own."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for one in hosts:
        own = one.settings
        if one.rank and own.drafts and not one.dead:
            job = own.proposer in ("", DRAFT) and not own.draft
            key = ("", "") if job else (own.proposer or DRAFT, own.draft)
            found[key] = (*found.get(key, ()), one.rank)
    return found


def own_proposers(config: JobConfig, hosts: Sequence[RankInfo], draft: Path | None
                  ) -> tuple[OwnProposer, ...]:
    """Return the proposers that the nodes file gives to ranks of their own.

    draft: of the job; a proposer that needs a draft and has none of its own evaluates this one.
    Raises UsageError for a proposer that is unknown or cannot run there, ModelError for a draft
    that cannot be read.
    """
    found, known = [], registry.proposers()
    for (name, path), ranks in _places(hosts).items():
        if not name:
            continue
        which = f"the proposer {name} of rank {', '.join(map(str, ranks))} (nodes file)"
        if (spec := known.get(name)) is None:
            raise UsageError(f"{which} does not exist: choose from {', '.join(known)}")
        if spec.worker is None:
            raise UsageError(f"{which} adds rows to the target's own runs, so the stages compute "
                             f"it: give --proposer {name} instead")
        if config.speculation.layout == "replicate":
            raise UsageError(f"{which} cannot be combined with --layout replicate, which verifies "
                             "candidates of lookahead alone: remove it")
        try:
            model = open_model(find(path, offline=config.model.offline).path).path if path \
                else draft
        except ModelError as error:
            raise ModelError(f"{which}: {error}") from error
        if path and Need.DRAFT not in spec.needs:
            raise UsageError(f"{which} evaluates no draft: remove draft = \"{path}\"")
        if Need.DRAFT in spec.needs and model is None:
            raise UsageError(f"{which} needs a draft: add draft = \"PATH\" there, or give -md")
        if Need.DRAFT not in spec.needs and len(ranks) > 1:
            raise UsageError(f"{which} takes one rank: give that setting to one of them")
        found.append(OwnProposer(spec, ranks, model if Need.DRAFT in spec.needs else None))
    return tuple(found)


def cache_sizes(config: JobConfig, cells: int, model: Any, spec: ProposerSpec) -> dict[str, Any]:
    """Return the sizes of a draft's KV cache.

    cells: of each stage's cache. model: the draft. spec: of what evaluates it.
    Raises UsageError where a proposer needs paths that the draft cannot have.
    """
    paths, own = paths_of(config, model), config.speculation
    branches = spec.branches(registry.values_of(spec, own))
    if branches and keeps_state(model):
        raise UsageError(f"--proposer {spec.name} evaluates several paths at once, and layers of "
                         f"the draft {model.path.name} keep a state: use --proposer {DRAFT}")
    count = paths + max(own.branches, branches)
    if branches and count > ALL_IDS and not model.path.is_dir():
        raise UsageError(f"--proposer {spec.name} evaluates {branches} paths at once and "
                         f"keeps {paths}, and llama.cpp has {ALL_IDS}: lower its sizes "
                         f"({', '.join(spec.options)}) or --parallel")
    return {"n_ctx": cells + 64 * paths, "n_seq_max": count, "n_batch": BATCH}


def paths_of(config: JobConfig, model: Any) -> int:
    """Return how many paths a draft keeps in its KV cache."""
    return (_STATE_PATHS if keeps_state(model) else DRAFT_PATHS) + config.speculation.parallel - 1


def setups_of(config: JobConfig, own: OwnProposer, hosts: Sequence[RankInfo], cells: int,
              n_vocab: int, vocabulary: Vocabulary | None) -> list[DraftSetup]:
    """Return what each rank of a proposer loads, in the order of the layers.

    own: without a head. cells: of each stage's cache. n_vocab: of the target.
    vocabulary: for grammars; only the last draft rank gets it.
    Raises UsageError for more ranks than layers, and for a model folder on several ranks.
    """
    path, ranks = own.draft, own.ranks
    words = None if vocabulary is None else vocabulary.to_json()
    options = registry.values_of(own.spec, config.speculation)
    if path is None:
        return [DraftSetup(
            ranks, own.spec.name, "", "", 0, 0, 0, n_ctx=0, n_seq_max=0, n_batch=0, paths=0,
            n_vocab=n_vocab, settings=structs.asdict(hosts[ranks[0]].settings), vocabulary=words,
            options=options)]
    model = open_model(path)
    if len(ranks) > model.n_layers:
        raise UsageError(f"the draft {path.name} has {model.n_layers} layers, too few for "
                         f"{len(ranks)} ranks: let fewer draft")
    if len(ranks) > 1 and keeps_state(model):
        raise UsageError(f"layers of the draft {path.name} keep a state, which one rank holds "
                         "whole: let one rank draft")
    if len(ranks) > 1 and path.is_dir():
        raise UsageError(f"the draft {path.name} is a folder, which one rank holds whole: let "
                         "one rank draft, or use a GGUF file")
    ends = [model.n_layers * k // len(ranks) for k in range(len(ranks) + 1)]
    return [DraftSetup(
        ranks, own.spec.name, str(path), model.fingerprint, model.n_layers, start, stop,
        **cache_sizes(config, cells, model, own.spec), paths=paths_of(config, model),
        n_vocab=n_vocab, settings=structs.asdict(hosts[rank].settings),
        vocabulary=words if stop == model.n_layers else None, options=options)
        for rank, start, stop in zip(ranks, ends[:-1], ends[1:], strict=True)]


def load_draft(config: JobConfig, place: Place, path: Path, layers: tuple[int, int],
               sizes: Mapping[str, Any]) -> tuple[Backend, int]:
    """Load layers of a draft; return the backend and its number of threads.

    layers: first layer, and the one after the last. sizes: see `cache_sizes`.
    """
    threads = threads_of(config.model.threads_draft, place)
    model = open_model(path)
    n_layers = model.n_layers
    if path.is_dir():
        return load_torch(
            dataclasses.replace(config.model, exact="off"), path, layers, sizes, threads), threads
    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend

    whole, states = layers == (0, n_layers), keeps_state(model)
    own = {**sizes, "n_seq_max": ids_for(sizes["n_seq_max"])} if states else sizes
    backend = LlamaCppBackend.load(
        path if whole else extract_shard(model, *layers), layers=layers,
        n_layers_total=n_layers, first=layers[0] == 0, last=layers[1] == n_layers,
        n_threads=threads, options=llama_options(config.model, draft=True), **own)
    if not config.model.threads_draft and whole:
        with measuring.alone():
            threads = settle_threads(backend, threads)
    return RewindingBackend(backend, sizes["n_seq_max"]) if states else backend, threads
