"""LoRA adapters: settings, matrices and new tokens changed, then merged into a small model and
written as a folder, whose tokenizer has to be usable.

An input is the files of an adapter. Needs torch and transformers.
"""

from __future__ import annotations

import functools
import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fuzz import safetensors_case as folders
from benchmarks.fuzz.mutate import (
    INTEGERS,
    TEXTS,
    VALUES,
    change_bytes,
    change_value,
    json_of,
)
from benchmarks.fuzz.runner import Kind

_SETTINGS = ("r", "lora_alpha", "peft_type", "use_rslora", "bias", "rank_pattern", "pipeinfer",
             "modules_to_save", "base_model_name_or_path", "target_modules")


@functools.cache
def base() -> folders.Files:
    """The model for which the adapters are."""
    return {name: raw for name, raw in folders.seeds()[0].items() if not name.startswith("bita")}


@functools.cache
def seeds() -> tuple[folders.Files, ...]:
    """Good adapters: matrices alone, and with new tokens."""
    import torch

    from pipeinfer_lab.training.adapt.lora import LoraAdapter, LoraSettings, NewTokens, save_adapter

    made, stem = [], "base_model.model.model.layers.{}.{}.lora_{}.weight"
    weights = {stem.format(layer, name, part): torch.full(shape, 0.25)
               for layer in range(2)
               for name, rows, columns in (("self_attn.q_proj", 32, 32), ("mlp.up_proj", 64, 32))
               for part, shape in (("A", (2, columns)), ("B", (rows, 2)))}
    first = json.loads(base()["config.json"])["vocab_size"]
    tokens = NewTokens(("<one>", "<two>"), first, torch.ones(2, 32))
    for new in (None, tokens):
        with tempfile.TemporaryDirectory() as place:
            save_adapter(Path(place), LoraAdapter(LoraSettings(2, 4.0), weights, "x", new))
            made.append({path.name: path.read_bytes() for path in sorted(Path(place).iterdir())})
    return tuple(made)


def make(draw: random.Random) -> bytes:
    """An adapter with one to three changes."""
    files = dict(draw.choice(seeds()))
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice(sorted(files))
        if draw.random() < 0.02 and len(files) > 1:
            del files[name]
        else:
            files[name] = _change(draw, name, files[name])
    return folders.pack(files)


def _change(draw: random.Random, name: str, raw: bytes) -> bytes:
    try:
        if name.endswith(".safetensors") and draw.random() < 0.8:
            header, data = folders.header_of(raw)
            return folders.weights(_change_header(draw, header), data)
        if name.endswith(".json") and draw.random() < 0.85:
            value = json.loads(raw)
            if isinstance(value, dict) and draw.random() < 0.6:
                value[draw.choice(_SETTINGS)] = draw.choice(VALUES)
            else:
                value = change_value(draw, value)
            return json_of(draw, value)
    except (ValueError, struct.error, RecursionError):
        pass
    return change_bytes(draw, raw)


def _change_header(draw: random.Random, header: Any) -> Any:
    about = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(about, dict) and "texts" in about and draw.random() < 0.4:
        texts = json.dumps(draw.choice((
            *VALUES, ["<one>", draw.choice(TEXTS)], ["<one>"], ["<one>", "<one>"], ["<one>", 1])))
        first = str(draw.choice((*INTEGERS, "x", 271, 1e3)))
        part = {"texts": texts} if draw.random() < 0.5 else {"first": first}
        return {**header, "__metadata__": {**about, **part}}
    if isinstance(header, dict) and draw.random() < 0.3:  # the same bytes in another shape
        names = [name for name, entry in header.items() if name != "__metadata__"
                 and isinstance(entry, dict) and isinstance(entry.get("shape"), list)]
        if names:
            name = draw.choice(names)
            shape = header[name]["shape"]
            count = 1
            for size in shape:
                count *= size if isinstance(size, int) else 1
            other = draw.choice(([count], [1, count], [count, 1], shape[::-1], [*shape, 1]))
            return {**header, name: {**header[name], "shape": other}}
    return folders.change_header(draw, header)


# --- use ------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import what cases use, and make the seeds."""
    import pipeinfer_lab.training.adapt.merged
    import pipeinfer_lab.training.adapt.write_folder  # noqa: F401

    seeds()


def examine(data: bytes, directory: Path) -> str:
    """Do with the adapter what `train merge` does."""
    from pipeinfer.models.locate import open_tokenizer
    from pipeinfer_lab.training.adapt.lora import load_adapter
    from pipeinfer_lab.training.adapt.merged import Merged
    from pipeinfer_lab.training.adapt.write_folder import write_folder

    model, adapter, out = (directory / name for name in ("model", "adapter", "out"))
    for folder, files in ((model, base()), (adapter, folders.unpack(data))):
        folder.mkdir()
        for name, raw in files.items():
            (folder / name).write_bytes(raw)
    merged = Merged(model, load_adapter(adapter))
    write_folder(out, merged)
    tokenizer = open_tokenizer(out)
    for new in () if merged.tokens is None else merged.tokens.texts:
        assert len(tokenizer.encode(new, special=True)) > 0
    return "merged"


KIND = Kind("lora", make, examine, prepare)
