"""Conversion of a GGUF model to the Hugging Face layout: config values, and tensors in float32.

The converter that made the file renamed the tensors, reordered pairs of the rotary embedding in
"llama" models and added one to Gemma's norm weights; here that is undone. Uses no torch modules.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pipeinfer.errors import ModelError, UnsupportedArchitecture
from pipeinfer.models.architectures import declared, keys
from pipeinfer.models.gaps import half_split
from pipeinfer.models.gguf import ModelFile

_GLOBAL = {"model.embed_tokens.weight": "token_embd.weight",
           "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",  # phi3: both in one
}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)\.(weight|bias)$")
#: metadata whose effect is not reproduced here
_REFUSED = ("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale",
            "attention.temperature_scale", "rope.scaling.attn_factor")


class GgufTensors:
    """A GGUF file's tensors by their Hugging Face names, dequantised to float32."""

    def __init__(self, model: ModelFile) -> None:
        self._model, self._own = model, declared(model.architecture)

    def has(self, name: str) -> bool:
        """Return whether the file has the tensor."""
        return self.stored(name) in self._model.tensors

    def read(self, name: str) -> Any:
        """Return the tensor in the Hugging Face layout. Raises ModelError when it is missing."""
        model, stored = self._model, self.stored(name)
        info = model.tensors.get(stored)
        if info is None:
            raise ModelError(f"{model.path}: tensor {stored!r} is missing; fetch the model again")
        array = self._array(stored)
        if self._own.paired and stored.endswith(
                (".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")):
            heads = int(model.arch_get("attention.head_count") or 1)  # type: ignore[arg-type]
            if ".attn_k." in stored:
                heads = int(model.arch_get("attention.head_count_kv", heads))  # type: ignore[arg-type]
            array = _paired_halves(array, heads)
        if self._own.torch.norm_offset and stored.endswith("norm.weight"):
            array = array - self._own.torch.norm_offset
        return torch.from_numpy(np.array(array, np.float32))  # the file's bytes are read-only

    def rope_factors(self) -> Any:
        """What the rotary frequencies are divided by, float32[head size / 2], or None."""
        if "rope_freqs.weight" not in self._model.tensors:
            return None
        return torch.from_numpy(np.array(self._array("rope_freqs.weight"), np.float32))

    def _array(self, stored: str) -> Any:
        info = self._model.tensors[stored]
        raw = np.frombuffer(b"".join(self._model.read_tensor(info)), np.uint8)
        shape = info.shape[::-1]
        rows = raw.reshape(*shape[:-1], -1)
        try:
            array = dequantize(rows, GGMLQuantizationType(info.type))
        except NotImplementedError:
            raise ModelError(f"{self._model.path}: tensor {stored!r} of type {info.type_name} "
                             "cannot be converted to floats; use another quantisation") from None
        return np.asarray(array, np.float32).reshape(shape)

    def stored(self, name: str) -> str:
        """Return the file's name of a tensor of the Hugging Face layout."""
        if name in _GLOBAL:
            return _GLOBAL[name]
        match = _LAYER.match(name)
        if match is None:
            return name
        names = {**_PARTS, **self._own.torch.names}
        return f"blk.{match[1]}.{names.get(match[2], match[2])}.{match[3]}"


def config_of(model: ModelFile) -> dict[str, Any]:
    """Return the keyword arguments for transformers' config of the model.

    Raises UnsupportedArchitecture for what the torch backend would compute differently, and
    ModelError for values that are no numbers.
    """
    for key in _REFUSED:
        if model.arch_get(key) not in (None, 0, 0.0, 1.0, False):
            raise UnsupportedArchitecture(f"{model.path}: {model.architecture}.{key} = "
                                          f"{model.arch_get(key)!r} is not supported by the torch "
                                          "backend")

    def number(key: str, default: Any = None) -> Any:
        value = model.arch_get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{model.path}: {model.architecture}.{key} is {value!r}, not a number")
        return value

    heads = int(number("attention.head_count"))
    size = int(number("attention.key_length", model.n_embd // heads))
    values: dict[str, Any] = {
        "hidden_size": model.n_embd, "num_hidden_layers": model.n_layers,
        "vocab_size": model.n_vocab, "intermediate_size": int(number("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)), "head_dim": size,
        "rms_norm_eps": float(number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(number("context_length", 4096)),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": _rope(model, float(number("rope.freq_base", 10000.0))),
        "pad_token_id": None,
    }
    if int(number("rope.dimension_count", size)) != size:
        raise UnsupportedArchitecture(f"{model.path}: only part of each head is rotated, which the "
                                      "torch backend does not support")
    if int(number("attention.value_length", size)) != size:
        raise UnsupportedArchitecture(f"{model.path}: keys and values have different sizes, which "
                                      "the torch backend does not support")
    if "rope_factors_long.weight" in model.tensors:
        raise UnsupportedArchitecture(f"{model.path}: its rotations depend on the length of the "
                                      "text so far (longrope), which the torch backend does not "
                                      "support")
    own = declared(model.architecture).torch.config(model, number)
    if "sliding_window" not in own and model.arch_get(keys.WINDOW) not in (None, 0):
        raise UnsupportedArchitecture(f"{model.path}: sliding windows in a GGUF file are not "
                                      "supported by the torch backend; use the Hugging Face folder")
    return values | own


def _rope(model: ModelFile, base: float) -> dict[str, Any]:
    kind = model.arch_get("rope.scaling.type", "none")
    factor = model.arch_get("rope.scaling.factor", 1.0)
    if kind in ("none", "", None):
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear" and isinstance(factor, int | float):
        return {"rope_type": "linear", "rope_theta": base, "factor": float(factor)}
    raise UnsupportedArchitecture(f"{model.path}: rotary scaling of type {kind!r} in a GGUF file "
                                  "is not supported by the torch backend; use the Hugging Face "
                                  "folder")


def _paired_halves(array: Any, heads: int) -> Any:
    """Undo the converter's change from (half, half) to neighbouring pairs in each head."""
    if array.shape[0] % (2 * heads):
        raise ModelError(f"a projection has {array.shape[0]} rows, which {heads} heads cannot "
                         "share evenly; the file is damaged, fetch it again")
    return array[half_split(array.shape[0], heads)]
