"""GGUF files: tiny models with metadata, tensor table, header or weights changed.

A case is used as the program would use it: read, fingerprint, vocabulary, chat template, shards
cut, loaded by llama.cpp and a few rows decoded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import random
import struct
import tempfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fuzz.mutate import FLOATS, INTEGERS, TEXTS, change_bytes
from benchmarks.fuzz.runner import Kind
from pipeinfer.errors import RequestError, UnsupportedArchitecture

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MANY = 10  #: layers that would make a case too slow
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2vl", "gemma", "gemma2", "gemma3", "phi3", "gpt2",
                  "falcon", "mamba", "bert", "t5", "deepseek2", "olmo2", "starcoder2", "rwkv6",
                  "mistral3", "qwen2moe", "qwen3moe", "granite", "clip", "command-r", "jamba")
_NUMBERS = {
    "attention.head_count": (0, 1, 2, 3, 4, 5, 64, 2**31), "block_count": (0, 1, 2, 3, 5, 600),
    "attention.head_count_kv": (0, 1, 2, 3, 4, 8, 64), "embedding_length": (0, 1, 31, 32, 64, 128),
    "feed_forward_length": (0, 1, 63, 64, 2**31), "vocab_size": (0, 1, 100, 320, 2**31),
    "rope.dimension_count": (0, 1, 7, 8, 15, 16, 17, 32, 2**20), "context_length": (0, 1, 2**31),
    "attention.key_length": (0, 1, 8, 16, 17, 64, 2**31), "expert_count": (0, 1, 3, 4, 300, 2**31),
    "attention.value_length": (0, 1, 8, 16, 17, 64, 2**31), "expert_used_count": (0, 1, 2, 5, 300),
    "attention.sliding_window": (0, 1, 4096), "attention.scale": (0.0, 1e30, float("nan")),
    "attention.layer_norm_rms_epsilon": FLOATS, "rope.freq_base": FLOATS,
    "rope.scaling.factor": FLOATS, "rope.scaling.type": ("none", "linear", "yarn", "longrope", "?"),
    "rope.scaling.original_context_length": (0, 1, 4096), "logit_scale": FLOATS,
    "tensor_data_layout": ("", "x"), "use_parallel_residual": (True, False),
    "pooling_type": (0, 1, 2, 3, 9), "attention.causal": (True, False),
}
_TOKENIZER = {
    "tokenizer.ggml.model": ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "none", "no_vocab",
                             ""),
    "tokenizer.ggml.pre": ("gpt-2", "default", "llama-bpe", "qwen2", "deepseek-llm", "?", ""),
    "tokenizer.ggml.add_bos_token": (True, False), "tokenizer.ggml.add_eos_token": (True, False),
    "tokenizer.ggml.add_space_prefix": (True, False),
    "tokenizer.ggml.remove_extra_whitespaces": (True, False),
    "tokenizer.ggml.padding_token_id": INTEGERS, "tokenizer.ggml.unknown_token_id": INTEGERS,
    "tokenizer.ggml.bos_token_id": INTEGERS, "tokenizer.ggml.eos_token_id": INTEGERS,
    "tokenizer.ggml.eot_token_id": INTEGERS, "tokenizer.ggml.eom_token_id": INTEGERS,
    "tokenizer.ggml.fim_pre_token_id": INTEGERS, "tokenizer.ggml.mask_token_id": INTEGERS,
    "tokenizer.ggml.token_type_count": INTEGERS,
    "tokenizer.chat_template": ("{{", "{% for x in range(10**9) %}a{% endfor %}",
                                "{{ 'a' * 10**9 }}", "{{ messages[9].x }}",
                                "{{ ''.__class__.__mro__ }}", "chatml",
                                "{{ ('a' * 10**6) * 10**6 }}", "{{ 10 ** 10 ** 10 }}"),
}
_TORCH_SHARE = 6  #: one case of so many goes to torch
TEXT = "The quick brown fox\n\té \U0001f642 <|im_start|>user 12345   x"


@dataclass(frozen=True)
class Meta:
    """A metadata entry; of an array `kind` is (9, kind of its values)."""

    key: bytes
    kind: tuple[int, ...]
    value: Any

    def pack(self) -> bytes:
        """Its bytes."""
        return _text(self.key) + struct.pack("<I", self.kind[0]) + _pack(self.kind, self.value)


@dataclass(frozen=True)
class Entry:
    """A line of the tensor table."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int

    def pack(self) -> bytes:
        """Its bytes."""
        dims = b"".join((d % 2**64).to_bytes(8, "little") for d in self.shape)
        return (_text(self.name) + struct.pack("<I", len(self.shape)) + dims
                + struct.pack("<IQ", self.kind % 2**32, self.offset % 2**64))


@dataclass(frozen=True)
class File:
    """A GGUF file taken apart."""

    meta: list[Meta]
    tensors: list[Entry]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None
    alignment: int = 32
    tail: bytes = field(default=b"")

    def pack(self) -> bytes:
        """The file's bytes."""
        n_tensors, n_meta = self.counts or (len(self.tensors), len(self.meta))
        head = struct.pack("<4sIQQ", b"GGUF", self.version, n_tensors % 2**64, n_meta % 2**64)
        out = head + b"".join(part.pack() for part in (*self.meta, *self.tensors))
        return out + bytes(-len(out) % self.alignment) + self.data + self.tail


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _pack(kind: tuple[int, ...], value: Any) -> bytes:
    if kind[0] == _STRING:
        return _text(value)
    if kind[0] == _ARRAY:
        head = struct.pack("<IQ", kind[1], len(value))
        return head + b"".join(_pack(kind[1:], v) for v in value)
    code = _CODES.get(kind[0], "I")
    if code in "fd":
        number = float(value)
        return struct.pack("<" + code, number if code == "d" or abs(number) < 3e38
                           or number != number else float("inf"))
    size = struct.calcsize("<" + code)
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


def parse(raw: bytes) -> File:
    """Take a good file apart."""
    at = 24

    def number(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, raw, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> bytes:
        nonlocal at
        length = number("Q")
        at += length
        return raw[at - length : at]

    def value(kind: int) -> tuple[tuple[int, ...], Any]:
        if kind == _STRING:
            return (kind,), text()
        if kind == _ARRAY:
            inner, count = number("I"), number("Q")
            return (kind, inner), [value(inner)[1] for _ in range(count)]
        return (kind,), number(_CODES[kind])

    n_tensors, n_meta = struct.unpack_from("<QQ", raw, 8)
    meta = []
    for _ in range(n_meta):
        key = text()
        meta.append(Meta(key, *value(number("I"))))
    tensors = []
    for _ in range(n_tensors):
        name = text()
        shape = tuple(number("Q") for _ in range(number("I")))
        tensors.append(Entry(name, shape, number("I"), number("Q")))
    return File(meta, tensors, raw[at + -at % 32 :])


# --- seeds ----------------------------------------------------------------------------------------


@functools.cache
def seeds() -> tuple[File, ...]:
    """Good files of several architectures, types and tokenizers."""
    from tests.kit.random_architectures import RECIPES
    from tests.kit.random_model import RandomSpec, tiny, write_random_model

    small: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_head_kv": 1, "n_ff": 64,
                             "n_vocab": 272, "n_ctx": 256}
    specs = [
        RandomSpec(**small), RandomSpec(**small, tied=True, rope_freqs=True),
        RandomSpec(**small, qtype="Q8_0", architecture="qwen2"),
        RandomSpec(**small, qtype="F16", architecture="qwen3"),
        RandomSpec(**small, n_expert=4),
        *(tiny(name, n_embd=64, n_head=2, n_head_kv=1, n_ff=64) for name in RECIPES
          if RECIPES[name].layers < _MANY),
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = [parse(write_random_model(Path(folder) / "m.gguf", spec).read_bytes())
                 for spec in specs]
    return (*files, _like_sentencepiece(files[0]))


def _like_sentencepiece(file: File) -> File:
    """The same model with a vocabulary of the other kind: scores, and bytes as <0x41>."""
    count = next(len(m.value) for m in file.meta if m.key == b"tokenizer.ggml.tokens")
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    tokens += [b"\xe2\x96\x81" + bytes([97 + i % 26]) * (i // 26 + 1)
               for i in range(count - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (count - 259)]
    meta = [m for m in file.meta if not m.key.startswith(b"tokenizer.")]
    return replace(file, meta=[
        *meta, Meta(b"tokenizer.ggml.model", (_STRING,), b"llama"),
        Meta(b"tokenizer.ggml.tokens", (_ARRAY, _STRING), tokens),
        Meta(b"tokenizer.ggml.scores", (_ARRAY, 6), [-float(i) for i in range(count)]),
        Meta(b"tokenizer.ggml.token_type", (_ARRAY, 5), kinds),
        Meta(b"tokenizer.ggml.bos_token_id", (4,), 1),
        Meta(b"tokenizer.ggml.eos_token_id", (4,), 2),
        Meta(b"tokenizer.ggml.unknown_token_id", (4,), 0),
        Meta(b"tokenizer.chat_template", (_STRING,), b"{{ messages[0]['content'] }}"),
    ])


# --- changes --------------------------------------------------------------------------------------


def make(draw: random.Random) -> bytes:
    """A file with one to three changes."""
    file = draw.choice(seeds())
    way = draw.random()
    if way < 0.75:
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            file = _change(draw, file)
        return file.pack()
    raw = file.pack()
    header = len(raw) - len(file.data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        raw = change_bytes(draw, raw, 0, header if way < 0.95 else None)
    return raw


def _change(draw: random.Random, file: File) -> File:
    act = draw.random()
    if act < 0.35:
        return _set_known(draw, file)
    if act < 0.65:
        return _change_meta(draw, file)
    if act < 0.92:
        return _change_tensor(draw, file)
    if act < 0.94:
        return replace(file, version=draw.choice((0, 1, 2, 3, 4, 2**24, 2**31)))
    if act < 0.96:
        counts = [len(file.tensors), len(file.meta)]
        which = draw.randrange(2)
        counts[which] = draw.choice((*INTEGERS, counts[which] - 1, counts[which] + 1))
        return replace(file, counts=(counts[0], counts[1]))
    if act < 0.98:
        return replace(file, data=file.data[: draw.randrange(len(file.data) + 1)])
    return replace(file, tail=draw.randbytes(draw.randrange(100)))


def _architecture(file: File) -> str:
    found = [m.value for m in file.meta if m.key == b"general.architecture"]
    return found[0].decode("latin-1") if found and isinstance(found[0], bytes) else "llama"


def _set_known(draw: random.Random, file: File) -> File:
    """A key that llama.cpp reads gets another value."""
    arch = _architecture(file)
    if draw.random() < 0.12:
        return _other_architecture(draw, file, draw.choice(_ARCHITECTURES))
    if draw.random() < 0.5:
        name = draw.choice(sorted(_NUMBERS))
        key, value = f"{arch}.{name}", draw.choice((*_NUMBERS[name], *_NUMBERS[name],
                                                    draw.choice(INTEGERS)))
    else:
        key = draw.choice(sorted(_TOKENIZER))
        value = draw.choice(_TOKENIZER[key])
    if draw.random() < 0.08:
        key, value = "general.alignment", draw.choice((0, 1, 7, 8, 16, 32, 48, 64, 4096, 2**31))
    raw = key.encode()
    old = [m for m in file.meta if m.key == raw]
    if isinstance(value, str):
        new = Meta(raw, (_STRING,), value.encode())
    elif isinstance(value, float):
        new = Meta(raw, (6,), value)
    elif isinstance(value, bool):
        new = Meta(raw, (7,), value)
    elif draw.random() < 0.15:
        new = Meta(raw, (_ARRAY, 4), [value] * draw.choice((0, 1, 2, 3, 40, 600)))
    else:
        new = Meta(raw, (old[0].kind[0] if old and old[0].kind[0] in _CODES else
                         draw.choice((4, 4, 5, 10)),), value)
    return replace(file, meta=[*(m for m in file.meta if m.key != raw), new])


def _other_architecture(draw: random.Random, file: File, name: str) -> File:
    old = _architecture(file).encode() + b"."
    rename = draw.random() < 0.8
    meta = []
    for entry in file.meta:
        if entry.key == b"general.architecture":
            entry = replace(entry, kind=(_STRING,), value=name.encode())
        elif rename and entry.key.startswith(old):
            entry = replace(entry, key=name.encode() + b"." + entry.key[len(old):])
        meta.append(entry)
    return replace(file, meta=meta)


def _change_meta(draw: random.Random, file: File) -> File:
    meta = list(file.meta)
    if not meta:
        return file
    at = draw.randrange(len(meta))
    entry, act = meta[at], draw.random()
    if act < 0.15 or isinstance(entry, _Raw):
        del meta[at]
    elif act < 0.2:
        meta.insert(draw.randrange(len(meta)), entry)
    elif act < 0.27:
        meta[at] = replace(entry, key=draw.choice((
            change_bytes(draw, entry.key), *(t.encode() for t in TEXTS), draw.choice(meta).key)))
    elif act < 0.35:
        kind = draw.choice(list(_CODES))
        meta[at] = Meta(entry.key, (kind,), draw.choice(INTEGERS))
    elif act < 0.4:
        meta[at] = Meta(entry.key, (_STRING,), draw.choice(TEXTS).encode())
    elif act < 0.45:
        deep = draw.choice((1, 2, 3, 50, 5000))
        value: Any = []
        for _ in range(deep):
            value = [value]
        raw = struct.pack("<IQ", _ARRAY, 1) * deep + struct.pack("<IQ", 4, 0)
        meta[at] = Meta(entry.key, (99,), 0)
        return replace(file, meta=[*meta[:at], _Raw(_text(entry.key) + struct.pack("<I", _ARRAY)
                                                   + raw), *meta[at + 1 :]])
    else:
        meta[at] = replace(entry, value=_change_meta_value(draw, entry))
    return replace(file, meta=meta)


class _Raw(Meta):
    """An entry of bytes that follow no rule."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(b"", (4,), raw)

    def pack(self) -> bytes:
        """Its bytes."""
        return bytes(self.value)


def _change_meta_value(draw: random.Random, entry: Meta) -> Any:
    if entry.kind[0] == _ARRAY:
        values = list(entry.value)
        act = draw.random()
        if act < 0.25:
            return values[: draw.randrange(len(values) + 1)]
        if act < 0.35:
            return values + values[:5]
        if act < 0.4:
            return values * 3
        if not values:
            return values
        for _ in range(draw.choice((1, 1, 5))):
            at = draw.randrange(len(values))
            values[at] = _scalar(draw, entry.kind[1], values)
        return values
    return _scalar(draw, entry.kind[0], [entry.value])


def _scalar(draw: random.Random, kind: int, others: list[Any]) -> Any:
    if kind == _STRING:
        old = draw.choice(others)
        return draw.choice((change_bytes(draw, old or b"x"), old, b"", b"\xff\xfe", b"a" * 5000,
                            draw.choice(TEXTS).encode()))
    if kind in (6, 12):
        return draw.choice(FLOATS)
    return draw.choice((*INTEGERS, *range(8)))


def _change_tensor(draw: random.Random, file: File) -> File:
    table = list(file.tensors)
    if not table:
        return file
    at = draw.randrange(len(table))
    entry, act = table[at], draw.random()
    if act < 0.12:
        del table[at]
    elif act < 0.18:
        table.insert(at, entry)
    elif act < 0.32:
        name = draw.choice((
            change_bytes(draw, entry.name), draw.choice(table).name, draw.choice(TEXTS).encode(),
            entry.name.replace(b"blk.0.", b"blk.%d." % draw.choice((1, 2, 3, 99, 2**31, 2**64)))))
        table[at] = replace(entry, name=name)
    elif act < 0.66:
        shape = list(entry.shape)
        which = draw.randrange(len(shape)) if shape else 0
        way = draw.random()
        if way < 0.5 and shape:
            shape[which] = draw.choice((*INTEGERS, shape[which] - 1, shape[which] + 1,
                                        shape[which] * 2, shape[which] // 2))
        elif way < 0.6:
            shape = shape[::-1]
        elif way < 0.75:
            shape = [*shape, draw.choice((1, 2, *INTEGERS))]
        elif way < 0.85:
            shape = shape[:-1]
        else:
            shape = [draw.choice((1, 2, 32, 64, *INTEGERS)) for _ in range(draw.randrange(7))]
        table[at] = replace(entry, shape=tuple(shape))
    elif act < 0.82:
        table[at] = replace(entry, kind=draw.choice((*range(45), 2**31, 2**32 - 1)))
    elif act < 0.94:
        table[at] = replace(entry, offset=draw.choice((
            *INTEGERS, entry.offset + 32, entry.offset - 32, entry.offset + 1,
            draw.choice(table).offset)))
    else:
        other = draw.randrange(len(table))
        table[at], table[other] = (replace(table[other], offset=entry.offset),
                                   replace(entry, offset=table[other].offset))
    return replace(file, tensors=table)


# --- use ------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import what cases use, and make the seeds; no model is loaded here."""
    import pipeinfer.backends.llamacpp.backend
    import pipeinfer.models.gaps
    import pipeinfer.models.shard
    import pipeinfer.models.text.tokenizer

    if has_torch():
        import pipeinfer.backends.pytorch.backend
        import pipeinfer.backends.pytorch.weights  # noqa: F401
    seeds()


def has_torch() -> bool:
    """Whether the other backend can be tried."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def examine(data: bytes, directory: Path) -> str:
    """Do with the file what a job does with its model."""
    from pipeinfer.models.gguf import ModelFile
    from pipeinfer.models.shard import check_splittable

    path = directory / "model.gguf"
    path.write_bytes(data)
    model = ModelFile(path)
    for key in model.meta_keys():
        model.get(key)
    assert len(model.fingerprint) == 64
    assert model.nbytes == len(data)
    assert sum(model.layer_bytes) <= len(data)
    if zlib.crc32(data) % _TORCH_SHARE == 0 and has_torch():
        use_torch(path)
        return "torch"
    _use_vocabulary(path)
    try:
        check_splittable(model)
    except UnsupportedArchitecture:
        _decode(path, (0, model.n_layers), model.n_layers)
        return "whole"
    _use_shards(model, directory)
    return "shards"


def _use_vocabulary(path: Path) -> None:
    from pipeinfer.models.locate import open_tokenizer

    tokenizer = open_tokenizer(path)
    try:
        for special in (False, True):
            tokens = tokenizer.encode(TEXT, special=special)
            assert all(0 <= t < tokenizer.n_vocab for t in tokens)
            tokenizer.decode(tokens, special=True)
        for token in range(tokenizer.n_vocab):
            tokenizer.piece(token, special=True)
            tokenizer.is_markup(token)
            tokenizer.token_text(token)
        assert tokenizer.eog_ids is not None
        try:
            tokenizer.apply_chat([{"role": "user", "content": TEXT}])
        except RequestError:
            pass
    finally:
        tokenizer.close()


def _use_shards(model: Any, directory: Path) -> None:
    from pipeinfer.models.gaps import GapModel
    from pipeinfer.models.shard import extract_shard

    total = model.n_layers
    cut = total // 2
    ranges = [(0, cut), (cut, total)] if cut else [(0, total)]
    cache = directory / "cache"
    paths = [extract_shard(model, start, stop, cache_dir=cache) for start, stop in ranges]
    gaps = None
    with contextlib.suppress(UnsupportedArchitecture):
        gaps = extract_shard(GapModel(model), 0, total, cache_dir=cache)
    for path, layers in zip(paths, ranges, strict=True):
        _decode(path, layers, total)
    if gaps is not None:
        _decode(gaps, (0, total), total, gaps=True)


def use_torch(path: Path) -> None:
    """Load a file or folder on torch, decode some rows."""
    from pipeinfer.backends.pytorch.backend import TorchBackend
    from pipeinfer.backends.pytorch.options import TorchOptions
    from pipeinfer.core.types import make_rows

    with contextlib.redirect_stderr(io.StringIO()):
        shard = TorchBackend.load(path, n_ctx=64, n_seq_max=2, n_batch=8, n_threads=1,
                                  options=TorchOptions(device="cpu"))
    try:
        top = shard.info.n_vocab - 1
        rows = make_rows([(min(t, top), i, (0,), True) for i, t in enumerate((0, 5, top))])
        assert shard.decode(rows) is not None
    finally:
        shard.close()


def _decode(path: Path, layers: tuple[int, int], total: int, gaps: bool = False) -> None:
    import numpy as np

    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
    from pipeinfer.backends.llamacpp.context import LlamaOptions
    from pipeinfer.core.types import make_rows

    first, last = layers[0] == 0, layers[1] == total
    shard = LlamaCppBackend.load(
        path, layers=layers, n_layers_total=total, first=first, last=last, n_ctx=256, n_seq_max=2,
        n_batch=16, n_threads=1, options=LlamaOptions(gaps=gaps))
    try:
        top = max(shard.info.n_vocab - 1, 0)
        for at in (0, 3):
            rows = make_rows([(min(t, top), at + i, (0,), True) for i, t in enumerate((0, 5, top))])
            hidden = None if first else np.ones((3, shard.info.n_embd), np.float32)
            out = shard.decode(rows, hidden)
            assert out is not None
            assert len(out) == 3
    finally:
        shard.close()


KIND = Kind("gguf", make, examine, prepare)
