"""The parts of a stage: shards that a rank loads and measures, by a loader for each backend."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.backends import measuring
from pipeinfer.backends.base import Backend
from pipeinfer.backends.chain import ChainBackend
from pipeinfer.backends.exact_width import Widths, known_widths
from pipeinfer.backends.factory import EXACT_LIMIT, llama_options, load_torch, torch_embedding
from pipeinfer.backends.pytorch.options import torch_version
from pipeinfer.backends.thread_count import settle_threads
from pipeinfer.backends.wide import Embedding
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.cluster.shard_transfer import stage_shard
from pipeinfer.cluster.sizing import exact_rows
from pipeinfer.config import JobConfig, ModelConfig
from pipeinfer.core.control import Setup
from pipeinfer.llama.library import gpus, has_gpu, llama_identity
from pipeinfer.models.embedding import PIECE as EMBEDDING
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.locate import open_model, same_model
from pipeinfer.models.shard import ShardSource, shard_name
from pipeinfer.models.shard_cache import cache_directory, turn
from pipeinfer.transport.base import Port

Report = Callable[[str, int, int], None]


class LoadedPart(Struct, frozen=True):
    """A loaded shard.

    piece: name of the slice that it holds of its layers, "" for all of them.
    threads: CPU threads that decode a single row.
    received: bytes of it that came from rank 0.
    """

    layers: tuple[int, int]
    piece: str
    backend: Backend
    widths: Widths
    threads: int
    received: int


@dataclass(frozen=True, slots=True)
class PartLoader(ABC):
    """Loads parts of one stage.

    threads: CPU threads of each part. report: called with phase, done and total
    """

    config: JobConfig
    setup: Setup
    port: Port
    hooks: Hooks
    threads: int
    report: Report

    @abstractmethod
    def load(self, piece: str, layers: tuple[int, int]) -> LoadedPart:
        """Load layers `[start, stop)`, or the slice of them named `piece`, and measure them.

        Raises ModelError, MismatchError, BackendError and ProtocolError.
        """

    @abstractmethod
    def embedding(self) -> Embedding:
        """Return the embedding table, which is stored apart from the stage's slices."""

    def _measured(self, backend: Backend, shard: Path | ShardSource | None, version: str,
                  kind: str, piece: str) -> tuple[Widths, int]:
        model = self.config.model
        try:
            return _measured(
                backend, shard, self.setup, (version, *host.cpu_features(), gpu_of(model, kind)),
                piece, self.threads, None if model.threads else self.threads, self.report,
                model.pad)
        except BaseException:
            backend.close()
            raise


class TorchLoader(PartLoader):
    """Loads from the model's folder or file, which is on this host."""

    def load(self, piece: str, layers: tuple[int, int]) -> LoadedPart:
        """Load and measure a part with torch; nothing is received."""
        setup = self.setup
        path = same_model(setup.model, setup.fingerprint)
        self.report("loading", 0, 1)
        backend = load_torch(self.config.model, path, layers, {
            "n_ctx": setup.n_ctx, "n_seq_max": setup.n_seq_max, "n_batch": setup.n_batch},
            self.threads, piece, exact_rows(self.config))
        widths, used = self._measured(backend, None, torch_version(), "torch", piece)
        return LoadedPart(layers, piece, backend, widths, used, 0)

    def embedding(self) -> Embedding:
        """Return the table of the model's own files."""
        return torch_embedding(self.config.model, same_model(
            self.setup.model, self.setup.fingerprint))


class LlamaLoader(PartLoader):
    """Loads a shard from the model's file, from the shard cache, or as rank 0 sends it."""

    def load(self, piece: str, layers: tuple[int, int]) -> LoadedPart:
        """Load and measure a part with llama.cpp, padded where it is on a GPU."""
        from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
        from pipeinfer.backends.llamacpp.padded import PaddedBackend

        config, setup, (start, stop) = self.config, self.setup, layers
        self.hooks.cached(lambda: cache_directory() / shard_name(
            setup.fingerprint, start, stop, piece))
        shard, received = stage_shard(config.cluster, self.port, structs.replace(
            setup, start=start, stop=stop, piece=piece), self.report)
        size = shard.total if isinstance(shard, ShardSource) else shard.stat().st_size
        self.report("loading", 0, size)
        whole = start == 0 and stop == setup.n_layers
        streams = setup.stream if config.model.gpu_layers and has_gpu() else 0
        backend = (PaddedBackend if streams else LlamaCppBackend).load(
            shard,
            layers=layers,
            n_layers_total=setup.n_layers,
            first=start == 0 and not piece,  # slices are given rows
            last=stop == setup.n_layers,
            n_ctx=streams * setup.n_seq_max or setup.n_ctx,
            n_seq_max=setup.n_seq_max,
            n_batch=setup.n_batch,
            n_threads=self.threads,
            options=llama_options(
                config.model,
                callbacks=not whole or config.speculation.policy != "iterative",
                gaps=setup.gaps, streams=streams > 0,
            ),
            progress=lambda phase, share: self.report(phase, round(share * size), size),
        )
        widths, used = self._measured(backend, shard, llama_identity(), "llamacpp", piece)
        return LoadedPart(layers, piece, backend, widths, used, received)

    def embedding(self) -> Embedding:
        """Return the table, read from the model's file or received like a shard."""
        path, _ = stage_shard(self.config.cluster, self.port, structs.replace(
            self.setup, piece=EMBEDDING), self.report)
        assert isinstance(path, Path)
        return EmbeddingTable.open(open_model(path))


LOADERS: Mapping[str, type[PartLoader]] = {"torch": TorchLoader, "llamacpp": LlamaLoader}


def _measured(backend: Backend, shard: Path | ShardSource | None, setup: Setup,
              identity: tuple[object, ...], piece: str, threads: int, most: int | None,
              report: Report, pad: int = 0) -> tuple[Widths, int]:
    """Return the widths of a loaded shard and the threads that it uses for single rows.

    shard: its file, where llama.cpp loaded it. most: threads among which to choose; None: `threads`
    are fixed. pad: rows to which short decodes are padded on a device; 0: measured.
    """
    used, excerpt = threads, None
    with measuring.alone(), contextlib.ExitStack() as stack:
        if setup.cores:  # all ranks of this host use the same ones
            stack.enter_context(turn(cache_directory() / "measuring", lambda: report(
                "waiting for other ranks' measurements", 0, 1)))
        if shard is not None:
            from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
            from pipeinfer.backends.llamacpp.excerpt import LoadedExcerpt
            from pipeinfer.backends.llamacpp.padded import PaddedBackend, known_padding

            assert isinstance(backend, LlamaCppBackend)
            if isinstance(backend, PaddedBackend) and backend.options.streams:
                return known_padding(
                    backend, (setup.fingerprint, piece, *identity), pad, EXACT_LIMIT,
                    lambda done, total: report("measuring", done, total)), threads
            excerpt = stack.enter_context(LoadedExcerpt.opened(shard, backend))
            # an exact limit of 1 may come from sums that are split by threads
            if most is not None and backend.any_threads:
                used = settle_threads(backend if excerpt is None else excerpt.timed, most,
                                      lambda: report("measuring", 0, 1))
                backend.use_threads(used)
        own = () if excerpt is not None else (setup.fingerprint, piece)
        widths = known_widths(
            backend, (*own, threads, *identity), limit=setup.exact or (
                EXACT_LIMIT if shard is not None else getattr(backend, "exact_limit", EXACT_LIMIT)),
            known_curve=setup.curve, excerpt=excerpt,
            progress=lambda done, total: report("measuring", done, total))
    return widths, used


def gpu_of(config: ModelConfig, kind: str) -> str:
    """Return llama.cpp's names of the devices that hold a stage's layers; "" if the CPU or torch
    computes. kind: of backend."""
    if kind != "llamacpp" or not config.gpu_layers:
        return ""
    return ", ".join(one.description for one in gpus())


def pieces_of(setup: Setup) -> tuple[str, ...]:
    """Return the names of the slices that a rank holds; "" alone for whole layers."""
    if not setup.cut:
        return ("",)
    return tuple(setup.cut[index] for index in setup.holders[setup.port.member])


def gaps_of(layers: tuple[int, int], held: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of `layers` that are not covered by `held` (ranges inside, disjoint)."""
    found, at = [], layers[0]
    for start, stop in sorted(held):
        if at < start:
            found.append((at, start))
        at = stop
    if at < layers[1]:
        found.append((at, layers[1]))
    return found


def joined(parts: list[LoadedPart]) -> tuple[Backend, Widths]:
    """Return all parts as one backend, with the worst of their widths."""
    if len(parts) == 1:
        return parts[0].backend, parts[0].widths
    return ChainBackend([part.backend for part in parts]), worst(parts)


def worst(parts: list[LoadedPart]) -> Widths:
    """Return the widths that hold for all parts: the smallest R and the highest costs."""
    curves = zip(*(part.widths.curve for part in parts), strict=True)
    return structs.replace(parts[0].widths, exact=min(p.widths.exact for p in parts),
                               curve=tuple(map(max, curves)),
                               padded=min(p.widths.padded for p in parts),
                               padding_cost=max(p.widths.padding_cost for p in parts))
