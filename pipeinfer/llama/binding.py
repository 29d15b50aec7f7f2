"""llama.cpp's C functions, structs and callbacks, as far as pipeinfer uses them.

    from pipeinfer.llama import binding
    binding.llama_decode(context, batch)

The first use of any of them loads the library that `loader` finds. All functions come from that one
handle, so that no process holds two copies of ggml. Structs are laid out by hand, so their defaults
are checked before anything else is called: a library with other layouts is refused. Raises
BackendError, in one line, whenever there is no library that can be used.

The contracts of the functions are in llama.h. Prebuilt libraries lack `llama_model_quantize`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from pipeinfer.errors import BackendError
from pipeinfer.llama import short_runs
from pipeinfer.llama.loader import Library, find_library
from pipeinfer.llama.platform_check import COMPILE, cpu_flags

llama_log_callback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
ggml_abort_callback = CFUNCTYPE(None, c_char_p)
ggml_backend_sched_eval_callback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
llama_token = c_int32
LLAMA_TOKEN_ATTR_UNKNOWN = 1 << 0
LLAMA_TOKEN_ATTR_CONTROL = 1 << 3
LLAMA_TOKEN_ATTR_USER_DEFINED = 1 << 4
LLAMA_TOKEN_ATTR_LSTRIP = 1 << 7
LLAMA_TOKEN_ATTR_RSTRIP = 1 << 8
LLAMA_FLASH_ATTN_TYPE_DISABLED = 0

#: A newer library may have further fields at the end of its structs. It reads and writes them in
#: these bytes, and not in memory after the struct.
_ROOM = ("reserved", ctypes.c_char * 128)

_MODEL_FIELDS = (
    ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
    ("split_mode", c_int), ("load_mode", c_int), ("lazy_mode", c_int), ("main_gpu", c_int32),
    ("tensor_split", c_void_p), ("progress_callback", c_void_p),
    ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p), ("vocab_only", c_bool),
    ("check_tensors", c_bool), ("use_extra_bufts", c_bool), ("no_host", c_bool),
    ("no_alloc", c_bool), ("load_mtp", c_bool),
)
_CONTEXT_FIELDS = (
    ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32), ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32), ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32), ("n_threads_batch", c_int32), ("ctx_type", c_int),
    ("rope_scaling_type", c_int), ("pooling_type", c_int), ("attention_type", c_int),
    ("flash_attn_type", c_int), ("rope_freq_base", c_float), ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float), ("yarn_attn_factor", c_float), ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float),
    ("cb_eval", ggml_backend_sched_eval_callback), ("cb_eval_user_data", c_void_p),
    ("type_k", c_int), ("type_v", c_int), ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p), ("embeddings", c_bool), ("offload_kqv", c_bool),
    ("no_perf", c_bool), ("op_offload", c_bool), ("swa_full", c_bool), ("kv_unified", c_bool),
    ("samplers", c_void_p), ("n_samplers", c_size_t), ("ctx_other", c_void_p),
)
#: layout -> fields of llama_context_params that it has beyond those above, and after which
_MORE_CONTEXT_FIELDS: dict[str, dict[str, tuple[tuple[str, Any], ...]]] = {
    "plain": {},
    "moe cache": {"type_v": (("moe_cache_size", c_uint64),)},
}


class llama_batch(ctypes.Structure):
    """Rows to decode, column by column; the caller owns the columns."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(llama_token)), ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)), ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    )


class ggml_init_params(ctypes.Structure):
    """Memory for tensors outside of any model."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class ggml_type_traits(ctypes.Structure):
    """ggml's description of a type of tensor.

    Elements and bytes of a block, and the function that converts a row of blocks to
    float32[elements] (null for float32 itself).
    """

    _fields_ = (
        ("type_name", c_char_p), ("blck_size", c_int64), ("blck_size_interleave", c_int64),
        ("type_size", c_size_t), ("is_quantized", c_bool),
        ("to_float", CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
        ("from_float_ref", c_void_p),
    )


class ggml_type_traits_cpu(ctypes.Structure):
    """How ggml's kernels multiply vectors of a type: n, where to, 0, x, 0, y, 0, 1."""

    _fields_ = (
        ("from_float", c_void_p),
        ("vec_dot", CFUNCTYPE(None, c_int, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p,
                              c_size_t, c_int)),
        ("vec_dot_type", c_int), ("nrows", c_int64),
    )


class llama_model_params(ctypes.Structure):
    """How a model is loaded."""

    _fields_ = (*_MODEL_FIELDS, _ROOM)


class llama_model_quantize_params(ctypes.Structure):
    """How a file is quantised."""

    _fields_ = (
        ("nthread", c_int32), ("ftype", c_int), ("output_tensor_type", c_int),
        ("token_embedding_type", c_int), ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool), ("only_copy", c_bool), ("pure", c_bool),
        ("keep_split", c_bool), ("dry_run", c_bool), ("imatrix", c_void_p),
        ("kv_overrides", c_void_p), ("tt_overrides", c_void_p), ("prune_layers", c_void_p),
        ("max_buf_size", c_size_t), _ROOM,
    )


class llama_model_kv_override(ctypes.Structure):
    """A number in place of one in a file's metadata; an empty key ends a list of them."""

    _fields_ = (("tag", c_int), ("key", ctypes.c_char * 128), ("val_i64", ctypes.c_int64),
                ("rest", ctypes.c_char * 120))


#: An empty list of devices: without one, a process that loads a model opens a context on each GPU.
NO_DEVICES = (c_void_p * 1)()

#: The defaults that a library must return; other values mean another layout of its structs.
_MODEL_DEFAULTS = {
    "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "main_gpu": 0,
    "tensor_split": None, "progress_callback": None, "kv_overrides": None, "vocab_only": False,
    "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0,
    "n_outputs_max": 0, "n_outputs_max_per_seq": 1, "n_threads": 4, "n_threads_batch": 4,
    "ctx_type": 0, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1,
    "flash_attn_type": -1, "rope_freq_base": 0.0, "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0, "defrag_thold": -1.0, "type_k": 1, "type_v": 1, "abort_callback": None,
    "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True,
    "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}

_P = c_void_p  #: any of llama.cpp's own objects
_MODEL = llama_model_params
_CONTEXT = "llama_context_params"  #: stands for that struct, whose layout the library decides
#: name -> result, arguments
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_dev_by_type": (_P, (c_int,)),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_description": (c_char_p, (_P,)),
    "ggml_backend_dev_get": (_P, (c_size_t,)),
    "ggml_backend_dev_memory": (None, (_P, POINTER(c_size_t), POINTER(c_size_t))),
    "ggml_backend_dev_name": (c_char_p, (_P,)),
    "ggml_backend_dev_type": (c_int, (_P,)),
    "ggml_backend_load": (_P, (c_char_p,)),
    "ggml_backend_load_all_from_path": (None, (c_char_p,)),
    "ggml_backend_reg_by_name": (_P, (c_char_p,)),
    "ggml_backend_tensor_get": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_tensor_set": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_compute_forward_mul_mat_tiled": (c_bool, (_P, _P)),
    "ggml_cpu_init": (None, ()),
    "ggml_free": (None, (_P,)),
    "ggml_get_data": (_P, (_P,)),
    "ggml_get_name": (c_char_p, (_P,)),
    "ggml_get_type_traits": (POINTER(ggml_type_traits), (c_int,)),
    "ggml_get_type_traits_cpu": (POINTER(ggml_type_traits_cpu), (c_int,)),
    "ggml_init": (_P, (ggml_init_params,)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_nbytes": (c_size_t, (_P,)),
    "ggml_nelements": (c_int64, (_P,)),
    "ggml_new_tensor_2d": (_P, (_P, c_int, c_int64, c_int64)),
    "ggml_nrows": (c_int64, (_P,)),
    "ggml_quantize_chunk": (
        c_size_t, (c_int, POINTER(c_float), _P, c_int64, c_int64, c_int64, POINTER(c_float))),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_set_abort_callback": (_P, (ggml_abort_callback,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_threadpool_chunk_add": (c_int, (_P, c_int)),
    "ggml_version": (c_char_p, ()),
    "llama_encode": (c_int32, (_P, llama_batch)),
    "llama_backend_init": (None, ()),
    "llama_batch_free": (None, (llama_batch,)),
    "llama_batch_init": (llama_batch, (c_int32, c_int32, c_int32)),
    "llama_context_default_params": (_CONTEXT, ()),
    "llama_decode": (c_int32, (_P, llama_batch)),
    "llama_free": (None, (_P,)),
    "llama_get_logits": (POINTER(c_float), (_P,)),
    "llama_get_logits_ith": (POINTER(c_float), (_P, c_int32)),
    "llama_get_memory": (_P, (_P,)),
    "llama_init_from_model": (_P, (_P, _CONTEXT)),
    "llama_log_set": (None, (llama_log_callback, _P)),
    "llama_memory_clear": (None, (_P, c_bool)),
    "llama_memory_seq_cp": (None, (_P, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_keep": (None, (_P, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (_P, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (_P, c_int32)),
    "llama_memory_seq_rm": (c_bool, (_P, c_int32, c_int32, c_int32)),
    "llama_model_chat_template": (c_char_p, (_P, c_char_p)),
    "llama_model_default_params": (_MODEL, ()),
    "llama_model_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_is_hybrid": (c_bool, (_P,)),
    "llama_model_is_recurrent": (c_bool, (_P,)),
    "llama_model_load_from_file": (_P, (c_char_p, _MODEL)),
    "llama_model_load_from_file_ptr": (_P, (_P, _MODEL)),
    "llama_model_meta_val_str": (c_int32, (_P, c_char_p, c_char_p, c_size_t)),
    "llama_model_n_embd": (c_int32, (_P,)),
    "llama_model_n_embd_inp": (c_int32, (_P,)),
    "llama_model_n_head": (c_int32, (_P,)),
    "llama_model_n_head_kv": (c_int32, (_P,)),
    "llama_model_n_layer": (c_int32, (_P,)),
    "llama_model_n_swa": (c_int32, (_P,)),
    "llama_model_rope_type": (c_int, (_P,)),
    "llama_model_quantize": (
        c_uint32, (c_char_p, c_char_p, POINTER(llama_model_quantize_params))),
    "llama_model_quantize_default_params": (llama_model_quantize_params, ()),
    "llama_model_size": (c_uint64, (_P,)),
    "llama_n_ctx": (c_uint32, (_P,)),
    "llama_n_threads": (c_int32, (_P,)),
    "llama_numa_init": (None, (c_int,)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_set_causal_attn": (None, (_P, c_bool)),
    "llama_set_n_threads": (None, (_P, c_int32, c_int32)),
    "llama_state_get_data": (c_size_t, (_P, POINTER(c_uint8), c_size_t)),
    "llama_state_get_size": (c_size_t, (_P,)),
    "llama_state_seq_get_data_ext": (c_size_t, (_P, POINTER(c_uint8), c_size_t, c_int32, c_uint32)),
    "llama_state_seq_get_size_ext": (c_size_t, (_P, c_int32, c_uint32)),
    "llama_state_seq_set_data_ext": (c_size_t, (_P, POINTER(c_uint8), c_size_t, c_int32, c_uint32)),
    "llama_state_set_data": (c_size_t, (_P, POINTER(c_uint8), c_size_t)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_synchronize": (None, (_P,)),
    "llama_token_to_piece": (c_int32, (_P, llama_token, c_char_p, c_int32, c_int32, c_bool)),
    "llama_tokenize": (
        c_int32, (_P, c_char_p, c_int32, POINTER(llama_token), c_int32, c_bool, c_bool)),
    "llama_vocab_bos": (llama_token, (_P,)),
    "llama_vocab_eos": (llama_token, (_P,)),
    "llama_vocab_get_add_bos": (c_bool, (_P,)),
    "llama_vocab_get_add_eos": (c_bool, (_P,)),
    "llama_vocab_get_attr": (c_int, (_P, llama_token)),
    "llama_vocab_get_text": (c_char_p, (_P, llama_token)),
    "llama_vocab_is_control": (c_bool, (_P, llama_token)),
    "llama_vocab_is_eog": (c_bool, (_P, llama_token)),
    "llama_vocab_n_tokens": (c_int32, (_P,)),
    "llama_vocab_type": (c_int, (_P,)),
    "llamafile_sgemm": (c_bool, ()),
}
#: a feature that ggml reports as compiled in -> Linux's name of that feature of a processor
_KERNELS = {
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi2": "bmi2",
    "avx_vnni": "avx_vnni", "avx512": "avx512f", "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16", "dotprod": "asimddp",
    "fp16_va": "asimdhp", "matmul_int8": "i8mm", "sve": "sve",
}
#: functions of C++ that llama.cpp exports for heads that read a model's rows: our name -> theirs
_OF_HEADS = {
    "get_layer_input": ("_Z30llama_get_embeddings_layer_inpP13llama_contextj",
                        (POINTER(c_float), (_P, c_uint32))),
    "get_final_rows": ("_Z26llama_get_embeddings_nextnP13llama_context",
                       (POINTER(c_float), (_P,))),
    "want_layer_input": ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
                         (None, (_P, c_uint32, c_bool))),
    "want_final_rows": ("_Z26llama_set_embeddings_nextnP13llama_contextbb",
                        (None, (_P, c_bool, c_bool))),
}
#: likewise, where it exists
_OF_MODELS = {"get_tensor": ("_ZNK11llama_model10get_tensorEPKc", (_P, (_P, c_char_p)))}
_OF_SHORT_RUNS = short_runs.ALL_FUNCTIONS - _FUNCTIONS.keys()  #: called by the C parts only
_FUNCTIONS |= {name: (_P, ()) for name in _OF_SHORT_RUNS}
_FUNCTIONS |= {f"ggml_cpu_has_{name}": (c_int, ()) for name in _KERNELS}
_MANGLED = _OF_HEADS | _OF_MODELS
_FUNCTIONS |= {name: kind for name, (_, kind) in _MANGLED.items()}
#: of kernels that are plug-ins of their own ggml cannot tell before it has chosen some
_OF_DEVICES = ("count", "description", "get", "memory", "name", "type")
_OF_PLUGINS = ("ggml_backend_load", "ggml_backend_load_all_from_path", "ggml_backend_dev_by_type",
               "ggml_backend_reg_by_name")
_OPTIONAL = (*_OF_PLUGINS, *(f"ggml_backend_dev_{what}" for what in _OF_DEVICES), "ggml_cpu_init",
             "ggml_set_abort_callback", *_MANGLED, "llama_encode", "llama_model_n_embd_inp",
             "llama_model_load_from_file_ptr", "llama_model_quantize",
             "llama_model_quantize_default_params",
             *(name for name in short_runs.FUNCTIONS if name != "ggml_nrows"), *_OF_SHORT_RUNS,
             *(f"ggml_cpu_has_{name}" for name in _KERNELS))

#: llama.cpp's own variable: a plug-in with a backend in addition to the library's
PLUGIN_VARIABLE = "GGML_BACKEND_PATH"
_CPU_DEVICE = 0  #: ggml's number for that type of device
_no_log = llama_log_callback(lambda _level, _text, _data: None)

_lock = threading.Lock()
_loaded: list[Library] = []


def __getattr__(name: str) -> Any:
    """Load the library at the first use of a function, which defines all of them here."""
    if name not in _FUNCTIONS and name != _CONTEXT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library = loaded()
    if name not in globals():
        raise BackendError(f"{library.name} has no {name}: {COMPILE}")
    return globals()[name]


def loaded() -> Library:
    """Return the library of this process, loaded and checked. Raises BackendError."""
    with _lock:
        if not _loaded:
            library = find_library()
            short_runs.preload(library.path)
            functions = bind(library)
            _load_plugins(library, functions)
            short_runs.begin(functions)
            globals().update(functions)
            _loaded.append(library)
        return _loaded[0]


def kernels() -> tuple[str, ...]:
    """Return the processor's features that the library was compiled for. Raises BackendError."""
    loaded()
    own = globals()
    return tuple(feature for name, feature in _KERNELS.items()
                 if (has := own.get(f"ggml_cpu_has_{name}")) is not None and has())


def has_heads() -> bool:
    """Return whether the library can run heads that read a model's rows. Raises BackendError."""
    loaded()
    return all(name in globals() for name in _OF_HEADS)


def has_tensors() -> bool:
    """Return whether the library gives access to a model's tensors. Raises BackendError."""
    loaded()
    return all(name in globals() for name in _OF_MODELS)


def picture_width(model: Any) -> int:
    """Return the elements of a picture's row for a loaded model; 0 where the library has no
    pictures. Raises BackendError."""
    loaded()
    width = globals().get("llama_model_n_embd_inp")
    return 0 if width is None else int(width(model))


def unused_features() -> tuple[str, ...]:
    """Return this processor's features that the library does not use. Raises BackendError."""
    here, used = cpu_flags(), kernels()
    return tuple(name for name in _KERNELS.values() if name in here and name not in used)


def bind(library: Library) -> dict[str, Any]:
    """Return the library's functions by name, and llama_context_params.

    Raises BackendError where it cannot be loaded, lacks a function, or has another layout.
    """
    try:
        handle = ctypes.CDLL(str(library.path))
    except OSError as error:
        raise BackendError(f"{library.name} cannot be loaded: {' '.join(str(error).split())}; "
                           f"install it again") from error
    found: dict[str, Any] = {}
    for layout in library.layouts:
        found = _functions(library, handle, layout)
        wrong = _layout_errors(found)
        if not wrong:
            return found
    raise BackendError(f"{library.name} lays out {wrong}: install the version that "
                       "constraints.txt names")


def _functions(library: Library, handle: ctypes.CDLL, layout: str) -> dict[str, Any]:
    """The library's functions by name, with its structs in this layout. Raises BackendError."""
    found: dict[str, Any] = {_CONTEXT: _context_params(layout)}
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(handle, _MANGLED[name][0] if name in _MANGLED else name)
        except AttributeError:
            if name in _OPTIONAL:
                continue
            raise BackendError(f"{library.name} has no {name}: install the version that "
                               "constraints.txt names") from None
        function.restype = found.get(_CONTEXT) if result is _CONTEXT else result
        function.argtypes = [found[_CONTEXT] if kind is _CONTEXT else kind for kind in arguments]
        found[name] = function
    return found


def _load_plugins(library: Library, functions: dict[str, Any]) -> None:
    """Load backends that are files of their own.

    These are the ones in the folder of a library without a built-in backend, and the one that
    PLUGIN_VARIABLE names. Raises BackendError, in one line.
    """
    named = os.environ.get(PLUGIN_VARIABLE, "")
    lacks = [name for name in _OF_PLUGINS if name not in functions]
    if lacks:
        if named:
            raise BackendError(f"{PLUGIN_VARIABLE}={named}: {library.name} takes no plug-ins")
        return
    functions["llama_log_set"](_no_log, None)
    if not functions["ggml_backend_dev_by_type"](_CPU_DEVICE):
        functions["ggml_backend_load_all_from_path"](os.fsencode(library.path.parent))
        # in wheels, whose files are renamed, llama.cpp finds the processor's backend only
        for path in sorted(library.path.parent.glob("libggml-*.so")):
            kind = path.name.removeprefix("libggml-").partition(".")[0].partition("-")[0]
            if kind not in ("base", "cpu") and not functions["ggml_backend_reg_by_name"](
                    kind.encode()):
                functions["ggml_backend_load"](os.fsencode(path))
        if not functions["ggml_backend_dev_by_type"](_CPU_DEVICE):
            raise BackendError(f"{library.name} has no backend for this processor, nor is there "
                               "one next to it: install it again")
    elif named and not functions["ggml_backend_load"](os.fsencode(named)):
        raise BackendError(f"{PLUGIN_VARIABLE}={named}: ggml cannot load this plug-in")


def _context_params(layout: str) -> type[ctypes.Structure]:
    """llama_context_params in this layout."""
    more = _MORE_CONTEXT_FIELDS[layout]
    fields = [part for field in _CONTEXT_FIELDS for part in (field, *more.get(field[0], ()))]
    return type(_CONTEXT, (ctypes.Structure,), {"_fields_": (*fields, _ROOM)})


def _layout_errors(functions: dict[str, Any]) -> str:
    """Describe the first default that differs from the expected one; empty if none does."""
    for struct, expected in ((functions["llama_context_default_params"](), _CONTEXT_DEFAULTS),
                             (functions["llama_model_default_params"](), _MODEL_DEFAULTS)):
        for name, value in expected.items():
            if (found := getattr(struct, name)) != value:
                return f"{type(struct).__name__} differently ({name} {found} as its default)"
    return ""
