"""GGUF files for tests: tiny models that can be sliced, and files with tensors and metadata that no
model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeinfer.models.gguf import ModelFile
from tests.kit import random_model
from tests.kit.random_model import RandomSpec, finish, write_random_model

_OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def write_sliceable(path: Path, qtype: str = "F32", **more: Any) -> ModelFile:
    """A random model of two layers and two KV heads, which k-quants can cut, too."""
    k_quants = qtype.endswith(("_M", "_K"))
    shape = {"n_embd": 512, "n_head": 8, "n_ff": 768} if k_quants else {
        "n_embd": 128, "n_head": 4, "n_ff": 160}
    spec: dict[str, Any] = {"qtype": qtype, "n_layer": 2, **shape, **more}
    return ModelFile(write_random_model(path, RandomSpec(**spec)))


def with_template(path: Path, template: str) -> Path:
    """A random model of one layer with this chat template; "": with the usual one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "CHAT_TEMPLATE", template or random_model.CHAT_TEMPLATE)
        return write_random_model(path, RandomSpec(n_layer=1))


def altered(source: Path, target: Path, tensors: dict[str, Any] | None = None,
            numbers: dict[str, int | list[int]] | None = None) -> Path:
    """The file at `source` with these tensors added or replaced (floats as they are; a pair of
    rows and type for others) and these metadata numbers."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in _OWN or name in (numbers or {}):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, number in (numbers or {}).items():
        if isinstance(number, list):
            writer.add_array(name, number)
        else:
            writer.add_uint32(name, number)
    changed = dict(tensors or {})
    for tensor in reader.tensors:
        new = changed.pop(tensor.name, (np.ascontiguousarray(tensor.data), tensor.tensor_type))
        _add(writer, tensor.name, new)
    for name, new in changed.items():
        _add(writer, name, new)
    finish(writer)
    return target


def _add(writer: Any, name: str, new: Any) -> None:
    if isinstance(new, tuple):
        writer.add_tensor(name, new[0], raw_dtype=new[1])
    else:
        writer.add_tensor(name, new)


def split(whole: Path, directory: Path, count: int = 3, stem: str = "model") -> list[Path]:
    """The model in `count` parts, as llama.cpp's gguf-split names and marks them."""
    reader = gguf.GGUFReader(whole)
    paths = []
    for no in range(count):
        path = directory / f"{stem}-{no + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        if no == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", no)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[no::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
        paths.append(path)
    return paths
