"""Model folders and BiTA adapters: JSON files, safetensors headers and weights changed.

An input is the files of a folder, each with its name and length. A case is used as the program
would use it: plans, tokenizer, chat template, adapter, and (where torch is there) the layers loaded
and a few rows decoded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.gguf_case import has_torch, use_torch
from benchmarks.fuzz.mutate import (
    INTEGERS,
    TEXTS,
    VALUES,
    change_bytes,
    change_value,
    json_of,
)
from benchmarks.fuzz.runner import Kind
from pipeinfer.errors import PipeinferError, RequestError

Files = dict[str, bytes]
_CONFIG_KEYS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
                "num_key_value_heads", "intermediate_size", "head_dim", "rope_theta",
                "max_position_embeddings", "rms_norm_eps", "rope_scaling", "rope_parameters",
                "model_type", "hidden_act", "sliding_window", "layer_types", "eos_token_id",
                "tie_word_embeddings", "quantization_config", "auto_map", "torch_dtype",
                "attention_bias", "num_local_experts")
TEXT = "The quick brown fox\n\té \U0001f642 <|im_start|>user 12345   x"


def pack(files: Files) -> bytes:
    """A folder in one piece."""
    return b"".join(struct.pack("<BI", len(name), len(data)) + name.encode() + data
                    for name, data in files.items())


def unpack(raw: bytes) -> Files:
    """The folder again."""
    files, at = {}, 0
    while at < len(raw):
        short, size = struct.unpack_from("<BI", raw, at)
        name = raw[at + 5 : at + 5 + short].decode()
        files[name] = raw[at + 5 + short : at + 5 + short + size]
        at += 5 + short + size
    return files


@functools.cache
def seeds() -> tuple[Files, ...]:
    """Good folders: one file of weights, several with an index, and an adapter in each."""
    from pipeinfer.models.bita_adapter import BitaAdapter, save_bita
    from pipeinfer.models.gguf import ModelFile
    from tests.kit.embedded_folder import write_folder
    from tests.kit.random_model import RandomSpec, write_random_model

    spec = RandomSpec(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=64, n_vocab=272, n_ctx=256)
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(write_random_model(Path(place) / "m.gguf", spec), Path(place) / "f")
        zeros = np.zeros((2, 3, 1, 16), np.float32)
        save_bita(folder / "bita.safetensors", BitaAdapter(np.ones((2, 32), np.float32), zeros,
                                                           zeros, {"prompts": "deep"}))
        one = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        assert ModelFile(Path(place) / "m.gguf").n_layers == 2
    return one, _in_parts(one)


def header_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """What a safetensors file says of its tensors, and their bytes."""
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def weights(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file; length: that it gives for its header."""
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data


def _in_parts(files: Files) -> Files:
    header, data = header_of(files["model.safetensors"])
    header.pop("__metadata__", None)
    parts: list[dict[str, Any]] = [{}, {}]
    blocks = [b"", b""]
    where = {}
    for number, (name, entry) in enumerate(header.items()):
        part = number % 2
        start, stop = entry["data_offsets"]
        at = len(blocks[part])
        blocks[part] += data[start:stop]
        parts[part][name] = {**entry, "data_offsets": [at, at + stop - start]}
        where[name] = f"model-{part}.safetensors"
    rest = {name: raw for name, raw in files.items() if name != "model.safetensors"}
    rest |= {f"model-{i}.safetensors": weights(parts[i], blocks[i]) for i in range(2)}
    index = {"metadata": {"total_size": len(data)}, "weight_map": where}
    return {**rest, "model.safetensors.index.json": json.dumps(index).encode()}


def make(draw: random.Random) -> bytes:
    """A folder with one to three changes."""
    files = dict(draw.choice(seeds()))
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice(sorted(files))
        if draw.random() < 0.4:
            name = next((n for n in files if n.startswith("model") and n.endswith("tensors")), name)
        if draw.random() < 0.03:
            del files[name]
        else:
            files[name] = _change(draw, name, files[name])
        if not files:
            break
    return pack(files)


def _change(draw: random.Random, name: str, raw: bytes) -> bytes:
    act = draw.random()
    if act < 0.2:
        high = 2000 if name.endswith("tensors") else None
        return change_bytes(draw, raw, 0, high)
    if act < 0.23:
        return raw[: draw.randrange(len(raw) + 1)]
    try:
        if name.endswith(".safetensors"):
            header, data = header_of(raw)
            length = draw.choice((None, None, None, None, draw.choice(INTEGERS)))
            return weights(change_header(draw, header), data, length)
        value = json.loads(raw)
    except (ValueError, struct.error, RecursionError):
        return change_bytes(draw, raw)
    if name == "config.json" and draw.random() < 0.6 and isinstance(value, dict):
        value[draw.choice(_CONFIG_KEYS)] = draw.choice(VALUES)
    else:
        value = change_value(draw, value)
    return json_of(draw, value)


def change_header(draw: random.Random, header: dict[str, Any]) -> Any:
    """One change to names, shapes, types or places of tensors."""
    names = [n for n in header if n != "__metadata__"]
    if not names or draw.random() < 0.3:
        return change_value(draw, header)
    name, act = draw.choice(names), draw.random()
    entry = dict(header[name]) if isinstance(header[name], dict) else {}
    if act < 0.3:
        old = entry.get("shape") if isinstance(entry.get("shape"), list) else []
        entry["shape"] = draw.choice((
            [*old, 1], old[::-1], [0], [-1], [2**31, 2**31],
            [draw.choice(INTEGERS)], draw.choice(VALUES), []))
    elif act < 0.6:
        old = entry.get("data_offsets") if isinstance(entry.get("data_offsets"), list) else []
        entry["data_offsets"] = draw.choice((
            [draw.choice(INTEGERS), draw.choice(INTEGERS)], old[::-1],
            [0, 0], draw.choice(VALUES), [1.5, 2.5], ["0", "4"]))
    elif act < 0.8:
        entry["dtype"] = draw.choice(("F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "X", "", None))
    else:
        other = draw.choice((*names, *TEXTS))
        return {**{n: e for n, e in header.items() if n != name}, other: entry}
    return {**header, name: entry}


# --- use ------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import what cases use, and make the seeds."""
    import pipeinfer.models.bita_adapter
    import pipeinfer.models.text.hf_tokenizer

    if has_torch():
        import pipeinfer.backends.pytorch.backend
        import pipeinfer.backends.pytorch.weights  # noqa: F401
    seeds()


def examine(data: bytes, directory: Path) -> str:
    """Do with the folder what a job does with its model and its adapter."""
    folder = directory / "model"
    folder.mkdir()
    for name, raw in unpack(data).items():
        (folder / name).write_bytes(raw)
    refused: list[PipeinferError] = []
    for use in (_use_header, _use_tokenizer, _use_adapter, _use_weights):
        try:
            use(folder)
        except PipeinferError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: "\n" in str(error))
    return "all"


def _use_header(folder: Path) -> None:
    from pipeinfer.models.hf_folder import ModelDir, torch_parts

    model = ModelDir(folder)
    assert len(model.fingerprint) == 64
    assert sum(model.layer_bytes) <= model.nbytes
    torch_parts(model, 4)
    model.get("general.file_type")
    for key in ("context_length", "attention.head_count", "attention.key_length"):
        model.arch_get(key)


def _use_tokenizer(folder: Path) -> None:
    from pipeinfer.models.locate import open_tokenizer

    tokenizer = open_tokenizer(folder)
    for special in (False, True):
        tokens = tokenizer.encode(TEXT, special=special)
        assert all(0 <= t < tokenizer.n_vocab for t in tokens)
        tokenizer.decode(tokens, special=True)
    for token in range(min(tokenizer.n_vocab, 300)):
        tokenizer.piece(token, special=True)
        tokenizer.is_markup(token)
    assert all(0 <= t < tokenizer.n_vocab for t in tokenizer.eog_ids)
    assert tokenizer.bos_id is None or 0 <= tokenizer.bos_id < tokenizer.n_vocab
    with contextlib.suppress(RequestError):
        tokenizer.apply_chat([{"role": "user", "content": TEXT}])


def _use_adapter(folder: Path) -> None:
    from pipeinfer.models.bita_adapter import load_bita

    adapter = load_bita(folder / "bita.safetensors")
    adapter.check(2, 32)
    adapter.prefix(0, 2)


def _use_weights(folder: Path) -> None:
    if has_torch():
        use_torch(folder)


KIND = Kind("safetensors", make, examine, prepare)
