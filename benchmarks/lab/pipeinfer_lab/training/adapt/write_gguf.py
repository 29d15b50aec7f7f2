"""Writes a merged model as GGUF: metadata and vocabulary of another file of the same model.

Knows files; no training.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pipeinfer.backends.pytorch.gguf import GgufTensors
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.architectures import declared
from pipeinfer.models.gaps import half_split
from pipeinfer.models.gguf import ModelFile
from pipeinfer_lab.training.adapt.merged import Merged

_TYPES = {"float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
          "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
          "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32)}
_DROPPED = ("general.architecture", "general.file_type", "general.quantization_version")


def write_gguf(out: Path, merged: Merged, like: Path, dtype: str = "float16") -> None:
    """Write `out` whole or not at all: matrices in `dtype`, norms and biases in float32.

    like: a GGUF file of the model before it was trained. Raises ModelError where it is another
    model's, UsageError for weights that `dtype` cannot hold.
    """
    model = ModelFile(like)
    names = GgufTensors(model)
    kind, file_type = _TYPES[dtype]
    partial = out.with_name(f"{out.name}.partial")
    writer = gguf.GGUFWriter(partial, model.architecture)
    writer.add_file_type(file_type)
    _add_metadata(writer, like, model, merged)
    written = set()
    for name, tensor in merged.tensors():
        stored = names.stored(name)
        if stored not in model.tensors:
            raise ModelError(f"{like}: has no {stored}: give a GGUF file of the model that was "
                             "trained")
        shape = model.tensors[stored].shape[::-1]
        if tuple(tensor.shape)[1:] != shape[1:] or (
                tuple(tensor.shape) != shape and merged.tokens is None):
            raise ModelError(f"{like}: its {stored} is {list(shape)}, not {list(tensor.shape)}: "
                             "give a GGUF file of the model that was trained")
        array = _as_stored(model, stored, tensor.numpy())
        matrix = array.ndim > 1
        data = gguf.quants.quantize(array, kind) if matrix else array
        if matrix and dtype == "float16" and not np.isfinite(data).all():
            raise UsageError(f"{name} has values that float16 cannot hold: give --dtype bfloat16")
        writer.add_tensor(stored, data, raw_dtype=kind if matrix else None)
        written.add(stored)
    for left in sorted(model.tensors.keys() - written):
        if left != "rope_freqs.weight":
            raise ModelError(f"{like}: has {left}, which the trained model does not: give a GGUF "
                             "file of the model that was trained")
        writer.add_tensor(left, names.read(left).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, out)


def _as_stored(model: ModelFile, stored: str, array: Any) -> Any:
    """An array of the Hugging Face layout as the converter would have written it."""
    array = np.ascontiguousarray(array, np.float32)
    own = declared(model.architecture)
    if own.paired and stored.endswith(
            (".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")):
        heads: Any = model.arch_get("attention.head_count")
        if ".attn_k." in stored:
            heads = model.arch_get("attention.head_count_kv", heads)
        turned = np.empty_like(array)
        turned[half_split(len(array), int(heads))] = array
        return turned
    return array + own.torch.norm_offset if stored.endswith("norm.weight") else array


def _add_metadata(writer: gguf.GGUFWriter, like: Path, model: ModelFile, merged: Merged) -> None:
    new = merged.tokens
    for name, field in gguf.GGUFReader(like).fields.items():
        if name.startswith(("GGUF.", "split.")) or name in _DROPPED:
            continue
        value = field.contents()
        if new is not None:
            value = _grown(name, value, model.architecture, merged)
        copy_field(writer, field, value)


def _grown(name: str, value: Any, architecture: str, merged: Merged) -> Any:
    """A value of the vocabulary with the new tokens in it."""
    if name == f"{architecture}.vocab_size":
        return merged.n_vocab
    fresh: dict[str, Any] = {"tokens": "", "token_type": int(gguf.TokenType.USER_DEFINED),
                             "scores": 0.0}
    part = name.removeprefix("tokenizer.ggml.")
    new = merged.tokens
    if new is None or part not in fresh or name == part:
        return value
    filler: dict[str, Any] = {"tokens": "", "token_type": int(gguf.TokenType.UNUSED), "scores": 0.0}
    grown = list(value)
    for number in range(len(grown), merged.n_vocab):
        grown.append(f"[PAD{number}]" if part == "tokens" else filler[part])
    for k, text in enumerate(new.texts):
        grown[new.first + k] = text if part == "tokens" else fresh[part]
    return grown


def copy_field(writer: gguf.GGUFWriter, field: gguf.ReaderField, value: Any) -> None:
    """Write `value` under the name and with the type of another file's field."""
    kind = field.types[0]
    sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, value, kind, sub_type=sub)
