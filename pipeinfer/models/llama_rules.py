"""Checks of a GGUF file before llama.cpp loads it.

For some values that llama.cpp does not check, it ends the process (an assertion, or worse). So they
are checked here, in every file before it is loaded: sizes that must divide each other, numbers that
must be finite, types that its kernels support, a vocabulary whose lists are as long as its tokens.
Found by `python -m benchmarks.fuzz`; docs/security.md describes the limits of this. Reads headers,
loads nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection

from pipeinfer.errors import ModelError
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.architectures.declaration import values_of
from pipeinfer.models.gguf import STRING, ModelFile

#: tokenizers whose tables are checked; llama.cpp has others, which no model served here has
VOCABULARIES = ("gemma4", "gpt2", "llama", "plamo2", "rwkv")
_MOST_LAYERS, _MOST_EXPERTS = 512, 512  # llama.cpp's own
_MOST_HEADS, _MOST_WIDTH = 1 << 16, 1 << 24
_ALIGNMENT = 32
_F32 = 0
#: ggml's types that matrices may have: floats and quantised ones; no integers, and none of those
#: that only activations have
_FLOATS = frozenset({0, 1, 30})
_MATRICES = _FLOATS | {2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 29, 34, 35, 39}
_GATINGS = 4  #: llama.cpp's highest number of a way to weigh experts
_META_F32, _META_I32, _META_U32 = 6, 5, 4
_SCALINGS = ("none", "linear", "yarn", "longrope")
_LEAST_TOKENS = 12  #: llama.cpp uses token 11 if a byte-level vocabulary has no end-of-text token
_NONE = ("none", "no_vocab")


def check_file(path: str | os.PathLike[str], *, head: bool = False) -> ModelFile:
    """Open the file at `path`. Raises ModelError for a file that llama.cpp must not load.

    head: whether its prediction head is loaded, alone
    """
    model = ModelFile(path)
    alignment = model.get("general.alignment", _ALIGNMENT)
    if isinstance(alignment, int) and alignment % _ALIGNMENT:
        raise _bad(model, "general.alignment", alignment)
    check_numbers(model, head=head)
    check_types(model)
    check_vocabulary(model)
    return model


def check_numbers(model: ModelFile, *, head: bool = False) -> None:
    """Check the sizes and factors of the architecture. Raises ModelError. head: see `check_file`"""
    for key in model.meta_keys():
        if key.startswith(model.architecture + ".") and not model.is_array(key):
            value = model.get(key)
            if isinstance(value, float) and not math.isfinite(value):
                raise _bad(model, key, value)
    if model.n_layers > _MOST_LAYERS:
        raise _bad(model, f"{model.architecture}.block_count", model.n_layers)
    found = {tensor.layer for tensor in model.tensors.values()} - {None}
    if found and len(found) < model.n_layers and not head:
        raise ModelError(f"{model.path}: its header says {model.n_layers} layers, but the file has "
                         f"{len(found)}; it is damaged, fetch it again")
    _number(model, "attention.layer_norm_rms_epsilon", 0, 1)
    _number(model, "attention.layer_norm_epsilon", 0, 1)
    _number(model, "rope.freq_base", 1e-9, 1e30)
    _number(model, "rope.freq_base_swa", 1e-9, 1e30)
    _number(model, "rope.scaling.factor", 0, 1e9)
    scaling = model.arch_get("rope.scaling.type")
    if scaling is not None and scaling not in _SCALINGS:
        raise _bad(model, f"{model.architecture}.rope.scaling.type", scaling)
    _check_experts(model)
    for key in (keys.DENSE, keys.HASH):
        _integers(model, key, 0, _MOST_LAYERS)
    own = declared(model.architecture)
    _integers(model, keys.WINDOW, int(own.chunked), _MOST_WIDTH)
    if own.cut.ends[0]:
        _check_compressed(model, *own.cut.ends)
    if own.varied_heads:
        _check_shared_caches(model)
    if not own.headless:  # sizes are divided by their number
        heads = _integers(model, "attention.head_count", 0, _MOST_HEADS)
        if max(heads, default=0) == 0:
            raise _bad(model, f"{model.architecture}.attention.head_count", heads or None)
    if own.checked:
        _check_heads(model)


def check_types(model: ModelFile) -> None:
    """Check the types of the tensors, where their use is known. Raises ModelError."""
    if not declared(model.architecture).checked:
        return
    for tensor in model.tensors.values():
        if tensor.name == "d2t":  # of a head: `heads` checks it
            continue
        vector = sum(size > 1 for size in tensor.shape) <= 1 and "token_embd" not in tensor.name
        if tensor.type not in (_FLOATS if vector else _MATRICES) or (
                len(tensor.shape) == 1 and tensor.type != _F32):
            raise ModelError(f"{model.path}: tensor {tensor.name!r} has type {tensor.type_name}, "
                             "which llama.cpp cannot compute with; convert the model again")


def check_vocabulary(model: ModelFile) -> None:
    """Check the tables of the tokenizer, if there is one. Raises ModelError."""
    kind = model.get("tokenizer.ggml.model")
    if kind is None or kind in _NONE:
        return
    if kind not in VOCABULARIES:
        raise ModelError(f"{model.path}: has a tokenizer of kind {str(kind)[:40]!r}, which is not "
                         f"supported (known: {', '.join(VOCABULARIES)})")
    if model.array_type("tokenizer.ggml.tokens") != STRING:
        raise ModelError(f"{model.path}: has a tokenizer without tokens; convert the model again")
    tokens = model.texts("tokenizer.ggml.tokens")
    if len(tokens) < _LEAST_TOKENS:
        raise ModelError(f"{model.path}: a vocabulary of {len(tokens)} tokens is too small; "
                         "convert the model again")
    known = {_name(token, i) for i, token in enumerate(tokens)}
    if len(known) != len(tokens):
        raise ModelError(f"{model.path}: {len(tokens) - len(known)} tokens are in its vocabulary "
                         "twice; convert the model again")
    for name, types in (("scores", (_META_F32,)), ("token_type", (_META_I32, _META_U32))):
        _check_column(model, f"tokenizer.ggml.{name}", types, len(tokens))
    merges = "tokenizer.ggml.merges"
    if model.array_type(merges) not in (None, STRING) or (
            merges in model.meta_keys() and not model.is_array(merges)):
        raise _bad(model, merges, "not a list of texts")
    if kind in ("gemma4", "llama"):
        _check_bytes(model, known)


def _name(token: bytes, number: int) -> bytes:
    """llama.cpp's key of a token: its text up to a NUL, or a number for an empty one."""
    return (token.partition(b"\0")[0] if 0 in token else token) or b"[EMPTY_%d]" % number


def _check_column(model: ModelFile, key: str, types: Collection[int | None], count: int) -> None:
    """Check a list with a value per token: llama.cpp reads as many values as there are tokens."""
    if key not in model.meta_keys():
        return
    length = model.array_length(key)
    if model.array_type(key) not in types or length != count:
        raise ModelError(f"{model.path}: {key} has {length} values for {count} tokens, or of the "
                         "wrong type; convert the model again")


def _check_bytes(model: ModelFile, known: set[bytes]) -> None:
    """Check that each byte has a token, as text that is in no token is written in bytes."""
    missing = [b for b in range(256) if b"<0x%02X>" % b not in known and bytes([b]) not in known]
    if missing:
        raise ModelError(f"{model.path}: its vocabulary has no token for {len(missing)} of the 256 "
                         f"bytes, the first {missing[0]}; convert the model again")


def _check_heads(model: ModelFile) -> None:
    heads = _integers(model, "attention.head_count", 1, _MOST_HEADS)
    shared = _integers(model, "attention.head_count_kv", 1, _MOST_HEADS) or heads
    most = max(len(heads), len(shared))  # a list has one number for all layers or one for each
    for count, groups in zip(heads * (most // len(heads)), shared * (most // len(shared)),
                             strict=True):
        if groups > count or count % groups:
            raise _bad(model, f"{model.architecture}.attention.head_count_kv", groups)
    if declared(model.architecture).latent:
        _check_latent(model)
    else:
        _check_rotation(model, heads[0], "")
        key = (_integers(model, "attention.key_length", 1, 1 << 16) or [1 << 16])[0]
        if declared(model.architecture).varied_heads:
            _check_rotation(model, heads[0], "_swa")
        elif any(size % 2 for size in _integers(model, "rope.dimension_count_swa", 1, key)):
            raise _bad(model, f"{model.architecture}.rope.dimension_count_swa", "an odd number")
    for name in ("feed_forward_length", "context_length"):
        _integers(model, name, 1, 2**31 - 1)


def _check_rotation(model: ModelFile, heads: int, kind: str) -> None:
    """Check sizes of heads; kind: "_swa" for those of layers with a sliding window."""
    default = model.n_embd // heads
    key, value = ((_integers(model, f"attention.{part}_length{kind}", 1, 1 << 16) or [default])[0]
                  for part in ("key", "value"))
    rotated = (_integers(model, f"rope.dimension_count{kind}", 1, 1 << 16) or [key])[0]
    arch, own = model.architecture, declared(model.architecture)
    fits = rotated <= key if own.partly_rotated else rotated == key
    if (key != value and not own.unequal_heads) or not fits or rotated % 2:
        rule = "the first two must be equal, the last even and no more" if own.partly_rotated \
            else "these must be equal and even"
        raise ModelError(
            f"{model.path}: heads of {key} and {value} elements of which {rotated} are "
            f"rotated; in a {arch} model {rule}")
    sections = model.arch_get("rope.dimension_sections")
    counts = [one for one in sections if isinstance(one, int)] if isinstance(sections, list) else []
    if sum(map(abs, counts)) > key:
        raise _bad(model, f"{arch}.rope.dimension_sections", sections)
    if own.fills_width and heads * key != model.n_embd:
        raise _bad(model, f"{arch}.attention.head_count", heads)


def _check_latent(model: ModelFile) -> None:
    """Check sizes of heads that read one compressed cache, and of that."""
    rotated, latent, key, value = (
        (_integers(model, name, 1, 1 << 16) or [0])[0] for name in (
            "rope.dimension_count", "attention.kv_lora_rank", "attention.key_length",
            "attention.value_length"))
    parts = [_integers(model, f"attention.{part}_length_mla", 1, 1 << 16)
             for part in ("key", "value")]
    if parts[0] and _integers(model, "attention.head_count_kv", 1, _MOST_HEADS)[:1] != [1]:
        raise _bad(model, f"{model.architecture}.attention.head_count_kv",
                   model.arch_get("attention.head_count_kv"))
    whole = parts[0][0] if parts[0] else key
    compressed = (key, value) == (latent + rotated, latent)
    if bool(parts[0]) != bool(parts[1]) or (parts[0] and not compressed) or not (
            0 < rotated < whole) or rotated % 2:
        raise ModelError(
            f"{model.path}: heads of {whole} elements of which {rotated} are rotated, over a cache "
            f"of {key} and {value} for {latent}; these do not fit each other in a "
            f"{model.architecture} model")


def _check_compressed(model: ModelFile, key: str, least: int) -> None:
    """Check that no cache is without layers: llama.cpp divides by its size."""
    if least not in values_of(model, key)[:model.n_layers]:
        raise _bad(model, f"{model.architecture}.{key}", f"a list without {least}")
    chooser = model.arch_get(key := "attention.indexer.key_length")
    if chooser == model.arch_get("attention.key_length"):
        raise _bad(model, f"{model.architecture}.{key}", chooser)


def _check_experts(model: ModelFile) -> None:
    _number(model, "expert_gating_func", 0, _GATINGS)
    experts = _integers(model, "expert_count", 0, _MOST_EXPERTS) or [0]
    used = _integers(model, "expert_used_count", 0, _MOST_EXPERTS) or [0]
    if max(used) > min(experts) or (min(used) > 0) != (max(experts) > 0):
        raise _bad(model, f"{model.architecture}.expert_used_count", max(used))


def _check_shared_caches(model: ModelFile) -> None:
    """Check the layers that read another layer's cache.

    The last layers may read the cache of the last layer of their kind (windows or none) that has
    one: llama.cpp expects it at the last place but one, or the last.
    """
    key, count = keys.SHARED, model.n_layers_all
    shared = max(_integers(model, key, 0, count), default=0)
    own, windows = count - shared, model.arch_get("attention.sliding_window_pattern")
    kinds = windows if isinstance(windows, list) and len(windows) == count else []
    if own < 2 or (shared and not kinds) or any(
            bool(kinds[own - (2 if one else 1)]) != bool(one) for one in kinds[own:]):
        raise _bad(model, f"{model.architecture}.{key}", shared)


def _integers(model: ModelFile, key: str, low: int, high: int) -> list[int]:
    """The integer under `key`, or one per layer; empty without one. Raises ModelError."""
    value = model.arch_get(key)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and len(value) != model.n_layers_all:
        raise _bad(model, f"{model.architecture}.{key}", f"{len(value)} values")
    checked = [v for v in values if isinstance(v, int) and not isinstance(v, bool)
               and low <= v <= high]
    if len(checked) != len(values):
        raise _bad(model, f"{model.architecture}.{key}", value if len(values) < 5 else "a list")
    return checked


def _number(model: ModelFile, key: str, low: float, high: float) -> None:
    value = model.arch_get(key)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _bad(model, f"{model.architecture}.{key}", value)


def _bad(model: ModelFile, key: str, value: object) -> ModelError:
    return ModelError(f"{model.path}: {key} is {str(value)[:80]!r}, a value that llama.cpp cannot "
                      "use; the file is damaged, fetch it again")
