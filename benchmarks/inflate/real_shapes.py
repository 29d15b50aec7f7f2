"""Writes models of well-known shapes with random weights, to try real sizes without real files.

A file has the tensors, types and metadata of its model, so it takes as long to load and to compute,
and needs as much memory. Its text is noise. Rows of each matrix are drawn from a small pool of
quantised rows, since drawing gigabytes would take minutes. One tensor at a time is in memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.kit.random_architectures import (
    ALONE,
    RECIPES,
    STATEFUL,
    Key,
    Recipe,
    Shape,
    Sizes,
    tensors_of,
)
from tests.kit.random_model import add_key, add_tokenizer, drawn, quantise

TYPES = ("Q4_0", "Q8_0", "Q4_K_M", "Q6_K", "F16", "BF16", "MXFP4")
_POOL = 512  #: different rows of a matrix
_LLAMA: dict[str, Key] = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0}


@dataclass(frozen=True, slots=True)
class RealShape:
    """One model's sizes. keys: metadata without the architecture's name, over the recipe's."""

    recipe: str
    sizes: Sizes
    n_vocab: int
    context: int = 8192
    keys: dict[str, Key] = field(default_factory=dict)
    head_norms: bool = False


def _mixture(experts: int, used: int, columns: int, **more: Key) -> dict[str, Key]:
    return {"expert_count": experts, "expert_used_count": used,
            "expert_feed_forward_length": columns, **more}


_OSS: dict[str, Key] = {"attention.sliding_window": 128, "rope.freq_base": 150000.0,
                        "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}
_PARTLY_ROTATED: dict[str, Key] = {"rope.dimension_count": 64, "rope.freq_base": 1e7,
                                   "rope.dimension_sections": [11, 11, 10, 0]}
_CHOSEN = "attention.indexer.top_k"
SHAPES = {
    "llama-8b": RealShape("llama", Sizes(32, 4096, 32, 8, 128, 14336), 128_256),
    "llama-70b": RealShape("llama", Sizes(80, 8192, 64, 8, 128, 28672), 128_256),
    "qwen3-14b": RealShape("llama", Sizes(40, 5120, 40, 8, 128, 17408), 151_936, head_norms=True),
    "qwen3-30b-a3b": RealShape("qwen3moe", Sizes(48, 2048, 32, 4, 128, 6144, 128, 768), 151_936,
                               keys=_mixture(128, 8, 768)),
    "gpt-oss-20b": RealShape("gpt-oss", Sizes(24, 2880, 64, 8, 64, 2880, 32, 2880), 201_088,
                             keys=_OSS | _mixture(32, 4, 2880)),
    "gpt-oss-120b": RealShape("gpt-oss", Sizes(36, 2880, 64, 8, 64, 2880, 128, 2880), 201_088,
                              keys=_OSS | _mixture(128, 4, 2880)),
    "glm-4.5-air": RealShape("glm4moe", Sizes(46, 4096, 96, 8, 128, 10944, 128, 1408, 1), 151_552,
                             keys=_mixture(128, 8, 1408, leading_dense_block_count=1)),
    "qwen3.5-0.8b": RealShape("qwen35-tied", Sizes(
        24, 1024, 8, 2, 256, 3584, delta=128, delta_keys=16, delta_values=16), 248_320,
        keys=_PARTLY_ROTATED),
    "qwen3.5-35b-a3b": RealShape("qwen35moe", Sizes(
        40, 2048, 16, 2, 256, 512, 256, 512, delta=128, delta_keys=16, delta_values=32), 248_320,
        keys=_PARTLY_ROTATED | _mixture(256, 8, 512, expert_shared_feed_forward_length=512)),
    "glm-5.2": RealShape("glm-dsa", Sizes(
        78, 6144, 64, 1, 192, 12288, 256, 2048, 3, latent=512, value=256, lora=2048, choosers=32,
        choose_first=3, choose_every=4),
        154_880, keys=_mixture(256, 8, 2048) | {_CHOSEN: 2048}),
    "deepseek-v4-flash": RealShape("deepseek4", Sizes(
        43, 4096, 64, 1, 128, 2048, 256, 2048, lora=1024, choosers=64, groups=8, group_lora=1024,
        used=6, vocab=129_280), 129_280,
        keys=_mixture(256, 6, 2048) | {_CHOSEN: 512, "attention.sliding_window": 128}),
    "minimax-m3": RealShape("minimax-m3", Sizes(
        60, 6144, 64, 4, 128, 12288, 128, 3072, 3, choosers=4), 200_064,
        keys=_mixture(128, 4, 3072, leading_dense_block_count=3) | {
            _CHOSEN: 16, "attention.indexer.block_size": 128, "rope.freq_base": 5e6}),
}


def _llama_layer(shape: RealShape) -> Callable[[Sizes, int], dict[str, Shape]]:
    plain = RECIPES["mistral3"].layer

    def layer(s: Sizes, i: int) -> dict[str, Shape]:
        norms: dict[str, Shape] = {"attn_q_norm.weight": (s.head,), "attn_k_norm.weight": (s.head,)}
        return plain(s, i) | (norms if shape.head_norms else {})

    return layer


def _recipe(shape: RealShape) -> Recipe:
    if shape.recipe != "llama":
        return (RECIPES | STATEFUL | ALONE)[shape.recipe]
    return Recipe("qwen3" if shape.head_norms else "llama", lambda s: _LLAMA | {
        "attention.key_length": s.head, "attention.value_length": s.head}, _llama_layer(shape))


def write_shape(path: Path, name: str, qtype: str, *, layers: int = 0, n_vocab: int = 0,
                vocabulary: Path | None = None, seed: int = 0,
                progress: Callable[[int, int], None] | None = None) -> int:
    """Write a model of the shape `name` to `path`; return the number of its parameters.

    qtype: one of TYPES, for most matrices.
    layers: write only so many; 0: all.
    n_vocab: number of tokens; 0: the shape's own.
    vocabulary: a GGUF file whose tokenizer is copied, instead of an invented one.
    progress: called with tensors written, and tensors in all.
    """
    shape = SHAPES[name]
    recipe, sizes = _recipe(shape), shape.sizes
    if layers:
        sizes = replace(sizes, n_layer=layers)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, recipe.architecture)
    writer.add_name(f"random {name}")
    tokens = _tokenizer(writer, vocabulary, n_vocab or shape.n_vocab)
    sizes = replace(sizes, vocab=tokens)
    for key, value in _keys(shape, recipe, sizes, tokens).items():
        add_key(writer, f"{recipe.architecture}.{key}", value)
    plan = list(_plan(recipe, sizes, tokens, qtype))
    for tensor, dims, kind in plan:
        if kind is None:
            plain = np.dtype(np.int32 if "tid2eid" in tensor else np.float32)
            writer.add_tensor_info(tensor, dims, plain, 4 * int(np.prod(dims)))
        else:
            row = _row_bytes(dims[-1], kind)
            writer.add_tensor_info(tensor, (*dims[:-1], row), np.dtype(np.uint8),
                                   int(np.prod(dims[:-1])) * row, raw_dtype=kind)
    rng = np.random.default_rng(seed)
    write_one_by_one(writer, partial, path, [functools.partial(_filled, rng, *one) for one in plan],
                     progress)
    return sum(int(np.prod(dims)) for _, dims, _ in plan)


def write_one_by_one(writer: gguf.GGUFWriter, partial: Path, path: Path,
                     makers: Sequence[Callable[[], npt.NDArray[Any]]],
                     progress: Callable[[int, int], None] | None) -> None:
    """Write a file whose metadata and shapes the writer has; `path` appears whole or not at all.

    partial: the writer's file. makers: make the tensors, in order; one at a time is in memory.
    """
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for index, make in enumerate(makers):
            writer.write_tensor_data(make())
            if progress is not None:
                progress(index + 1, len(makers))
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def parameters(name: str) -> int:
    """Return the number of parameters of a shape."""
    shape = SHAPES[name]
    return sum(int(np.prod(dims)) for _, dims, _ in _plan(
        _recipe(shape), shape.sizes, shape.n_vocab, "F16"))


def _keys(shape: RealShape, recipe: Recipe, sizes: Sizes, tokens: int) -> dict[str, Key]:
    return {"vocab_size": tokens, "context_length": shape.context,
            "embedding_length": sizes.width, "block_count": sizes.n_layer + recipe.further,
            "feed_forward_length": sizes.ff, "attention.head_count": sizes.heads,
            "attention.head_count_kv": sizes.kv_heads, "rope.dimension_count": sizes.head,
            **recipe.keys(sizes), **shape.keys}


def _plan(recipe: Recipe, sizes: Sizes, tokens: int, qtype: str
          ) -> Iterator[tuple[str, Shape, gguf.GGMLQuantizationType | None]]:
    """Yield name, shape (rows first) and type of each tensor; None: float32."""
    yield "token_embd.weight", (tokens, sizes.width), _type(qtype, "token_embd.")
    yield "output_norm.weight", (sizes.width,), None
    if not recipe.tied:
        yield "output.weight", (tokens, sizes.width), _type(qtype, "output.")
    for name, dims in tensors_of(recipe, sizes):
        plain = len(dims) == 1 or "gate_inp" in name or "bias" in name \
            or any(part in name for part in ("norm", "conv1d", "hc_", "_ape", "tid2eid"))
        yield name, dims, None if plain else _type(qtype, name)


def _type(qtype: str, name: str) -> gguf.GGMLQuantizationType:
    better = name.startswith(("output.", "token_embd.")) or "attn_v." in name or "ffn_down" in name
    if qtype == "Q4_K_M":
        qtype = "Q6_K" if better else "Q4_K"
    elif qtype == "MXFP4" and "_exps" not in name:  # as the published files have it
        qtype = "Q8_0"
    return gguf.GGMLQuantizationType[qtype]


def _row_bytes(columns: int, kind: gguf.GGMLQuantizationType) -> int:
    block, size = map(int, gguf.GGML_QUANT_SIZES[kind])
    if columns % block:
        raise ValueError(f"rows of {columns} elements are no whole blocks of {kind.name} "
                         f"({block}): choose another --type")
    return columns // block * size


def _filled(rng: np.random.Generator, name: str, dims: Shape,
            kind: gguf.GGMLQuantizationType | None) -> npt.NDArray[Any]:
    if kind is None:
        return drawn(rng, name, dims)
    rows = int(np.prod(dims[:-1]))
    pool = drawn(rng, name, (min(rows, _POOL), dims[-1]))
    packed = quantise(pool, kind).view(np.uint8)
    chosen = rng.integers(0, len(packed), rows)
    return packed[chosen].reshape(*dims[:-1], -1)


def _tokenizer(writer: gguf.GGUFWriter, vocabulary: Path | None, n_vocab: int) -> int:
    if vocabulary is None:
        add_tokenizer(writer, n_vocab)
        return n_vocab
    reader = gguf.GGUFReader(vocabulary)
    for one in reader.fields.values():
        if one.name.startswith("tokenizer."):
            writer.add_key_value(one.name, one.contents(), one.types[0],
                                 one.types[-1] if len(one.types) > 1 else None)
    return len(reader.fields["tokenizer.ggml.tokens"].data)
