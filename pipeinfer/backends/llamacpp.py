"""Runs a GGUF shard with the released llama-cpp-python, through its C interface.

llama.cpp has no call for "layers a to b": a shard is a model of its own (`models.shard`), takes the
previous shard's residual stream as embedding rows, and gives its own back through the scheduler's
callback, which also is where a decode is stopped at a layer boundary.

Knows nothing about runs, ranks or which layers belong where, and does not cut shards. Module state
is llama.cpp's one-time initialisation and its log callback; several backends may live in one
process, each used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import llama_cpp
import numpy as np
from llama_cpp import _ggml

from pipeinfer.backends.base import Capabilities, ShardInfo
from pipeinfer.core import ALL_SEQS, END, FloatArray, Rows
from pipeinfer.errors import BackendError, ModelError

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
_FLASH = {"auto": -1, "off": 0, "on": 1}
_NUMA = {"": 0, "distribute": 1, "isolate": 2, "numactl": 3}
MAX_SEQS = 256  #: llama.cpp's LLAMA_MAX_SEQ

_log_lines = threading.local()


def _log(level: int, text: bytes, _data: int | None) -> None:
    """Keep the last warnings and errors of this thread, for messages; print nothing."""
    if level in (3, 4):  # warn, error
        if not hasattr(_log_lines, "kept"):
            _log_lines.kept = deque(maxlen=6)
        _log_lines.kept.append((level, text.decode("utf-8", "replace").strip()))


_log_callback = llama_cpp.llama_log_callback(_log)  # referenced for ever: llama.cpp calls it
_init_lock = threading.Lock()
_initialised: list[str] = []


def ensure_llama(numa: str = "") -> None:
    """Initialise llama.cpp once per process and silence its log. `numa`: the first caller's."""
    with _init_lock:
        if _initialised:
            return
        llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        if numa:
            llama_cpp.llama_numa_init(_NUMA[numa])
        _initialised.append(numa)


def clear_log() -> None:
    """Forget what llama.cpp logged in this thread."""
    _log_lines.kept = deque(maxlen=6)


def last_log() -> str:
    """The last thing that llama.cpp complained about in this thread, in one line."""
    kept = list(getattr(_log_lines, "kept", ()))
    errors = [text for level, text in kept if level == 4] or [text for _, text in kept]
    # The last line often only says that loading failed; the first error says why.
    return errors[0] if errors else "llama.cpp gave no reason"


def _bind(name: str, restype: Any, argtypes: list[Any]) -> Any:  # noqa: ANN401
    function = getattr(_ggml.libggml, name)
    function.restype, function.argtypes = restype, argtypes
    return function


_get_name = _bind("ggml_get_name", ctypes.c_char_p, [ctypes.c_void_p])
_nbytes = _bind("ggml_nbytes", ctypes.c_size_t, [ctypes.c_void_p])
_tensor_get = _bind(
    "ggml_backend_tensor_get",
    None,
    [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t],
)


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How llama.cpp runs a shard; names follow its own flags.

    n_gpu_layers (-ngl): layers of this shard to offload, -1 all. type_k, type_v (-ctk, -ctv): see
    CACHE_TYPES. flash_attn: a quantised V cache needs it on. n_ubatch: 0 takes n_batch, which
    cancellation inside a decode needs. layer_callbacks: whether `decode` may be stopped inside; a
    whole model without it pays no callback at all (a shard that is not the last always pays).
    validate: check the rules about sequence ids that llama.cpp does not check (slower; tests).
    """

    n_gpu_layers: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    n_ubatch: int = 0
    use_mmap: bool = True
    use_mlock: bool = False
    numa: Literal["", "distribute", "isolate", "numactl"] = ""
    layer_callbacks: bool = True
    validate: bool = False


class _Probe:
    """The scheduler's callback: takes the hidden rows out, and asks whether to stop.

    llama.cpp calls it twice per tensor: `ask` - do you want it (the graph is cut there) - and,
    when wanted, once the tensor is computed; answering False then ends the graph.
    """

    def __init__(self, last_layer: int, keep_hidden: bool) -> None:
        self.last_name = b"l_out-%d" % last_layer
        self.keep_hidden = keep_hidden
        self.should_stop: Callable[[], bool] | None = None
        self.hidden: FloatArray | None = None
        self.hidden_done = self.stopped = False
        self.error: BaseException | None = None
        self.callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._call)

    def arm(self, should_stop: Callable[[], bool] | None, hidden: FloatArray | None) -> None:
        self.should_stop, self.hidden = should_stop, hidden
        self.hidden_done = self.stopped = False
        self.error = None

    def _call(self, tensor: int, ask: bool, _data: int | None) -> bool:
        try:
            if self.should_stop is None and self.hidden is None:
                return False
            name = _get_name(tensor)
            if ask:
                if not name.startswith(b"l_out-"):
                    return False
                return self.should_stop is not None or name == self.last_name
            if name == self.last_name and self.hidden is not None:
                if _nbytes(tensor) != self.hidden.nbytes:
                    raise BackendError(
                        f"{name.decode()} has {_nbytes(tensor)} bytes, {self.hidden.nbytes} "
                        "expected"
                    )
                _tensor_get(tensor, self.hidden.ctypes.data, 0, self.hidden.nbytes)
                self.hidden_done = True
                return False  # norm and head of a shard that is not the last never run
            if self.should_stop is not None and self.should_stop():
                self.stopped = True
                return False
        except BaseException as error:  # an exception can not cross C: re-raised after the decode
            self.error = error
            return False
        return True


class LlamaCppBackend:
    """One shard, or a whole model, on llama.cpp. See `backends.base.Backend` for the contract."""

    def __init__(self, model: Any, context: Any, probe: _Probe | None, info: ShardInfo,  # noqa: ANN401, PLR0913
                 options: LlamaOptions) -> None:
        self._model, self._ctx, self._probe = model, context, probe
        self._memory = llama_cpp.llama_get_memory(context)
        self.info, self.options = info, options
        self.capabilities = Capabilities(
            free_positions=False,
            separate_views=False,
            embedding_rows=True,
            stops_inside=probe is not None and options.layer_callbacks,
        )
        n = info.n_batch
        # The columns of llama_batch, allocated once; numpy fills them, llama.cpp reads them.
        self._tokens = np.zeros(n, np.int32)
        self._positions = np.zeros(n, np.int32)
        self._n_ids = np.zeros(n, np.int32)
        self._ids = np.zeros((n, info.n_seq_max), np.int32)
        self._id_rows = (self._ids.ctypes.data + self._ids.strides[0] * np.arange(n)).astype(
            np.uintp
        )
        self._flags = np.zeros(n, np.int8)
        batch = llama_cpp.llama_batch()
        ctypes.memset(ctypes.byref(batch), 0, ctypes.sizeof(batch))
        for field, array in (
            ("pos", self._positions),
            ("n_seq_id", self._n_ids),
            ("seq_id", self._id_rows),
            ("logits", self._flags),
        ):
            setattr(batch, field, _pointer(batch, field, array.ctypes.data))
        self._batch = batch
        self._token_pointer = _pointer(batch, "token", self._tokens.ctypes.data)

    @classmethod
    def load(  # noqa: PLR0913
        cls,
        path: str | os.PathLike[str],
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
    ) -> LlamaCppBackend:
        """Load the file at `path` (a shard, or a whole model) with a cache of `n_ctx` cells.

        layers: which of the whole model's `n_layers_total` layers the file holds. n_ctx is
        rounded up to a multiple of 256 by llama.cpp; `info` has what it became. Raises ModelError
        when the file can not be loaded, BackendError when the cache can not be made.
        """
        options = options or LlamaOptions()
        _check_sizes(n_ctx, n_seq_max, n_batch, n_threads, options)
        ensure_llama(options.numa)
        model = _load_model(path, options)
        try:
            n_layers = llama_cpp.llama_model_n_layer(model)
            if n_layers != layers[1] - layers[0]:
                raise ModelError(
                    f"{os.fspath(path)}: has {n_layers} layers, not those from {layers[0]} to "
                    f"{layers[1]}"
                )
            needs_probe = not last or options.layer_callbacks
            probe = _Probe(n_layers - 1, not last) if needs_probe else None
            sizes = (n_ctx, n_seq_max, n_batch, n_threads)
            context = _make_context(path, model, probe, sizes, last, options)
        except BaseException:
            llama_cpp.llama_model_free(model)
            raise
        architecture = _meta(model, "general.architecture")
        vocab = llama_cpp.llama_model_get_vocab(model)
        n_vocab = int(_meta(model, "pipeinfer.vocab_size") or llama_cpp.llama_vocab_n_tokens(vocab))
        info = ShardInfo(
            architecture=architecture,
            layers=layers,
            n_layers_total=n_layers_total,
            first=first,
            last=last,
            n_embd=llama_cpp.llama_model_n_embd(model),
            n_vocab=n_vocab,
            n_ctx=llama_cpp.llama_n_ctx(context),
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            weight_bytes=llama_cpp.llama_model_size(model),
            cache_bytes=_cache_bytes(model, llama_cpp.llama_n_ctx(context), options),
        )
        return cls(model, context, probe, info, options)

    def decode(
        self,
        rows: Rows,
        hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """See `Backend.decode`. A hidden row on the first shard is an embedding row."""
        n, info = len(rows), self.info
        if self._ctx is None:
            raise BackendError("decode on a closed backend")
        if not 0 < n <= info.n_batch:
            raise BackendError(f"a decode of {n} rows; this backend takes 1 to {info.n_batch}")
        if self.options.validate:
            check_rows(rows, info.n_seq_max)
        keep = self._fill(rows, hidden)
        out = None if info.last else np.empty((n, info.n_embd), np.float32)
        probe = self._probe
        if probe is not None:
            probe.arm(should_stop if self.options.layer_callbacks else None, out)
        taken = False
        status = llama_cpp.llama_decode(self._ctx, self._batch)
        del keep
        if probe is not None:
            error, stopped, taken = probe.error, probe.stopped, probe.hidden_done
            probe.arm(None, None)  # holds neither the caller's array nor its callback
            if error is not None or stopped:
                if status == 0:
                    self._drop(rows)
                if error is not None:
                    raise error
                return None
        if status != 0:
            raise self._failure(status, rows)
        if out is not None:
            if not taken:
                self._drop(rows)
                raise BackendError("the shard's graph has no l_out tensor; it can not be split")
            return out
        return self._logits(int(np.count_nonzero(rows.outputs)))

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """See `Backend.seq_rm`."""
        upper = -1 if p1 >= END else p1
        if p0 < p1:
            # -1 is llama.cpp's word for every id, too
            llama_cpp.llama_memory_seq_rm(self._memory, seq_id, p0, upper)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """See `Backend.seq_cp`. With `validate`, copying onto positions that `dst` has raises."""
        if p0 >= p1 or src == dst:
            return
        if self.options.validate:
            low = llama_cpp.llama_memory_seq_pos_min(self._memory, dst)
            high = llama_cpp.llama_memory_seq_pos_max(self._memory, dst)
            if low >= 0 and low < p1 and high >= p0:
                raise BackendError(
                    f"seq_cp {src} -> {dst} over [{p0}, {p1}): {dst} has cells up to {high}"
                )
        llama_cpp.llama_memory_seq_cp(self._memory, src, dst, p0, -1 if p1 >= END else p1)

    def seq_keep(self, seq_id: int) -> None:
        """See `Backend.seq_keep`."""
        llama_cpp.llama_memory_seq_keep(self._memory, seq_id)

    def seq_bounds(self, seq_id: int) -> tuple[int, int] | None:
        """Lowest and highest position of the id's cells, None without cells."""
        low = llama_cpp.llama_memory_seq_pos_min(self._memory, seq_id)
        high = llama_cpp.llama_memory_seq_pos_max(self._memory, seq_id)
        return None if low < 0 else (low, high)

    def close(self) -> None:
        """See `Backend.close`."""
        context, self._ctx = self._ctx, None
        model, self._model = self._model, None
        if context is not None:
            llama_cpp.llama_free(context)
        if model is not None:
            llama_cpp.llama_model_free(model)

    def _fill(self, rows: Rows, hidden: FloatArray | None) -> FloatArray | None:
        """Put the rows into the batch; returns the array that must outlive the decode."""
        n, info, batch = len(rows), self.info, self._batch
        for i, ids in enumerate(rows.seq_ids):
            if len(ids) == 1:
                self._ids[i, 0] = ids[0]
                self._n_ids[i] = 1
            else:
                if not 0 < len(ids) <= info.n_seq_max:
                    raise BackendError(f"row {i} has {len(ids)} sequence ids")
                self._ids[i, : len(ids)] = ids
                self._n_ids[i] = len(ids)
        self._positions[:n] = rows.positions
        batch.n_tokens = n
        # Not the last: every row is an output, or the last layer would keep flagged rows only.
        self._flags[:n] = rows.outputs if info.last else 1
        if hidden is None:
            if not info.first:
                raise BackendError("this shard needs the previous shard's hidden rows")
            self._tokens[:n] = rows.tokens
            batch.token, batch.embd = self._token_pointer, None
            return None
        if hidden.shape != (n, info.n_embd):
            raise BackendError(f"hidden rows of shape {hidden.shape}, not ({n}, {info.n_embd})")
        keep = np.ascontiguousarray(hidden, np.float32)
        batch.token = None
        batch.embd = _pointer(batch, "embd", keep.ctypes.data)
        return keep

    def _logits(self, count: int) -> FloatArray:
        out = np.empty((count, self.info.n_vocab), np.float32)
        if count:
            source = llama_cpp.llama_get_logits(self._ctx)
            if not source:
                raise BackendError("llama.cpp gave no logits")
            ctypes.memmove(out.ctypes.data, source, out.nbytes)
        else:
            llama_cpp.llama_synchronize(self._ctx)
        return out

    def _drop(self, rows: Rows) -> None:
        """Remove exactly the cells of these rows: their positions follow all older ones."""
        for seq_id, first in rows.first_positions().items():
            llama_cpp.llama_memory_seq_rm(self._memory, seq_id, first, -1)

    def _failure(self, status: int, rows: Rows) -> BackendError:
        # 1 and -1 leave the cache as it was; removing then could hit older cells. The others
        # come after the positions were found to continue theirs.
        if status == 1:
            return BackendError(
                f"no free cells for {len(rows)} rows in a cache of {self.info.n_ctx}; raise -c"
            )
        if status == -1:
            return BackendError(f"llama.cpp refused {len(rows)} rows: {last_log()}")
        self._drop(rows)
        return BackendError(f"llama_decode failed with status {status}: {last_log()}")


def _pointer(batch: Any, field: str, address: int) -> Any:  # noqa: ANN401
    kind = dict(batch._fields_)[field]
    return ctypes.cast(address, kind)


def check_rows(rows: Rows, n_seq_max: int) -> None:
    """Raise BackendError when rows break a rule that llama.cpp does not check.

    An id holds one row per position; and the ids of a row are a subset of those of every earlier
    row that shares one of them, or the row reads through its first id what the others never held.
    """
    seen: set[tuple[int, int]] = set()
    earlier: list[set[int]] = []
    for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
        own = set(ids)
        if not own or len(own) != len(ids) or min(own) < 0 or max(own) >= n_seq_max:
            raise BackendError(f"row {i} has bad sequence ids {ids}")
        for seq_id in ids:
            if (seq_id, pos) in seen:
                raise BackendError(f"row {i} is a second row of id {seq_id} at position {pos}")
            seen.add((seq_id, pos))
        for other in earlier:
            if own & other and not own <= other:
                raise BackendError(f"row {i}: ids {ids} were apart in an earlier row")
        earlier.append(own)


def _check_sizes(
    n_ctx: int, n_seq_max: int, n_batch: int, n_threads: int, options: LlamaOptions
) -> None:
    for what, value, top in (
        ("context", n_ctx, 2**30),
        ("number of sequences", n_seq_max, MAX_SEQS),
        ("batch", n_batch, 2**20),
        ("number of threads", n_threads, 512),
    ):
        if not 0 < value <= top:
            raise BackendError(f"a {what} of {value} is not between 1 and {top}")
    for flag, kind in (("-ctk", options.type_k), ("-ctv", options.type_v)):
        if kind not in CACHE_TYPES:
            raise BackendError(f"{flag} {kind}: not one of {', '.join(CACHE_TYPES)}")


def _load_model(path: str | os.PathLike[str], options: LlamaOptions) -> Any:  # noqa: ANN401
    clear_log()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = options.n_gpu_layers
    params.load_mode = int(options.use_mmap) + 2 * int(options.use_mlock)
    # With AMX, repacked quantised weights crash at two rows or more (llama.cpp issue 20824).
    params.use_extra_bufts = False
    if not os.path.exists(path):
        raise ModelError(f"{os.fspath(path)}: no such file")
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelError(f"{os.fspath(path)}: llama.cpp can not load it: {last_log()}")
    return model


def _make_context(  # noqa: PLR0913
    path: str | os.PathLike[str],
    model: Any,  # noqa: ANN401
    probe: _Probe | None,
    sizes: tuple[int, int, int, int],
    last: bool,
    options: LlamaOptions,
) -> Any:  # noqa: ANN401
    clear_log()
    n_ctx, n_seq_max, n_batch, n_threads = sizes
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = n_ctx, n_batch, n_seq_max
    params.n_ubatch = options.n_ubatch or n_batch
    params.n_threads = params.n_threads_batch = n_threads
    params.type_k, params.type_v = CACHE_TYPES[options.type_k][0], CACHE_TYPES[options.type_v][0]
    params.flash_attn_type = _FLASH[options.flash_attn]
    params.kv_unified = True  # only then does seq_cp leave the values where they are
    params.offload_kqv = params.op_offload = options.n_gpu_layers != 0
    params.no_perf = True
    if probe is not None:
        params.cb_eval = probe.callback
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise BackendError(
            f"{os.fspath(path)}: no context of {n_ctx} cells and {n_seq_max} sequences "
            f"(-c, -b): {last_log()}"
        )
    return context


def _meta(model: Any, key: str) -> str:  # noqa: ANN401
    """A metadata value as text, empty without one."""
    buffer = ctypes.create_string_buffer(256)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, 256)
    return buffer.value.decode() if length >= 0 else ""


def _cache_bytes(model: Any, n_ctx: int, options: LlamaOptions) -> int:  # noqa: ANN401
    architecture = _meta(model, "general.architecture")
    heads = llama_cpp.llama_model_n_head_kv(model)
    default = llama_cpp.llama_model_n_embd(model) // max(1, llama_cpp.llama_model_n_head(model))
    total = 0
    for part, kind in (("key", options.type_k), ("value", options.type_v)):
        head = int(_meta(model, f"{architecture}.attention.{part}_length") or default)
        _, size, block = CACHE_TYPES[kind]
        total += heads * head * size // block
    return total * n_ctx * llama_cpp.llama_model_n_layer(model)
