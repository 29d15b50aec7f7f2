"""Writes tiny models with random weights, for tests: any size, type and seed, with a tokenizer.

The tokenizer is byte-level BPE over the 256 bytes, a few merges and control tokens, so every text
can be encoded. Weights are scaled so that logits have a spread of a few units, as a trained
model's have; the text that such a model writes is noise.

Does not know: training, or the embedded pair.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelError
from pipeinfer.models.architectures import declared
from pipeinfer.models.text.hf_tokenizer import byte_tokens
from tests.kit.random_architectures import (
    ALONE,
    EXPERT_FF,
    EXPERTS,
    HEADED,
    RECIPES,
    STATEFUL,
    VOCABULARY,
    Key,
    Recipe,
    Shape,
    Sizes,
    tensors_of,
)

#: mixes: the type of most matrices, and that of `output`, `attn_v` and `ffn_down`
_MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K"), "Q4_K_S": ("Q4_K", "Q5_K"), "Q5_K_M": ("Q5_K", "Q6_K"),
    **{name: (name, name) for name in ("F16", "BF16", "Q8_0", "Q6_K", "Q4_0", "MXFP4")},
}
_BETTER = ("output.", "attn_v.", "ffn_down")
_MERGES = ("t h", "th e", "i n", "a n", "an d", "Ġ the", "Ġ a", "e r", "o n", "r e")
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_RECIPES = RECIPES | STATEFUL | ALONE | HEADED
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """Shape of a random model. k-quants need rows (n_embd, n_ff) in multiples of 256.

    architecture: llama, qwen2, qwen3, or a name in RECIPES; see `tiny` for those. qtype: F32 or a
    name in `_MIXES`, which resemble llama.cpp's file types of that name. tied: no output matrix of
    its own. n_expert > 0 makes a mixture of experts of a llama. expert_ff: columns of an expert of
    a mixture by a recipe. pooling: llama.cpp's number for that of an embedding model, whose texts
    end with a token of their own.
    """

    architecture: str = "llama"
    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 128
    n_vocab: int = VOCABULARY
    n_ctx: int = 4096
    qtype: str = "F32"
    tied: bool = False
    n_expert: int = 0
    expert_ff: int = EXPERT_FF
    rope_freqs: bool = False
    pooling: int = 0
    seed: int = 0


def tiny(name: str, **changes: Any) -> RandomSpec:
    """A model by a recipe, as small as shows all that its architecture does; `changes` of it."""
    values: dict[str, Any] = {"n_layer": _RECIPES[name].layers, "n_embd": 256}
    return RandomSpec(architecture=name, **(values | changes))


def write_random_model(path: str | os.PathLike[str], spec: RandomSpec | None = None) -> Path:
    """Write a model of shape `spec` to `path` and return the path."""
    spec = spec or RandomSpec()
    _write(Path(path), spec)
    return Path(path)


def _write(path: Path, spec: RandomSpec) -> None:
    recipe = _RECIPES.get(spec.architecture)
    writer = gguf.GGUFWriter(path, recipe.architecture if recipe else spec.architecture)
    # llama.cpp wants further tokens in a vocabulary whose model's name begins like phi-3
    family = "" if spec.architecture == "phi3" else f" {spec.architecture}"
    writer.add_name(f"random{family} {spec.n_layer}x{spec.n_embd}")
    writer.add_vocab_size(spec.n_vocab)
    writer.add_context_length(spec.n_ctx)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer + (recipe.further if recipe else 0))
    keys = {} if recipe is None else _keys(spec, recipe)
    if "feed_forward_length" not in keys:
        writer.add_feed_forward_length(spec.n_ff)
    if "attention.head_count" not in keys:
        writer.add_head_count(spec.n_head)
    writer.add_rope_freq_base(10000.0)
    if recipe is not None:
        for key, value in keys.items():
            add_key(writer, key[1:] if key[0] == "/" else f"{recipe.architecture}.{key}", value)
    else:
        writer.add_head_count_kv(spec.n_head_kv)
        writer.add_rope_dimension_count(spec.n_embd // spec.n_head)
        writer.add_layer_norm_rms_eps(1e-5)
    if spec.n_expert:
        writer.add_expert_count(spec.n_expert)
        writer.add_expert_used_count(2)
    add_tokenizer(writer, spec.n_vocab)
    if spec.pooling:
        writer.add_pooling_type(gguf.PoolingType(spec.pooling))
        writer.add_add_eos_token(True)
    weights = _weights(spec) if recipe is None else _by_recipe(spec, recipe)
    for name, data in weights.items():
        if data.ndim == 1 or spec.qtype == "F32" or "gate_inp" in name or "bias" in name \
                or name.endswith(("ssm_a", "ssm_d")) or "conv1d" in name or "norm" in name \
                or "shortconv.conv" in name or "hc_" in name or "_ape" in name \
                or data.shape[-1] % 32:
            writer.add_tensor(name, data)
            continue
        better = any(part in name for part in _BETTER)
        only_experts = spec.qtype == "MXFP4" and "_exps" not in name  # as in published files
        kind = gguf.GGMLQuantizationType[
            "Q8_0" if only_experts else _MIXES[spec.qtype][better]]
        if kind.name in ("F16", "Q8_0"):
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, quantise(data, kind), raw_dtype=kind)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added to a writer, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sizes(spec: RandomSpec) -> Sizes:
    return Sizes(spec.n_layer, spec.n_embd, spec.n_head, spec.n_head_kv,
                 spec.n_embd // spec.n_head, spec.n_ff, expert_ff=spec.expert_ff,
                 vocab=spec.n_vocab)


def _keys(spec: RandomSpec, recipe: Recipe) -> dict[str, Key]:
    usual: dict[str, Key] = {"attention.head_count_kv": spec.n_head_kv,
                             "rope.dimension_count": spec.n_embd // spec.n_head}
    found = usual | recipe.keys(_sizes(spec))
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if found.get(key) == EXPERT_FF:
            found[key] = spec.expert_ff
    return found


def add_key(writer: gguf.GGUFWriter, key: str, value: Key) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _by_recipe(spec: RandomSpec, recipe: Recipe) -> dict[str, FloatArray]:
    """Like `_weights`, of a recipe's tensors."""
    rng = np.random.default_rng(spec.seed)
    norm = f"{declared(recipe.architecture).cut.norm}.weight"
    shapes = {"token_embd.weight": (spec.n_vocab, spec.n_embd), norm: (spec.n_embd,)}
    if not (spec.tied or recipe.tied):
        shapes["output.weight"] = (spec.n_vocab, spec.n_embd)
    weights = {name: drawn(rng, name, shape)
               for name, shape in (shapes | dict(tensors_of(recipe, _sizes(spec)))).items()}
    if "output.weight" not in weights:
        # or the likeliest token is the last one again, for ever
        weights[norm] *= rng.choice((-1.0, 1.0), spec.n_embd)
    return weights


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> FloatArray:
    """Values of a size that a trained model's might have, by what the tensor is."""
    if name.startswith("rope_"):
        return np.linspace(1, 8, shape[0]).astype(np.float32)
    if name.endswith("tid2eid.weight"):  # the experts of each token
        order = np.argsort(rng.random((shape[0], max(EXPERTS, shape[1]))))
        return order[:, :shape[1]].astype(np.int32)
    values = rng.standard_normal(shape)
    if name.endswith((".bias", "attn_sinks.weight")):
        values *= 0.1
    elif name.endswith("_ape.weight"):
        values *= 0.2
    elif "hc_" in name and len(shape) == 1:  # scales of mixes, and their bases
        values = 0.5 + 0.1 * values if name.endswith("scale.weight") else 0.5 * values
    elif name.endswith("ssm_a"):
        values = -np.exp(values)  # a state fades
    elif len(shape) == 1:
        values = 1.0 + 0.1 * values
    else:
        gain = 3.0 if name.startswith(("token_embd", "output")) else 2.0 \
            if name.endswith(("attn_q.weight", "attn_k.weight", "attn_qkv.weight")) else 1.0
        values *= gain / np.sqrt(shape[-1])
    return np.asarray(values, np.float32)


def _weights(spec: RandomSpec) -> dict[str, FloatArray]:
    """Name -> float32 matrix of shape (out, in), drawn in a fixed order."""
    rng = np.random.default_rng(spec.seed)
    width, ff, head = spec.n_embd, spec.n_ff, spec.n_embd // spec.n_head
    shapes: dict[str, Shape] = {"token_embd.weight": (spec.n_vocab, width)}
    if not spec.tied:
        shapes["output.weight"] = (spec.n_vocab, width)
    shapes["output_norm.weight"] = (width,)
    if spec.rope_freqs:
        shapes["rope_freqs.weight"] = (head // 2,)
    for i in range(spec.n_layer):
        layer: dict[str, Shape] = {"attn_norm.weight": (width,)}
        for name, heads in (("q", spec.n_head), ("k", spec.n_head_kv), ("v", spec.n_head_kv)):
            layer[f"attn_{name}.weight"] = (heads * head, width)
            if spec.architecture == "qwen2":
                layer[f"attn_{name}.bias"] = (heads * head,)
        if spec.architecture == "qwen3":
            layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        layer |= {"attn_output.weight": (width, spec.n_head * head), "ffn_norm.weight": (width,)}
        if spec.n_expert:
            layer["ffn_gate_inp.weight"] = (spec.n_expert, width)
        experts, suffix = ((spec.n_expert,), "_exps") if spec.n_expert else ((), "")
        layer |= {f"ffn_{name}{suffix}.weight": (*experts, *shape) for name, shape in (
            ("gate", (ff, width)), ("down", (width, ff)), ("up", (ff, width)))}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {name: drawn(rng, name, shape) for name, shape in shapes.items()}


def add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    tokens = byte_tokens() + [merge.replace(" ", "") for merge in _MERGES]
    n_normal = len(tokens)
    tokens += list(_CONTROL)
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab {n_vocab} is below {len(tokens)}, the tokenizer's own size")
    kinds = [int(gguf.TokenType.NORMAL)] * n_normal + [int(gguf.TokenType.CONTROL)] * len(_CONTROL)
    for i in range(n_vocab - len(tokens)):
        tokens.append(f"<unused{i}>")
        kinds.append(int(gguf.TokenType.UNUSED))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(n_normal)
    writer.add_eos_token_id(n_normal)
    writer.add_eot_token_id(n_normal + 2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def quantise(data: FloatArray, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Rows in a type that gguf-py cannot write: by ggml, which every llama.cpp library has (the
    function for whole files is missing in prebuilt ones)."""
    from pipeinfer.llama import binding

    plain = np.ascontiguousarray(data, np.float32)
    columns = plain.shape[-1]
    rows = plain.size // columns
    row_bytes = binding.ggml_row_size(kind, columns)
    out = np.empty((*plain.shape[:-1], row_bytes), np.uint8)
    source = plain.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    written = binding.ggml_quantize_chunk(kind, source, out.ctypes.data, 0, rows, columns, None)
    if written != out.nbytes:
        raise ModelError(f"ggml could not quantise {rows} rows of {columns} to {kind.name}")
    return out
