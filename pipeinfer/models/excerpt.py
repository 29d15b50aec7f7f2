"""What is measured of a model file in place of all of it: some layers, and rows of its head.

Whether rows keep the bits of single rows depends on the types, shapes and kernels of matrices, not
on how many layers there are. So the first layers of a file, up to one of each kind, stand for all.
The output matrix is tried apart, in a file with one empty layer. Reads headers and writes that
file; runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from msgspec import Struct

from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import DEFAULT_ALIGNMENT, ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import all_of, blocks_of, entry, header_of, rows_of, zeros
from pipeinfer.models.layers import LayerKind, keeps_state, kind_of_place, layer_kinds, row_width

_ROWS = 4096  #: of the output matrix that are tried: each is a product of its own
_HEAD, _EMBEDDING, _NORM = "output.weight", "token_embd.weight", "output_norm.weight"
_SMALL = 32  #: size of the empty layer's one head and of its feed forward


class Kinds(Struct, frozen=True):
    """The kinds of layers of a file.

    n_layers: the first so many contain one of each
    names: one text for each kind and for the head, sorted; equal for files that compute alike
    """

    n_layers: int
    names: tuple[str, ...]


def kinds_of(model: ModelFile, start: int, stop: int, *, last: bool) -> Kinds | None:
    """Return the kinds of layers `[start, stop)` of a file; None for architectures whose layers may
    differ by their place in ways that are not known.

    last: whether they are a last stage, whose output matrix is used.
    """
    if not declared(model.architecture).splits:
        return None
    layers: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}
    for tensor in model.tensors.values():
        if tensor.layer is not None and start <= tensor.layer < stop:
            layers.setdefault(tensor.layer, []).append(
                (tensor.name.split(".", 2)[2], tensor.type, tensor.shape))
    heads = [model.arch_get(f"attention.{key}") for key in
             ("head_count", "head_count_kv", "key_length", "value_length", "kv_lora_rank")]
    heads.append(model.arch_get("expert_used_count"))
    if keeps_state(model):
        heads += [f"{key} {model.get(key)}" for key in sorted(model.meta_keys())
                  if key.startswith(f"{model.architecture}.ssm.")]
    keeps = layer_kinds(model)
    found: dict[str, int] = {}
    for layer in sorted(layers):
        kind = [model.architecture, heads, kind_of_place(model, layer), sorted(layers[layer])]
        if keeps[layer] is not LayerKind.CACHE:
            kind.append(str(keeps[layer]))
        found.setdefault(_name(kind), layer)
    names = set(found)
    if last:
        head = _head_of(model)
        names.add(_name(["head", head.type, head.shape[0]]))
    # a graph with several rows of a token names no output but the last layer's
    count = stop - start if row_width(model) > model.n_embd \
        else 1 + max(found.values(), default=start) - start
    return Kinds(count, tuple(sorted(names)))


def _head_of(model: ModelFile) -> TensorInfo:
    return model.tensors.get(_HEAD) or model.tensors[_EMBEDDING]


def write_head(model: ModelFile, path: str | os.PathLike[str], *, tied: bool) -> None:
    """Write a model of one empty layer with the first rows of this one's output matrix.

    tied: whether it is written as the embedding, as in shards.
    Raises ModelError if the model cannot be read, OSError if `path` cannot be written.
    """
    head = _head_of(model)
    width, rows = model.n_embd, min(head.shape[-1], _ROWS)
    own = rows_of(head, _EMBEDDING if tied else head.name, (0, rows))
    parts = [own] if own.name == _EMBEDDING else [zeros(_EMBEDDING, (width, rows)), own]
    norm = declared(model.architecture).cut.norm + ".weight"
    parts.append(all_of(model.tensors[norm], _NORM))
    for name, shape in (("attn_norm", (width,)), ("attn_q", (width, _SMALL)),
                        ("attn_k", (width, _SMALL)), ("attn_v", (width, _SMALL)),
                        ("attn_output", (_SMALL, width)), ("ffn_norm", (width,)),
                        ("ffn_gate", (width, _SMALL)), ("ffn_up", (width, _SMALL)),
                        ("ffn_down", (_SMALL, width))):
        parts.append(zeros(f"blk.0.{name}.weight", shape, floats=True))
    sizes = {"block_count": 1, "context_length": 1 << 12, "embedding_length": width,
             "feed_forward_length": _SMALL, "attention.head_count": 1,
             "attention.head_count_kv": 1, "attention.key_length": _SMALL,
             "attention.value_length": _SMALL, "rope.dimension_count": _SMALL, "vocab_size": rows}
    entries = [entry("general.architecture", "llama"),
               entry("general.alignment", DEFAULT_ALIGNMENT),
               entry("tokenizer.ggml.model", "none"),
               entry("llama.attention.layer_norm_rms_epsilon", 1e-5),
               *(entry(f"llama.{key}", value) for key, value in sizes.items())]
    with Path(path).open("wb") as file:
        for block in blocks_of(model, header_of(entries, parts), parts):
            file.write(block)


def _name(kind: object) -> str:
    return hashlib.blake2b(json.dumps(kind).encode(), digest_size=12).hexdigest()
