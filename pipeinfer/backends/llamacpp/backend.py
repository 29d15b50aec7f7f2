"""Runs a GGUF shard with a released llama.cpp library, through its C interface.

llama.cpp has no call for "layers a to b". So a shard is a model of its own (`models.shard`). It
takes the previous shard's residual stream as embedding rows, and its own is read in the evaluation
callback of llama.cpp's graph scheduler, where a decode is also stopped at a layer boundary.

Independent of runs, ranks and the distribution of layers; shards are cut elsewhere. Several
backends may exist in one process, each used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np

from pipeinfer.backends.base import ALL_IDS, NO_VIEWS, Capabilities, ShardInfo
from pipeinfer.backends.llamacpp.batch import RowBatch
from pipeinfer.backends.llamacpp.cells import OccupiedCells
from pipeinfer.backends.llamacpp.context import (
    CACHE_TYPES,
    LlamaOptions,
    LoadedModel,
    LoadProgress,
    cache_bytes,
    check_sizes,
    load_model,
    make_context,
    metadata,
)
from pipeinfer.backends.llamacpp.eval_callback import EvalCallback, PartSum
from pipeinfer.backends.llamacpp.huge_pages import Mapping, into_huge_pages, mappings
from pipeinfer.backends.llamacpp.places import Places
from pipeinfer.backends.llamacpp.saving import CellSaver
from pipeinfer.backends.llamacpp.taps import Taps
from pipeinfer.core.types import ALL_SEQS, END, FloatArray, Rows, make_rows
from pipeinfer.errors import BackendError, ModelError, NoCells
from pipeinfer.llama import binding
from pipeinfer.llama.library import clear_log, ensure_llama, last_log
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import ShardSource

__all__ = ["CACHE_TYPES", "LlamaCppBackend", "LlamaOptions", "ensure_llama"]

_STATE = ("layers of this model keep a state of the text, of which no part can be taken back or "
          "copied: only whole sequences can")
_SECTIONS = 8  #: llama.cpp's number of a rotation by four positions
_LONG = 1024  #: positions from which a text is long, see `LlamaCppBackend.use_threads`


class LlamaCppBackend:
    """One shard, or a whole model, on llama.cpp; `backends.base.Backend` has the contract."""

    callback_type: ClassVar[type[EvalCallback]] = EvalCallback

    def __init__(
        self,
        loaded: LoadedModel,
        context: Any,
        callback: EvalCallback | None,
        info: ShardInfo,
        options: LlamaOptions,
    ) -> None:
        self._model, self._ctx, self._callback = loaded.handle, context, callback
        self._memory = binding.llama_get_memory(context)
        self.info, self.options = info, options
        self._n_logits = loaded.n_tokens if loaded.is_slice else info.n_vocab
        self._owned = True  #: whether the model goes with this backend
        self._place, self._seen = (0, 0), np.empty((0, 0), np.float32)  # logits where they lie
        self.most_threads = self._few_threads = binding.llama_n_threads(context)
        self._all_at_work = True
        #: rows that attention certainly processes as it does one; see `exact_width.exact_width`
        self.exact_limit = options.exact_limit(info.n_ctx, self.most_threads)
        partly = not options.on_cpu and 0 <= options.n_gpu_layers < info.layers[1] - info.layers[0]
        #: whether the number of threads changes no bits; with f16 it does, in layers that stay here
        self.any_threads = self.exact_limit > 1 and not partly
        own, self.keeps_state = loaded.own, loaded.keeps_state
        self._enters, self._again, self._whole = loaded.enters, loaded.again, own.copied_whole
        self._until_norm = False  # see `norms`
        self._taps: Taps | None = None
        self._last: tuple[int, FloatArray | None] = 0, None  # rows of the last decode
        no_cells = self._whole or bool(binding.llama_model_is_recurrent(self._model))
        self.saver: CellSaver | None = None  #: see `LlamaOptions.saves`
        self._cells = OccupiedCells(
            context, info, windows=loaded.has_windows, nothing=loaded.nothing(info.n_seq_max)) \
            if (options.keep_order or loaded.has_windows) and not (
                options.streams or options.gaps or no_cells) else None
        self.capabilities = Capabilities(
            free_positions=options.gaps,
            separate_views=False,
            embedding_rows=True,
            stops_inside=callback is not None and options.layer_callbacks,
            takes_back=not self.keeps_state,
        )
        sections = options.gaps or (own.sections and not options.head) or (
            options.head == "dflash" and binding.llama_model_rope_type(self._model) == _SECTIONS)
        self._batch = RowBatch(info, sections=sections, enters=self._enters, reads=self._again,
                               both=bool(options.head))
        self._places = Places() if own.sections and not options.head else None
        self._batch.places = self._places
        if self._cells is not None:
            self._cells.places = self._places
        if info.first and (wide := binding.picture_width(self._model)):
            self._batch.width = wide

    @classmethod
    def load(  # noqa: PLR0913 - a loaded file has that many sizes
        cls,
        path: str | os.PathLike[str] | ShardSource,
        *,
        layers: tuple[int, int],
        n_layers_total: int,
        first: bool,
        last: bool,
        n_ctx: int,
        n_seq_max: int,
        n_batch: int,
        n_threads: int,
        options: LlamaOptions | None = None,
        progress: LoadProgress = lambda _, __: None,
    ) -> Self:
        """Load the file at `path` (a shard, or a whole model) with a cache of `n_ctx` cells; or a
        shard that is read from the whole model's file.

        The file must be one that `extract_shard` or a converter made: llama.cpp itself checks
        little. Call `ModelFile` on a file of unknown origin first.

        layers: which of the whole model's `n_layers_total` layers the file holds. n_ctx is
        rounded up to a multiple of 256 by llama.cpp; `info` has what it became. progress: see
        `load_model`. Raises ModelError when the file cannot be loaded, BackendError when the cache
        cannot be made.
        """
        options = options or LlamaOptions()
        check_sizes(n_ctx, n_seq_max, n_batch, n_threads, options)
        ensure_llama(options.numa, own_prompts=options.own_prompts)
        source, name = (path, path.name) if isinstance(path, ShardSource) else (
            ModelFile(path), os.fspath(path))
        file = source.model if isinstance(source, ShardSource) else source
        earlier = mappings(file.path)
        model = load_model(path, options, progress)
        try:
            n_layers = binding.llama_model_n_layer(model)
            if n_layers != layers[1] - layers[0]:
                raise ModelError(f"{name}: has {n_layers} layers, but layers {layers[0]} to "
                                 f"{layers[1]} were expected")
            loaded = LoadedModel(model, source, head=bool(options.head))
            options = loaded.resolved(options)
            more = loaded.further_ids + (options.saves and loaded.has_ranges)
            chooses = loaded.chooses_experts(file, options)
            callback = loaded.callback(file.path, layers, options, last=last,
                                       chooses_experts=chooses, kind=cls.callback_type)
            _check_ids(name, n_seq_max, more)
            more += not (options.streams or loaded.own.copied_whole)  # dead cells': see `cells`
            sizes = (n_ctx, n_seq_max + more, n_batch, n_threads)
            context = make_context(name, loaded, callback, sizes, options)
        except BaseException:
            binding.llama_model_free(model)
            raise
        info = _info(loaded, context, options, layers=layers, n_layers_total=n_layers_total,
                     first=first, last=last, n_seq_max=n_seq_max, n_batch=n_batch)
        backend = cls(loaded, context, callback, info, options)
        backend.exact_limit = min(backend.exact_limit, loaded.most_rows(chooses_experts=chooses))
        if options.saves:
            backend.saver = CellSaver.of(loaded, backend._cells, source, info, context)
        backend._use_huge_pages(file, earlier, progress)
        return backend

    def _use_huge_pages(self, file: ModelFile, earlier: list[Mapping], progress: LoadProgress
                        ) -> None:
        options = self.options
        if options.huge_pages and options.on_cpu and not (options.use_mlock or options.numa):
            try:
                into_huge_pages(file.path, earlier, read=self._read_once, wholes=[
                    (one.offset, one.offset + one.nbytes) for name, one in file.tensors.items()
                    if "exps" in name and one.part == 0],
                    progress=lambda: progress("loading", 1.0))
            except BaseException:
                self.close()
                raise

    def _read_once(self) -> None:
        """Decode one row, which reads all weights but the embedding and most experts."""
        hidden = None if self.info.first else np.zeros((1, self.info.n_embd), np.float32)
        self.decode(make_rows([(0, 0, (0,), True)]), hidden)
        self.seq_rm(ALL_SEQS, 0, END)

    def sum_with(self, sums: PartSum | None) -> None:
        """Sum partial results with `sums` from now on; None: use each partial result as if it were
        the sum."""
        if self._callback is not None:
            self._callback.sum_with(sums, on_device=not self.options.on_cpu)

    def decode(
        self,
        rows: Rows,
        hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`. A hidden row on the first shard is an embedding row."""
        n, info = len(rows), self.info
        if self._ctx is None:
            raise BackendError("decode on a closed backend")
        if not 0 < n <= info.n_batch:
            raise BackendError(f"a decode of {n} rows: this backend takes 1 to {info.n_batch}")
        if rows.views is not None:
            raise BackendError(NO_VIEWS)
        keep = self._batch.fill(rows, hidden)
        long = rows.lists.positions[0] >= _LONG
        if long != self._all_at_work:
            self._set_threads(all_of_them=long)
        count = rows.lists.outputs.count(True)
        width = info.n_embd // 2 if self._again else info.n_embd
        out = None if info.last and not self._until_norm else np.empty(
            (count if info.last else n, width), np.float32)
        media = rows.media
        enters = self._enters and not (media is not None and info.first)
        given, embedding = keep if enters else None, None
        if self._again and given is not None:
            given, embedding = (np.ascontiguousarray(half) for half in np.hsplit(given, 2))
        elif self._again and not info.last:
            embedding = np.empty((n, width), np.float32)
        if self._callback is not None:
            # a stop would leave states of other ids in cells that were exchanged
            fixed = (self.keeps_state and len(rows.first_positions()) > 1) or (
                media is not None and media.places is not None)  # no part of it can be removed
            stops = self.options.layer_callbacks and not fixed
            self._callback.arm(should_stop if stops else None, out, given, n, embedding)
        clear_log()
        status = self._evaluate(rows)
        del keep
        if self._callback is not None and not self._finished(self._callback, rows, given, status):
            return None
        if status != 0:
            raise self._failure(status, rows)
        self._last = n, hidden
        if out is not None and embedding is not None and not info.last:
            return np.concatenate([out, embedding], axis=1)
        return self._logits(count) if out is None else out

    def _evaluate(self, rows: Rows) -> int:
        """Decode the batch; return llama.cpp's status."""
        together = rows.media is not None and not rows.media.causal
        if together:
            binding.llama_set_causal_attn(self._ctx, False)
        try:
            return int(binding.llama_decode(self._ctx, self._batch.columns)) \
                if self._cells is None else self._cells.decode(self._batch.columns, rows)
        finally:
            if together:
                binding.llama_set_causal_attn(self._ctx, True)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Store the inputs of layers from now on."""
        self._taps = Taps.of(self._ctx, self.info, layers)

    @property
    def tapped(self) -> FloatArray:
        """Store the inputs of layers; to be read before the next decode."""
        assert self._taps is not None
        return self._taps.read(*self._last)

    def norms(self, rows: Rows, hidden: FloatArray | None = None) -> FloatArray:
        """Evaluate rows up to the norm before the output head: llama.cpp's embeddings without
        pooling. Raises BackendError as `decode` does, and for a shard that is not the last or has
        no callbacks."""
        if self._callback is None or not self.info.last:
            raise BackendError("this shard has no norm that could be read")
        self._until_norm = True
        try:
            with self._callback.at_norm():
                found = self.decode(rows, hidden)
        finally:
            self._until_norm = False
        assert found is not None  # nothing has stopped it
        return found

    def _finished(self, callback: EvalCallback, rows: Rows, given: FloatArray | None, status: int
                  ) -> bool:
        """Release the callback after a decode; return False if it was stopped.

        given: hidden rows that the callback had to put into the graph.
        Raises the callback's error, and BackendError if it did not find its tensors. Cells of a
        decode that gave nothing are removed.
        """
        error, taken = callback.error, callback.hidden_done
        if given is not None and status == 0 and not (callback.entered or error):
            error = BackendError("the shard's graph has no input to put rows into; it cannot be "
                                 "split")
        stopped = callback.stopped or (callback.ended and not taken)
        if status == 0 and not (taken or stopped or error or (
                self.info.last and not self._until_norm)):
            error = BackendError(f"the shard's graph has no {callback.last_name.decode()} tensor; "
                                 "it cannot be split or give embeddings")
        callback.arm(None, None)  # holds neither the caller's array nor its callback
        if status == 0 and (stopped or error):
            self._drop(rows)
        if error is not None:
            raise error
        return not stopped

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` from cells in `[p0, p1)`. Raises BackendError for a part of a state."""
        if p0 >= p1 or self._closed():
            return
        if self.keeps_state and (p0 > 0 or p1 < END):
            raise BackendError(_STATE)
        if self._cells is not None:
            self._cells.remove(seq_id, p0, p1)
            return
        if self._places is not None:
            at = self._places.of(seq_id, p0), self._places.of(seq_id, p1)
            self._places.remove(seq_id, p0, p1)
            p0, p1 = at
        every = range(self.info.n_seq_max) if self.keeps_state and seq_id == ALL_SEQS \
            else (seq_id,)  # llama.cpp takes no "all" there
        if not all([binding.llama_memory_seq_rm(self._memory, one, p0, _upper(p1))
                    for one in every]):
            raise BackendError(f"llama.cpp refused to remove positions from {p0} on")

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to cells of `src`.

        Raises BackendError for a part of a state, and for an id whose state would be replaced.
        """
        if p0 >= p1 or src == dst or self._closed():
            return
        if self.keeps_state and not self._copies_whole(src, dst, p0, p1):
            raise BackendError(_STATE)
        at = p0, p1
        if self._places is not None:
            at = self._places.of(src, p0), self._places.of(src, p1)
            self._places.copy(src, dst, p0, p1)
        if self._whole:
            at = -1, END
        binding.llama_memory_seq_cp(self._memory, src, dst, at[0], _upper(at[1]))
        if self._cells is not None:
            self._cells.order.copy(src, dst, p0, p1)

    def _copies_whole(self, src: int, dst: int, p0: int, p1: int) -> bool:
        # beyond its sequences llama.cpp's caches do not check an id
        inside = max(src, dst) < self.info.n_seq_max
        return inside and p0 <= 0 and self.seq_bounds(dst) is None and (
            p1 > binding.llama_memory_seq_pos_max(self._memory, src))

    def seq_join(self, src: int, dst: int, order: int = 1) -> None:
        """Add `dst` to all cells of `src`. From then on llama.cpp refuses rows of `dst` before any
        of them.

        Cells stay in order of arrival, whatever `order` is. Raises BackendError without `gaps`.
        """
        del order
        if not self.options.gaps:
            raise BackendError("this shard was not loaded for joins; use the torch backend")
        if not self._closed():
            binding.llama_memory_seq_cp(self._memory, src, dst, -1, -1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        if self._closed():
            return
        if self._cells is None:
            binding.llama_memory_seq_keep(self._memory, seq_id)
        else:
            self._cells.keep(seq_id)

    @property
    def in_order(self) -> bool:
        """Whether each sequence's cells lie in order of position, which equal bits require.

        False without `keep_order`, or after positions far apart in one sequence.
        """
        return self._cells is not None and self._cells.order.in_order

    def seq_bounds(self, seq_id: int) -> tuple[int, int] | None:
        """Return the lowest and highest position of the id's cells; None without cells."""
        if self._closed():
            return None
        low = binding.llama_memory_seq_pos_min(self._memory, seq_id)
        high = binding.llama_memory_seq_pos_max(self._memory, seq_id)
        return None if low < 0 else (low, high)

    def use_threads(self, count: int) -> None:
        """Decode single rows with `count` threads from now on.

        Decodes of several rows, and of rows in a long text, use as many as `load` was given,
        because attention has work for all. Bits stay the same with `any_threads`.
        """
        self._few_threads = count
        self._set_threads(all_of_them=False)

    def _set_threads(self, *, all_of_them: bool) -> None:
        count = self.most_threads if all_of_them else self._few_threads
        binding.llama_set_n_threads(self._ctx, count, self.most_threads)
        self._all_at_work = all_of_them

    def close(self) -> None:
        """Release the model and its cache."""
        context, self._ctx = self._ctx, None
        model, self._model = self._model, None
        if context is not None:
            binding.llama_free(context)
        if model is not None and self._owned:
            binding.llama_model_free(model)

    def _closed(self) -> bool:
        return self._ctx is None

    def _logits(self, count: int) -> FloatArray:
        if not count:
            binding.llama_synchronize(self._ctx)
            return np.empty((0, self._n_logits), np.float32)
        source = binding.llama_get_logits(self._ctx)
        if not source:
            raise BackendError("llama.cpp gave no logits")
        place = ctypes.addressof(source.contents), count
        if place != self._place:
            memory = (ctypes.c_float * (count * self._n_logits)).from_address(place[0])
            self._seen = np.ctypeslib.as_array(memory).reshape(count, self._n_logits)
            self._place = place
        return self._seen if self.options.lend else self._seen.copy()

    def _drop(self, rows: Rows) -> None:
        """Remove exactly the cells of these rows: their positions follow all older ones. A state
        cannot be taken back, so its whole sequence goes."""
        for seq_id, first in rows.first_positions().items():
            self.seq_rm(seq_id, 0 if self.keeps_state else first, END)

    def _failure(self, status: int, rows: Rows) -> BackendError:
        # 1 and -1 leave the cache as it was; removing then could hit older cells. The others
        # come after the positions were found to continue theirs.
        if status == 1:
            return NoCells(
                f"no free cells for {len(rows)} rows in a cache of {self.info.n_ctx}; raise -c"
            )
        if status == -1:
            return BackendError(f"llama.cpp refused {len(rows)} rows: {last_log()}")
        self._drop(rows)
        return BackendError(f"llama_decode failed with status {status}: {last_log()}")


def _check_ids(name: str, n_seq_max: int, more: int) -> None:
    if n_seq_max + more > ALL_IDS:
        raise BackendError(f"{name}: a model with sliding windows or a state, or whose cells are "
                           f"saved, takes at most {ALL_IDS - more} sequences")


def _info(loaded: LoadedModel, context: Any, options: LlamaOptions, **given: Any) -> ShardInfo:
    n_ctx, model = binding.llama_n_ctx(context), loaded.handle
    return ShardInfo(
        architecture=loaded.architecture,
        n_embd=binding.llama_model_n_embd(model) * loaded.row_parts,
        # A shard from the middle has a vocabulary of one, and a note of the model's.
        n_vocab=int(metadata(model, "pipeinfer.vocab_size") or loaded.n_tokens),
        n_ctx=n_ctx,
        weight_bytes=binding.llama_model_size(model),
        cache_bytes=cache_bytes(loaded, n_ctx, options),
        **given,
    )


def _upper(p1: int) -> int:
    """llama.cpp's end of a range."""
    return -1 if p1 >= END else p1
