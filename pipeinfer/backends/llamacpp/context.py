"""What pipeinfer uses of the llama.cpp library besides decoding: start, log, options, loading, and
what a loaded model needs: ids, the eval callback, rows of a trial.

Module state is llama.cpp's own one-time initialisation and its log callback. Independent of rows,
cache operations and shards.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, structs

from pipeinfer.backends.base import ALL_IDS
from pipeinfer.backends.llamacpp import eval_callback
from pipeinfer.backends.llamacpp.eval_callback import EvalCallback, ExpertSum, Routers
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.host import free_memory, physical_memory
from pipeinfer.llama import binding, stream
from pipeinfer.llama.library import clear_log, gpus, has_gpu, last_log, model_params
from pipeinfer.llama.loader import find_library
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import has_two_rotations, kv_heads, original_context
from pipeinfer.models.llama_rules import check_file
from pipeinfer.models.repacking import may_repack
from pipeinfer.models.shard import ShardSource

#: ggml's number, and bytes per block of 32 (1 for plain types), of each type a cache may have
CACHE_TYPES = {
    "f32": (0, 4, 1),
    "f16": (1, 2, 1),
    "bf16": (30, 2, 1),
    "q8_0": (8, 34, 32),
    "q5_1": (7, 24, 32),
    "q5_0": (6, 22, 32),
    "q4_1": (3, 20, 32),
    "q4_0": (2, 18, 32),
    "iq4_nl": (20, 18, 32),
}
FLASH = {"auto": -1, "off": 0, "on": 1}
_LOAD_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
_FAR = 1 << 30  #: more cells than a cache has
_CHUNK = 8 << 20  #: bytes that are read ahead at a time
LoadProgress = Callable[[str, float], object]
_REPORT = 0.25  #: seconds between two reports of the share that is loaded


class LlamaOptions(Struct, frozen=True):
    """How llama.cpp runs a shard; names follow its own flags.

    n_gpu_layers (-ngl): layers of this shard to offload, -1 all
    type_k, type_v (-ctk, -ctv): see CACHE_TYPES; with "auto", and so flash_attn: what makes logits
    independent of other rows, see `resolved`
    n_ubatch: 0: n_batch, which stopping inside a decode needs
    numa: llama.cpp's --numa
    layer_callbacks: whether `decode` may be stopped inside; a whole model without it has no cost of
        callbacks (a shard that is not the last always has)
    keep_order: whether cells stay in order, see `cells`
    streams: whether each sequence has a part of the cache for itself, see `padded`; not with a
        state, sliding windows or gaps
    repack: whether weights are rearranged for faster kernels; "auto": wherever that is safe
    gaps: whether the file is one that `models.gaps` made, whose positions may leave gaps
    lend: whether logits that `decode` returns are llama.cpp's own memory, which the next decode
        overwrites
    head: whether the file is a head of the target, whose rows have a token and a hidden row
    own_prompts: whether our kernels may multiply long runs, for the whole process
    saves: whether cells can be saved and put back, see `saving.CellSaver`; not with streams or
        gaps, nor on a GPU
    text: most positions of a text, by which a model with two sets of rotation factors chooses one;
        0: by the cells of the cache, as llama.cpp does
    huge_pages: whether to copy mapped weights, see `huge_pages.into_huge_pages`; only with
        use_mmap, and without use_mlock, numa and layers on a GPU
    """

    n_gpu_layers: int = 0
    type_k: str = "auto"
    type_v: str = "auto"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    n_ubatch: int = 0
    use_mmap: bool = True
    use_mlock: bool = False
    huge_pages: bool = True
    own_prompts: bool = True
    saves: bool = False
    text: int = 0
    numa: Literal["", "distribute", "isolate", "numactl"] = ""
    layer_callbacks: bool = True
    keep_order: bool = True
    streams: bool = False
    repack: Literal["auto", "on", "off"] = "auto"
    gaps: bool = False
    lend: bool = False
    head: Literal["", "mtp", "eagle3", "dflash"] = ""

    @property
    def on_cpu(self) -> bool:
        """Whether the processor computes: no layers are offloaded, or there is no GPU."""
        return self.n_gpu_layers == 0 or not has_gpu()

    def resolved(self, head_size: int, key_size: int = 0, *, one_type: bool = False
                 ) -> LlamaOptions:
        """Return these options with every "auto" of the cache decided.

        head_size: elements of a head's values
        key_size: elements of a head's keys; 0: as many
        one_type: whether llama.cpp needs keys and values of one type (`latent`)

        On a CPU the choice is flash attention over q8_0 keys and values, which `short_attention.c`
        computes; float16 keys and bfloat16 values where q8_0 does not fit the heads. Both that
        kernel and llama.cpp's process every row by itself, cell by cell, and skip cells that the
        row does not attend to; so a row's logits do not depend on other rows, on holes, or on the
        place of its sequence in the cache. Without flash attention two rows use another kernel than
        one. Where keys and values are both float16, or both float32, one row beyond 512 cells is
        split over threads, and chunks of 64 rows are tiled.
        """
        on_cpu = self.on_cpu
        flash, kind_k, kind_v = self.flash_attn, self.type_k, self.type_v
        if flash == "auto" and on_cpu:
            flash = "on"
        treats_rows_alone = on_cpu and flash == "on"
        if one_type and kind_k == "auto":
            kind_k = kind_v
        if kind_k == "auto":
            fits = (key_size or head_size) % 32 == 0
            kind_k = "q8_0" if treats_rows_alone and fits else "f16"
        if one_type and kind_v == "auto":
            kind_v = kind_k
        if kind_v == "auto":
            exact = "q8_0" if head_size % 32 == 0 else "bf16"
            kind_v = exact if treats_rows_alone else "f16"
        return structs.replace(self, flash_attn=flash, type_k=kind_k, type_v=kind_v)

    def exact_limit(self, n_ctx: int, n_threads: int) -> int:
        """Return the most rows that attention (not the matrices) processes as it does one; see
        `resolved`.

        For offloaded layers there is no bound here: it has to be measured.
        """
        many = 1 << 16
        if not self.on_cpu:
            return many
        if self.flash_attn == "off":
            return 1
        splits = self.type_k == self.type_v and self.type_k in ("f16", "f32") \
            and n_threads > 1 and n_ctx >= 512
        return 1 if splits else many


def check_sizes(
    n_ctx: int, n_seq_max: int, n_batch: int, n_threads: int, options: LlamaOptions
) -> None:
    """Raise BackendError for impossible sizes or cache types."""
    for what, value, top in (
        ("context", n_ctx, 2**30),
        ("number of sequences", n_seq_max, ALL_IDS),
        ("batch", n_batch, 2**20),
        ("number of threads", n_threads, 512),
    ):
        if not 0 < value <= top:
            raise BackendError(f"a {what} of {value}: it must be from 1 to {top}")
    for flag, kind in (("-ctk", options.type_k), ("-ctv", options.type_v)):
        if kind != "auto" and kind not in CACHE_TYPES:
            raise BackendError(f"{flag} {kind}: choose from {', '.join(CACHE_TYPES)}")


def load_model(source: str | os.PathLike[str] | ShardSource, options: LlamaOptions,
               progress: LoadProgress = lambda _, __: None) -> Any:
    """Load a model.

    source: its path; or a shard that is read from the file of the whole model
    progress: called with the phase, "reading" or "loading", and the share of it that is done, 0 to
        1, some times a second at most; an exception that it raises ends the loading and is raised.
    Raises ModelError with llama.cpp's reason where loading fails.
    """
    clear_log()
    params = model_params(options.n_gpu_layers)
    params.load_mtp = options.head == "mtp"
    watch = _LoadWatch(progress)
    params.progress_callback = ctypes.cast(watch.callback, ctypes.c_void_p).value
    params.load_mode = int(options.use_mmap) + 2 * int(options.use_mlock)
    path = source.model.path if isinstance(source, ShardSource) else source
    if not os.path.exists(path):
        raise ModelError(f"{os.fspath(path)}: no such file")
    file = check_file(path, head=options.head == "mtp")
    params.use_extra_bufts = options.repack == "on" or (
        options.repack == "auto" and may_repack(file))
    overrides = _rotation(file, options.text)
    if overrides is not None:
        params.kv_overrides = ctypes.addressof(overrides)
    if isinstance(source, ShardSource):
        params.load_mode = 2 * int(options.use_mlock)  # a stream cannot be mapped
        params.progress_callback = None  # what has passed says more
        model = _from_stream(source, params, watch)
    else:
        if options.use_mmap:
            read_ahead(file.paths, watch.progress)
        model = binding.llama_model_load_from_file(os.fsencode(path), params)
    if watch.error is not None:
        if model:
            binding.llama_model_free(model)
        raise watch.error
    if not model:
        raise ModelError(f"{os.fspath(path)}: llama.cpp cannot load it: {last_log()}")
    return model


def _rotation(file: ModelFile, text: int) -> Any:
    """Return llama.cpp's overrides with which a model uses the rotation factors for texts of `text`
    positions; None where there is no choice.

    llama.cpp compares the cells of the cache with the original context. Cells depend on the number
    of requests and on speculation, on which no token may depend.
    """
    if not text or not has_two_rotations(file):
        return None
    chosen = 1 if text > original_context(file) else _FAR
    overrides = (binding.llama_model_kv_override * 2)()
    overrides[0].key = f"{file.architecture}.{keys.ORIGINAL_CONTEXT}".encode()
    overrides[0].val_i64 = chosen
    return overrides


def _from_stream(source: ShardSource, params: Any, watch: _LoadWatch) -> Any:
    """Load a shard as `llama_model_load_from_file` loads its file. Raises ModelError for a file
    that cannot be read."""
    with closing(source.opened()) as composed, stream.opened(composed, lambda share: watch.progress(
            "loading", share)) as opened:
        model = binding.llama_model_load_from_file_ptr(opened.file, params)
        if opened.error is not None:
            if model:
                binding.llama_model_free(model)
            raise opened.error
    return model


class _LoadWatch:
    """llama.cpp's callback while it loads; error: what `progress` raised."""

    def __init__(self, progress: LoadProgress) -> None:
        self.error: BaseException | None = None
        self._progress, self._next = progress, 0.0
        self.callback = _LOAD_CALLBACK(self._call)

    def progress(self, phase: str, share: float) -> None:
        """Report a share, unless the last report was just now."""
        if time.monotonic() >= self._next:
            self._progress(phase, share)
            self._next = time.monotonic() + _REPORT

    def _call(self, share: float, _data: int | None) -> bool:
        try:
            self.progress("loading", share)
        except BaseException as error:  # an exception cannot cross C
            self.error = error
            return False
        return True


def read_ahead(paths: Sequence[Path], progress: LoadProgress) -> int:
    """Read files into the system's cache, as far as they are not there; return the bytes read.

    llama.cpp maps them, which blocks until all of a slow disk is read, without a report. Files that
    the free memory cannot hold are left alone.
    """
    total = sum(path.stat().st_size for path in paths)
    if total > free_memory() or not hasattr(os, "RWF_NOWAIT"):
        return 0
    into, before, found = memoryview(bytearray(_CHUNK)), 0, 0
    for path in paths:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            for at in range(0, size, _CHUNK):
                if not _is_cached(file.fileno(), at, min(at + _CHUNK, size) - 1):
                    found += os.preadv(file.fileno(), [into], at)
                    progress("reading", (before + min(at + _CHUNK, size)) / total)
        before += size
    return found


def _is_cached(file: int, *places: int) -> bool:
    """Whether the bytes at these places are in the system's cache; True where it does not say."""
    one = bytearray(1)
    try:
        return all(os.preadv(file, [one], at, os.RWF_NOWAIT) == 1 for at in places)
    except BlockingIOError:
        return False
    except OSError:
        return True


def make_context(
    name: str,
    loaded: LoadedModel,
    callback: EvalCallback | None,
    sizes: tuple[int, int, int, int],
    options: LlamaOptions,
) -> Any:
    """Make a context with a cache for a loaded model.

    name: for error messages
    callback: llama.cpp's eval callback of the context; None: it gets none
    sizes: n_ctx, n_seq_max, n_batch and n_threads
    options: resolved ones
    Raises BackendError where the cache does not fit, or llama.cpp refuses it.
    """
    clear_log()
    model = loaded.handle
    n_ctx, n_seq_max, n_batch, n_threads = sizes
    n_batch = max(n_batch, n_seq_max)  # fewer rows than sequences: llama.cpp aborts the process
    params = binding.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = n_ctx, n_batch, n_seq_max
    params.n_ubatch = options.n_ubatch or n_batch
    params.n_threads = params.n_threads_batch = n_threads
    params.type_k, params.type_v = CACHE_TYPES[options.type_k][0], CACHE_TYPES[options.type_v][0]
    params.flash_attn_type = FLASH[options.flash_attn]
    # only in one part for all does seq_cp leave the values where they are
    params.kv_unified = not options.streams
    params.offload_kqv = params.op_offload = options.n_gpu_layers != 0
    params.no_perf = True
    params.ctx_type = int(options.head == "mtp")
    if callback is not None:
        params.cb_eval, params.cb_eval_user_data = callback.function, callback.data
    # llama.cpp clears the cache, so the OOM killer would end the process at one that is too large.
    wanted = cache_bytes(loaded, n_ctx, options)
    memory, where = physical_memory(), "this machine"
    if not options.on_cpu:
        there = sum(one.free for one in gpus())
        every = not 0 <= options.n_gpu_layers < binding.llama_model_n_layer(model)
        memory, where = (there, "the GPU") if every else (there + memory, "this machine, the GPU")
    if wanted > memory:
        raise BackendError(
            f"{name}: a cache of {n_ctx} cells takes {wanted / 1e9:.0f} GB, but {where} has "
            f"{memory / 1e9:.0f} GB; lower -c{' or --parallel' if options.streams else ''}"
        )
    context = binding.llama_init_from_model(model, params)
    if not context:
        raise BackendError(
            f"{name}: cannot make a cache of {n_ctx} cells of {options.type_k} and "
            f"{options.type_v} for {n_seq_max} sequences (-c, -ctk, -ctv): {last_log()}"
        )
    return context


def head_size(model: Any, part: Literal["key", "value"] = "value") -> int:
    """Return the elements of one attention head's key or value."""
    architecture = metadata(model, "general.architecture")
    default = binding.llama_model_n_embd(model) // max(1, binding.llama_model_n_head(model))
    return int(metadata(model, f"{architecture}.attention.{part}_length") or default)


def latent(model: Any) -> bool:
    """Return whether the cache holds one latent vector per token, with keys and values as views of
    it.
    """
    architecture = metadata(model, "general.architecture")
    return bool(metadata(model, f"{architecture}.attention.value_length_mla"))


def metadata(model: Any, key: str) -> str:
    """Return a metadata value as text; empty if there is none."""
    buffer = ctypes.create_string_buffer(256)
    length = binding.llama_model_meta_val_str(model, key.encode(), buffer, 256)
    return buffer.value.decode() if length >= 0 else ""


def cache_bytes(loaded: LoadedModel, n_ctx: int, options: LlamaOptions) -> int:
    """Return the bytes of a cache of `n_ctx` cells with these (resolved) options."""
    total = 0
    parts: tuple[tuple[Literal["key", "value"], str], ...] = (
        ("key", options.type_k), ("value", options.type_v))
    for part, kind in parts[:1 if latent(loaded.handle) else 2]:
        _, size, block = CACHE_TYPES[kind]
        total += loaded.kv_heads * head_size(loaded.handle, part) * size // block
    return total * n_ctx


_WITH_WINDOWS = 2  #: further sequence ids that a model with sliding windows needs


def _kv_heads(handle: Any, source: ModelFile | ShardSource | None) -> int:
    """The KV heads of all layers. llama.cpp tells those of the first; others may have none."""
    if source is None:
        return int(binding.llama_model_n_head_kv(handle) * binding.llama_model_n_layer(handle))
    if isinstance(source, ShardSource):  # its file has the layers of other stages, too
        return sum(kv_heads(source.model)[slice(*source.layers)])
    return sum(kv_heads(source))


class LoadedModel:
    """A model, a shard or a slice; head: or a head that drafts.

    source: what it was loaded from; None: not known. kv_heads: of all layers together. handle:
    llama.cpp's. own: its architecture's declaration. keeps_state: whether its layers have a state
    of the text so far. n_tokens: of the file's vocabulary; a slice of the output matrix has a part.
    row_parts: rows of the model's width that cross a cut for each token. enters, again: whether
    callbacks put rows in, and once more. further_ids: sequence ids that it needs besides those of
    the rows and the grave.
    """

    def __init__(self, handle: Any, source: ModelFile | ShardSource | None = None, *,
                 head: bool = False) -> None:
        self.handle, self._head = handle, head
        self.kv_heads = _kv_heads(handle, None if head else source)
        self.architecture = metadata(handle, "general.architecture")
        self.own = own = declared(self.architecture)
        self.is_slice = bool(metadata(handle, "pipeinfer.piece"))
        self.has_experts = int(metadata(handle, f"{self.architecture}.expert_count") or 0) > 0
        self.has_windows = not head and bool(binding.llama_model_n_swa(handle) > 0)
        self.keeps_state = not head and (own.copied_whole or bool(
            binding.llama_model_is_recurrent(handle) or binding.llama_model_is_hybrid(handle)))
        self.n_tokens = int(binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(handle)))
        self.row_parts = own.row_parts(lambda key: metadata(handle, f"{self.architecture}.{key}"))
        self.enters = bool(own.entry) and not head
        self.again = bool(own.reads_again) and not head and self.row_parts > 1
        self.further_ids = 0 if own.copied_whole else (
            _WITH_WINDOWS * self.has_windows + self.keeps_state)

    def nothing(self, n_seq_max: int) -> int | None:
        """Return the id that never holds anything, whose copy lets a state go; None without
        states."""
        return n_seq_max + self.further_ids if self.keeps_state else None

    @property
    def has_ranges(self) -> bool:
        """Whether a part of a sequence has cells that can be copied: all but pure states have."""
        return not (self._head or self.own.copied_whole
                    or binding.llama_model_is_recurrent(self.handle))

    def resolved(self, options: LlamaOptions) -> LlamaOptions:
        """Return the options with every "auto" of the cache decided, and no streams where the model
        allows none."""
        options = options.resolved(head_size(self.handle), head_size(self.handle, "key"),
                                   one_type=latent(self.handle))
        return structs.replace(options, streams=False) if self.further_ids or options.gaps \
            else options

    def chooses_experts(self, file: ModelFile, options: LlamaOptions) -> bool:
        """Return whether pipeinfer's own code computes the routers of this mixture."""
        return self.has_experts and not self._head and options.on_cpu \
            and eval_callback.single_row_dot() is not None and eval_callback.of_floats(file)

    def most_rows(self, *, chooses_experts: bool) -> int:
        """Return the most rows of a trial that this kind of model allows."""
        if self.own.one_sequence:
            return 1  # a trial has several sequences
        if not self.has_experts:
            return 1 << 16
        # A short trial seldom detects that a router's product depends on the number of rows:
        # quantisation hides most differences
        return eval_callback.MOST_ROWS if chooses_experts else 1

    def _expert_sum(self) -> ExpertSum:
        """Return where the experts of a slice are summed."""
        if not (self.is_slice and self.has_experts):
            return ExpertSum.NONE
        shared = int(metadata(self.handle, "pipeinfer.shared_expert") or 0)
        return ExpertSum.SHARED if shared else ExpertSum.ALONE

    def callback(self, source: str | os.PathLike[str] | Routers | None, layers: tuple[int, int],
              options: LlamaOptions, *, last: bool, chooses_experts: bool, kind: type[EvalCallback]
              ) -> EvalCallback | None:
        """Return the callbacks that this shard needs; None for one that runs without any.

        source: the routers of a slice with some of the experts, or the file that they are read from
        """
        own = self.own
        pools = last and int(metadata(self.handle, f"{self.architecture}.pooling_type") or 0) > 0
        if self._head and not self.is_slice:
            return None
        if last and not (self.is_slice or own.entry or options.layer_callbacks or chooses_experts
                         or pools):
            return None
        count = layers[1] - layers[0]
        older = own.older_output and find_library().compiled
        output = own.older_output if older else own.output
        inner = "%d" not in output and count < binding.llama_model_n_layer(self.handle)
        callback = kind(count - 1, layers[0], own.entry, "l_out-%d" if inner else output)
        if self.again:
            callback.enter_again(own.reads_again)
        callback.sum_experts_at(self._expert_sum())
        if metadata(self.handle, "pipeinfer.experts"):
            if not chooses_experts:
                raise BackendError("slices with whole experts need layers on the processor and "
                                   "routers in float32: use fewer slices")
            assert source is not None
            callback.select_among(source if isinstance(source, Routers) else Routers(source))
        elif chooses_experts:
            callback.choose_experts_row_by_row()
        return callback
