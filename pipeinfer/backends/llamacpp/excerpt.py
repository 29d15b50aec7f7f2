"""Measures a loaded file by its first layers of each kind and by rows of its output matrix.

See `models.excerpt` for the choice. Times come from as many layers as the processor's caches cannot
hold, since a single small layer would be read from there.

Quantisation of activations hides most rounding errors of a kernel from the layer's own output. So
rows are compared by every product of a weight and by attention's output as well (`InnerBackend`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec import structs
from typing_extensions import override

from pipeinfer.backends.exact_width import (
    FAR,
    MOST_CELLS,
    MOST_ROWS,
    Progress,
    curve_of,
    exact_width,
    still_exact,
)
from pipeinfer.backends.llamacpp import eval_callback
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LoadedModel, make_context
from pipeinfer.backends.llamacpp.eval_callback import EvalCallback, Routers, source_of, weight_of
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.host import last_level_cache
from pipeinfer.llama import binding
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
    loaded, own = LoadedModel(backend._model), backend._callback
    callback = loaded.callback(
        None if own is None else own.routers, info.layers, options, last=False,
        chooses_experts=own is not None and own.chooses_experts, kind=kind.callback_type)
    sizes = (info.n_ctx, info.n_seq_max + 1 + loaded.further_ids, info.n_batch,
             backend.most_threads)
    context = make_context(info.architecture, loaded, callback, sizes, options)
    found = kind(loaded, context, callback, info, options)
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


_ATTENTION = b"kqv_out-"
_DELTA_NET = b"attn_output-"  #: what a delta net gives; in layers with attention their product
#: weights of three dimensions, whose products have rows of a head together, not of a token
_BY_HEAD = (b".attn_k_b.weight", b".attn_v_b.weight", b".attn_output_a.weight")


class InnerCallback(EvalCallback):
    """Copies the products and the outputs of attention of each decode.

    wanted: whether they are copied; otherwise the decode ends after attention of the last layer,
        when the cache is complete.
    """

    def __init__(self, last_layer: int, first_layer: int = 0, entry: str = "",
                 output: str = "l_out-%d") -> None:
        super().__init__(last_layer, first_layer, entry, output)
        self._look_inside()
        self.function, self.data = self._own, None  # the compiled filter passes none of them on
        self.wanted = True
        self._last_attention = _ATTENTION + b"%d" % last_layer
        self._parts: dict[bytes, list[FloatArray]] = {}

    @override
    def select_among(self, routers: Routers) -> None:
        # only the C part selects among the experts of all slices: what is compared here are those
        # of this slice, selected among themselves
        self.choose_experts_row_by_row()

    def rows(self, count: int) -> list[FloatArray]:
        """Return and forget what was copied: float32[count, n] for each tensor; several have the
        same name in some graphs."""
        parts, self._parts = self._parts, {}
        return [one.reshape(count, -1) for name in sorted(parts) for one in parts[name]]

    def _call(self, tensor: int, ask: bool, data: int | None) -> bool:
        if self.ended:
            return ask
        name: bytes = binding.ggml_get_name(tensor)
        if not (name.startswith((_ATTENTION, _DELTA_NET)) or self._is_product(tensor)):
            return super()._call(tensor, ask, data)
        if ask:
            return True
        if self._filter.row_by_row and eval_callback.is_router(tensor, self._filter.source):
            super()._call(tensor, ask, data)
        try:
            if self.wanted:
                self._copy(name, tensor)
        except BaseException as error:  # an exception cannot cross C: raised after the decode
            self.error = error
            return self._end()
        if self.wanted or name != self._last_attention:
            return True
        self.hidden_done = True
        return self._end()

    def _is_product(self, tensor: int) -> bool:
        source = self._filter.source
        weight = weight_of(tensor, source)
        return bool(weight) and not weight.endswith(_BY_HEAD) and source_of(tensor, source, 1) != 0

    def _copy(self, name: bytes, tensor: int) -> None:
        found = np.empty(binding.ggml_nelements(tensor), np.float32)
        binding.ggml_backend_tensor_get(tensor, found.ctypes.data, 0, found.nbytes)
        self._parts.setdefault(name, []).append(found)


class InnerBackend(LlamaCppBackend):
    """An excerpt that returns float32[n, more than n_embd]: hidden rows, and what `InnerCallback`
    copied of each. Rows without outputs only fill the cache; their results have no meaning."""

    callback_type = InnerCallback
    _callback: InnerCallback

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell."""
        self._callback.wanted = bool(rows.outputs.any())
        result = super().decode(rows, hidden, should_stop)
        inside = self._callback.rows(len(rows))
        return result if result is None else np.concatenate([result, *inside], axis=1)
