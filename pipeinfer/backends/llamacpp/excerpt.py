"""Measures a loaded file by its first layers of each kind and by rows of its output matrix.

See `models.excerpt` for the choice. Times come from as many layers as the processor's caches cannot
hold, since a single small layer would be read from there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from pipeinfer.backends.exact_width import (
    FAR,
    MOST_CELLS,
    MOST_ROWS,
    Progress,
    curve_of,
    exact_width,
    still_exact,
)
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import make_context
from pipeinfer.backends.llamacpp.inner_results import InnerBackend
from pipeinfer.backends.llamacpp.loaded import LoadedModel
from pipeinfer.host import last_level_cache
from pipeinfer.models.excerpt import Kinds, kinds_of, write_head
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import ShardSource
from pipeinfer.models.shard_cache import cache_directory

Kind = TypeVar("Kind", bound=LlamaCppBackend)
_CACHES = 4  #: times the last-level cache: least bytes of layers whose times count
_MOST = 0.5  #: share of a file from which on all of it is timed
_HEAD_CELLS = 256
_CONTEXTS = (0, 23, FAR)  #: tokens before the rows that are compared inside the layers


def excerpt_of(backend: LlamaCppBackend, n_layers: int, kind: type[Kind]) -> Kind:
    """Return a backend of the first `n_layers` layers, for measurements.

    It shares the weights and has a context of its own; close it before the other. Its results are
    hidden rows. Raises BackendError where there is no memory for the context.
    """
    info, start = backend.info, backend.info.layers[0]
    info = structs.replace(
        info, last=False, layers=(start, start + n_layers), n_seq_max=3,
        n_ctx=min(info.n_ctx, MOST_CELLS), n_batch=min(info.n_batch, MOST_ROWS))
    options = structs.replace(backend.options, layer_callbacks=True, lend=False)
    loaded, own = LoadedModel(backend._model), backend._probe
    probe = loaded.probe(None if own is None else own.routers, info.layers, options, last=False,
                         chooses_experts=own is not None and own.chooses_experts,
                         kind=kind.probe_type)
    sizes = (info.n_ctx, info.n_seq_max + 1 + loaded.further_ids, info.n_batch,
             backend.most_threads)
    context = make_context(info.architecture, loaded.handle, probe, sizes, options)
    found = kind(loaded, context, probe, info, options)
    found._owned, found.exact_limit = False, backend.exact_limit
    return found


class LoadedExcerpt:
    """The excerpt of one loaded backend; `exact_width.Excerpt`. Its timing backend is open within
    `opened`.

    names: of the kinds of its layers and of its output matrix
    timed: the backend whose times count
    """

    def __init__(self, backend: LlamaCppBackend, model: ModelFile, kinds: Kinds, *, tied: bool
                 ) -> None:
        self.names, self.timed = kinds.names, backend
        self._backend, self._model, self._kinds, self._tied = backend, model, kinds, tied

    @classmethod
    @contextmanager
    def opened(cls, source: str | os.PathLike[str] | ShardSource, backend: LlamaCppBackend
               ) -> Iterator[LoadedExcerpt | None]:
        """Open the excerpt of the file or shard that was loaded; None where the whole has to be
        measured: architectures whose layers are not known to be alike."""
        if shard := isinstance(source, ShardSource):
            model, (start, stop) = source.model, source.layers
        else:
            model = ModelFile(source)
            start, stop = 0, model.n_layers
        kinds = kinds_of(model, start, stop, last=backend.info.last)
        if kinds is None:
            yield None
            return
        excerpt = cls(backend, model, kinds, tied=shard)
        count = max(kinds.n_layers, layers_to_time(model.layer_reads[start:stop]))
        if count > _MOST * (stop - start):
            yield excerpt
            return
        with closing(excerpt_of(backend, count, LlamaCppBackend)) as timed:
            excerpt.timed = timed
            yield excerpt

    def width(self, limit: int, progress: Progress | None) -> int:
        """Return R of the file. Raises what loading and decoding raise."""
        backend, count = self._backend, self._kinds.n_layers
        with closing(excerpt_of(backend, count, LlamaCppBackend)) as layers:
            found = exact_width(layers, limit, progress=progress, contexts=())
        # devices fuse operations that a look inside would part
        inner = InnerBackend if backend.options.on_cpu else LlamaCppBackend
        with closing(excerpt_of(backend, count, inner)) as layers:
            found = still_exact(layers, found, _CONTEXTS, progress=progress)
        if found == 1 or not self._backend.info.last:
            return found
        handle, path = tempfile.mkstemp(suffix=".tmp", prefix="head.", dir=cache_directory())
        os.close(handle)
        try:
            write_head(self._model, path, tied=self._tied)
            with closing(self._head(Path(path))) as head:
                return exact_width(head, found, progress=progress)
        finally:
            os.unlink(path)

    def curve(self, progress: Progress | None = None) -> tuple[float, ...]:
        """Return the curve of the timed layers."""
        return curve_of(self.timed, progress=progress)

    def _head(self, path: Path) -> LlamaCppBackend:
        options = structs.replace(
            self._backend.options, layer_callbacks=False, gaps=False, huge_pages=False)
        return LlamaCppBackend.load(
            path, layers=(0, 1), n_layers_total=2, first=False, last=True, n_ctx=_HEAD_CELLS,
            n_seq_max=3, n_batch=self._backend.info.n_batch, n_threads=self._backend.most_threads,
            options=options)


def layers_to_time(sizes: Sequence[int]) -> int:
    """Return how many first layers have more weights than the processor's caches hold.

    sizes: bytes of each layer that one row reads.
    """
    need, found = _CACHES * last_level_cache(), 0
    for count, size in enumerate(sizes, 1):
        found += size
        if found >= need:
            return count
    return len(sizes)
