"""Writes tiny models with random weights, for tests: any size, type and seed, with a tokenizer.

The tokenizer is byte-level BPE over the 256 bytes, a few merges and control tokens, so every text
can be encoded. Weights are scaled so that logits have a spread of a few units, as a trained
model's have; the text that such a model writes is noise.

Does not know: training, or the embedded pair.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelError
from pipeinfer.models.text.hf_tokenizer import byte_tokens

#: llama.cpp's file types for what gguf-py cannot quantise itself
_LLAMA_FTYPES = {"Q4_K_M": 15, "Q4_K_S": 14, "Q5_K_M": 17, "Q6_K": 18, "Q4_0": 2, "BF16": 32}
_MERGES = ("t h", "th e", "i n", "a n", "an d", "Ġ the", "Ġ a", "e r", "o n", "r e")
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """Shape of a random model. k-quants need rows (n_embd, n_ff) in multiples of 256.

    qtype: F32, F16, Q8_0 or any of llama.cpp's file types such as Q4_K_M. tied: no output matrix
    of its own. n_expert > 0 makes a mixture of experts.
    """

    architecture: str = "llama"
    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 128
    n_vocab: int = 320
    n_ctx: int = 4096
    qtype: str = "F32"
    tied: bool = False
    n_expert: int = 0
    rope_freqs: bool = False
    seed: int = 0


def write_random_model(path: str | os.PathLike[str], spec: RandomSpec | None = None) -> Path:
    """Write a model of shape `spec` to `path` and return the path."""
    spec = spec or RandomSpec()
    target = Path(path)
    if spec.qtype in ("F32", "F16", "Q8_0"):
        _write(target, spec, spec.qtype)
    else:
        plain = target.with_suffix(".f32")
        _write(plain, spec, "F32")
        _quantise(plain, target, spec.qtype)
        plain.unlink()
    return target


def _write(path: Path, spec: RandomSpec, qtype: str) -> None:
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_name(f"random {spec.architecture} {spec.n_layer}x{spec.n_embd}")
    writer.add_vocab_size(spec.n_vocab)
    writer.add_context_length(spec.n_ctx)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_head)
    writer.add_head_count_kv(spec.n_head_kv)
    writer.add_rope_dimension_count(spec.n_embd // spec.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if spec.n_expert:
        writer.add_expert_count(spec.n_expert)
        writer.add_expert_used_count(2)
    _add_tokenizer(writer, spec.n_vocab)
    for name, data in _weights(spec).items():
        plain = data.ndim == 1 or qtype == "F32" or "gate_inp" in name
        if plain:
            writer.add_tensor(name, data)
        elif qtype == "F16":
            writer.add_tensor(name, data.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType[qtype]
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(spec: RandomSpec) -> dict[str, FloatArray]:
    """Name -> float32 matrix of shape (out, in), drawn in a fixed order."""
    rng = np.random.default_rng(spec.seed)
    width, ff = spec.n_embd, spec.n_ff
    head = width // spec.n_head

    def matrix(rows: int, columns: int, gain: float = 1.0) -> FloatArray:
        drawn = rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)
        return np.asarray(drawn, np.float32)

    def norm(size: int) -> FloatArray:
        return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def bias(size: int) -> FloatArray:
        return (0.1 * rng.standard_normal(size)).astype(np.float32)

    weights = {"token_embd.weight": matrix(spec.n_vocab, width, 3.0)}
    if not spec.tied:
        weights["output.weight"] = matrix(spec.n_vocab, width, 3.0)
    weights["output_norm.weight"] = norm(width)
    if spec.rope_freqs:
        weights["rope_freqs.weight"] = np.linspace(1, 8, head // 2).astype(np.float32)
    for i in range(spec.n_layer):
        sizes = {
            "attn_q": (spec.n_head * head, 2.0),
            "attn_k": (spec.n_head_kv * head, 2.0),
            "attn_v": (spec.n_head_kv * head, 1.0),
        }
        weights[f"blk.{i}.attn_norm.weight"] = norm(width)
        for name, (rows, gain) in sizes.items():
            weights[f"blk.{i}.{name}.weight"] = matrix(rows, width, gain)
            if spec.architecture == "qwen2":
                weights[f"blk.{i}.{name}.bias"] = bias(rows)
        if spec.architecture == "qwen3":
            weights[f"blk.{i}.attn_q_norm.weight"] = norm(head)
            weights[f"blk.{i}.attn_k_norm.weight"] = norm(head)
        weights[f"blk.{i}.attn_output.weight"] = matrix(width, spec.n_head * head)
        weights[f"blk.{i}.ffn_norm.weight"] = norm(width)
        if spec.n_expert:
            weights[f"blk.{i}.ffn_gate_inp.weight"] = matrix(spec.n_expert, width)
            shapes = (("gate", ff, width), ("down", width, ff), ("up", ff, width))
            for name, rows, columns in shapes:
                experts = [matrix(rows, columns) for _ in range(spec.n_expert)]
                weights[f"blk.{i}.ffn_{name}_exps.weight"] = np.stack(experts)
        else:
            weights[f"blk.{i}.ffn_gate.weight"] = matrix(ff, width)
            weights[f"blk.{i}.ffn_down.weight"] = matrix(width, ff)
            weights[f"blk.{i}.ffn_up.weight"] = matrix(ff, width)
    return weights


def _add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
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


def _quantise(source: Path, target: Path, qtype: str) -> None:
    import ctypes

    import llama_cpp

    from pipeinfer.models.llama import ensure_llama

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _LLAMA_FTYPES[qtype]
    params.nthread = 1
    ensure_llama()
    status = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    if status:
        raise ModelError(f"{source}: llama.cpp could not quantise it to {qtype}")
