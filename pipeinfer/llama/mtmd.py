"""llama.cpp's projectors, which turn pictures and sound into rows for a text model.

    with Projector(mmproj, model, Sizes()) as projector:
        parts = projector.read(data)

The functions are those of libmtmd: in the library that `binding` has loaded, or in a file next to
it. They are optional; `why_missing` says what to do without them. Structs are laid out by hand, so
their defaults are checked first.

Its code asserts on what it does not expect, which ends the process, so call it in one that may end.
Clients' text must never go through `mtmd_tokenize`: that makes control tokens of it. Here it gets
the picture alone, and returns the marks of the projector with it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32
from ctypes import c_void_p as _P
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.errors import BackendError, ModelError, RequestError
from pipeinfer.llama import binding
from pipeinfer.llama.library import clear_log, ensure_llama, last_log, log_callback, model_params

_TEXT, _IMAGE = 0, 1  #: kinds of chunks; the rest are sound
_DEFAULTS = {"n_threads": 4, "flash_attn_type": -1, "batch_max_tokens": 1024, "warmup": True,
             "image_min_tokens": -1, "image_max_tokens": -1}


class _Params(ctypes.Structure):
    _fields_ = (
        ("use_gpu", c_bool), ("device", _P), ("print_timings", c_bool), ("n_threads", c_int),
        ("image_marker", c_char_p), ("media_marker", c_char_p), ("flash_attn_type", c_int),
        ("warmup", c_bool), ("image_min_tokens", c_int), ("image_max_tokens", c_int),
        ("cb_eval", _P), ("cb_eval_user_data", _P), ("batch_max_tokens", c_int32),
        ("progress_callback", _P), ("progress_data", _P), ("room", ctypes.c_char * 128))


class _Part(ctypes.Structure):
    _fields_ = (("text", _P), ("bitmap", _P))


class _Video(ctypes.Structure):
    _fields_ = (("fps", c_float), ("ffmpeg", c_char_p), ("interval", c_int64))


class _Bitmap(ctypes.Structure):
    _fields_ = (("bitmap", _P), ("video", _P))


class _Place(ctypes.Structure):
    _fields_ = (("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bitmap_free": (None, (_P,)),
    "bitmap_init": (_P, (c_uint32, c_uint32, c_char_p)),
    "context_params_default": (_Params, ()),
    "decode_use_mrope": (c_bool, (_P,)),
    "decode_use_non_causal": (c_bool, (_P, _P)),
    "encode_chunk": (c_int32, (_P, _P)),
    "free": (None, (_P,)),
    "get_output_embd": (POINTER(c_float), (_P,)),
    "helper_bitmap_init_from_buf": (_Bitmap, (_P, c_char_p, c_size_t, c_bool, _Video)),
    "helper_init_opt_default": (_Video, ()),
    "helper_log_set": (None, (_P, _P)),
    "image_tokens_get_decoder_pos": (_Place, (_P, c_int32, c_size_t)),
    "init_from_file": (_P, (c_char_p, _P, _Params)),
    "input_chunk_get_n_pos": (c_int32, (_P,)),
    "input_chunk_get_n_tokens": (c_size_t, (_P,)),
    "input_chunk_get_tokens_image": (_P, (_P,)),
    "input_chunk_get_tokens_text": (POINTER(c_int32), (_P, POINTER(c_size_t))),
    "input_chunk_get_type": (c_int, (_P,)),
    "input_chunks_free": (None, (_P,)),
    "input_chunks_get": (_P, (_P, c_size_t)),
    "input_chunks_init": (_P, ()),
    "input_chunks_size": (c_size_t, (_P,)),
    "support_audio": (c_bool, (_P,)),
    "support_vision": (c_bool, (_P,)),
    "tokenize_from_parts": (c_int32, (_P, _P, POINTER(POINTER(_Part)), c_size_t, c_bool)),
}


@cache
def _functions() -> dict[str, Any]:
    """The functions by their names without `mtmd_`. Raises BackendError, in one line."""
    library = binding.loaded()
    own = library.path.with_name("libmtmd.so")
    handle = ctypes.CDLL(str(own if own.exists() else library.path))
    found = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(handle, f"mtmd_{name}", None)
        if function is None:
            raise BackendError(f"{library.name} has no projectors of pictures (mtmd_{name}): "
                               "compile it again (docs/install.md), or install xllamacpp")
        function.restype, function.argtypes = result, arguments
        found[name] = function
    defaults = found["context_params_default"]()
    for name, value in _DEFAULTS.items():
        if getattr(defaults, name) != value:
            raise BackendError(f"{library.name} lays out mtmd_context_params differently ({name}): "
                               "install the version that constraints.txt names")
    found["helper_log_set"](ctypes.cast(log_callback, _P), None)
    return found


def why_missing() -> str:
    """Return why this process's library has no projectors, in one line; "" if it has."""
    try:
        _functions()
    except (BackendError, OSError) as error:
        return str(error)
    return ""


class Chunk(Struct, frozen=True, eq=False):
    """A part of what a projector makes of a picture: marks of the vocabulary, or rows.

    tokens: the marks; () for rows
    n: how many rows
    n_pos: how many positions they take of the text that follows
    causal: whether a row sees only those before it; else all of them see each other
    places: int32[3, n], time, row and column of each, from 0; None without M-RoPE
    rows: float32[n, w]; None if they were not computed
    """

    tokens: tuple[int, ...] = ()
    n: int = 0
    n_pos: int = 0
    causal: bool = True
    places: npt.NDArray[np.int32] | None = None
    rows: npt.NDArray[np.float32] | None = None


class Sizes(Struct, frozen=True):
    """threads: of the projector. least, most: rows of a picture; 0: as its file says."""

    threads: int = 1
    least: int = 0
    most: int = 0


class Projector:
    """A projector and the text model's vocabulary and sizes, without its weights."""

    def __init__(self, mmproj: str, model: str, sizes: Sizes) -> None:
        """mmproj: the projector's file. model: of the text model, which decides about positions.

        Raises ModelError for a file that cannot be loaded, for one of another model's, and for a
        vocabulary that lacks the projector's marks; BackendError without projectors.
        """
        ensure_llama()
        self._do, self._handle = _functions(), None
        params = model_params()
        params.no_alloc, params.load_mode = True, 0
        self._model = binding.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise ModelError(f"{model}: {last_log()}")
        self.width = binding.picture_width(self._model)  #: of rows, in elements
        vocabulary = binding.llama_model_get_vocab(self._model)
        self._n_vocab = int(binding.llama_vocab_n_tokens(vocabulary))
        own = self._do["context_params_default"]()
        own.use_gpu, own.warmup, own.n_threads = False, False, sizes.threads
        own.image_min_tokens, own.image_max_tokens = sizes.least or -1, sizes.most or -1
        clear_log()
        self._handle = self._do["init_from_file"](mmproj.encode(), self._model, own)
        if not self._handle:
            raise ModelError(f"{mmproj} cannot be the projector of {model}: {last_log()}")
        self._mrope = bool(self._do["decode_use_mrope"](self._handle))
        self.vision = bool(self._do["support_vision"](self._handle))
        self.audio = bool(self._do["support_audio"](self._handle))
        #: whether rows of a picture see each other, so that it has to be evaluated in one run
        self.together = self.vision and self._check_marks(mmproj, model)

    def _check_marks(self, mmproj: str, model: str) -> bool:
        """Read a grey picture, without computing its rows."""
        grey = self._do["bitmap_init"](640, 480, bytes([127]) * (3 * 640 * 480))
        found = self._parts(grey, encode=False)
        if any(not 0 <= token < self._n_vocab for one in found for token in one.tokens):
            raise ModelError(f"{mmproj} puts tokens around a picture that the vocabulary of {model}"
                             " lacks: take the projector of this very model")
        return any(not one.causal for one in found)

    def read(self, data: bytes, most: int = 0, *, encode: bool = True) -> list[Chunk]:
        """Return what takes the place of a picture, or of sound, in the prompt.

        data: the contents of its file
        most: rows at which it is refused before any is computed; 0: never
        encode: whether to compute the rows
        Raises RequestError for what cannot be read.
        """
        clear_log()
        found = self._do["helper_bitmap_init_from_buf"](
            self._handle, data, len(data), False, self._do["helper_init_opt_default"]())
        if not found.bitmap:
            raise RequestError(f"it cannot be decoded: {last_log()}")
        return self._parts(found.bitmap, encode=encode, most=most)

    def _parts(self, bitmap: Any, *, encode: bool, most: int = 0) -> list[Chunk]:
        """What a bitmap, which is freed, becomes. Raises RequestError."""
        do = self._do
        chunks = do["input_chunks_init"]()
        try:
            part = _Part(None, bitmap)
            parts = (POINTER(_Part) * 1)(ctypes.pointer(part))
            if status := do["tokenize_from_parts"](self._handle, chunks, parts, 1, False):
                raise RequestError(f"it cannot be cut into patches (status {status}): {last_log()}")
            every = [do["input_chunks_get"](chunks, i)
                     for i in range(do["input_chunks_size"](chunks))]
            n = sum(do["input_chunk_get_n_tokens"](one) for one in every)
            if most and n >= most:
                raise RequestError(f"it takes {n} places, of {most} that the context has: lower "
                                   "--image-max-tokens, or raise -c")
            found = [self._chunk(one, encode=encode) for one in every]
        finally:
            do["input_chunks_free"](chunks)
            do["bitmap_free"](bitmap)
        if encode and any(not 0 <= token < self._n_vocab for one in found for token in one.tokens):
            raise RequestError("it needs a token that the model's vocabulary lacks")
        return found

    def _chunk(self, chunk: Any, *, encode: bool) -> Chunk:
        do, n = self._do, c_size_t()
        if do["input_chunk_get_type"](chunk) == _TEXT:
            tokens = do["input_chunk_get_tokens_text"](chunk, ctypes.byref(n))
            return Chunk(tuple(tokens[: n.value]))
        count = int(do["input_chunk_get_n_tokens"](chunk))
        places = self._places(chunk, count) if self._mrope else None
        rows = None
        if encode:
            if do["encode_chunk"](self._handle, chunk):
                raise RequestError(f"its rows cannot be computed: {last_log()}")
            computed = do["get_output_embd"](self._handle)  # the next call overwrites them
            rows = np.ctypeslib.as_array(computed, (count, self.width)).copy()
        causal = not do["decode_use_non_causal"](self._handle, chunk)
        return Chunk((), count, int(do["input_chunk_get_n_pos"](chunk)), causal, places, rows)

    def _places(self, chunk: Any, count: int) -> npt.NDArray[np.int32]:
        if self._do["input_chunk_get_type"](chunk) != _IMAGE:
            return np.tile(np.arange(count, dtype=np.int32), (3, 1))
        image = self._do["input_chunk_get_tokens_image"](chunk)
        found = [self._do["image_tokens_get_decoder_pos"](image, 0, k) for k in range(count)]
        return np.array([[one.t, one.y, one.x] for one in found], np.int32).T.copy()

    def close(self) -> None:
        """Release the projector and the vocabulary."""
        handle, self._handle = self._handle, None
        if handle:
            self._do["free"](handle)
        model, self._model = self._model, None
        if model:
            binding.llama_model_free(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
