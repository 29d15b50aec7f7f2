"""Plain transformers; Mistral and Mixtral are "llama"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import Architecture, Cut, Torch
from pipeinfer.models.gguf import ModelFile


def _llama_config(model: ModelFile, _: Callable[..., Any]) -> dict[str, Any]:
    return {"attention_bias": True} if "blk.0.attn_q.bias" in model.tensors else {}


def _minicpm_scale(model: ModelFile) -> Mapping[str, float]:
    if model.arch_get(keys.RESIDUAL_SCALE) is not None:
        return {}
    return {keys.RESIDUAL_SCALE: float(
        np.float32(1.4) / np.sqrt(np.float32(model.n_layers), dtype=np.float32))}


ARCHITECTURES = (
    Architecture(("llama",), sliced=True, drawn="norm", layer_inputs=True, paired=True,
                 with_gaps="qwen2vl", torch=Torch(("llama", "mistral"), config=_llama_config)),
    Architecture(("qwen2",), sliced=True, slices_as="seed_oss",
                 renamed={"ffn_norm.weight": "post_attention_norm.weight"},
                 with_gaps="qwen2vl", torch=Torch(("qwen2",))),
    Architecture(("qwen3",), sliced=True, layer_inputs=True, with_gaps="qwen3vl",
                 torch=Torch(("qwen3",))),
    Architecture(("qwen2vl",), splits=False),
    Architecture(("arcee", "k2-horizon", "nanbeige")),
    Architecture(("starcoder2",), fills_width=True),
    Architecture(("stablelm",), Cut(head=True)),
    Architecture(("internlm2", "nemotron"), Cut(head=True), fills_width=True),
    Architecture(("command-r",), Cut(("logit_scale",)), fills_width=True),
    Architecture(("qwen3vl", "hunyuan_vl"), sections=True),
    Architecture(("ernie4_5", "hunyuan-dense", "seed_oss")),
    Architecture(("apertus",), Cut(arrays=tuple(f"xielu.{name}" for name in (
        "alpha_n", "alpha_p", "beta", "eps")), head=True)),
    Architecture(("falcon",), fills_width=True),
    Architecture(("glm4",), Cut((keys.NEXTN,)), partly=True, sliced=True, two_in_one=True,
                 entry="embd"),
    Architecture(("granite",), Cut(keys.SCALES), sliced=True),
    Architecture(("minicpm",), Cut(keys.SCALES, writes=_minicpm_scale), sliced=True,
                 embedding_scale=12.0),
    Architecture(("mistral3",), Cut(("attention.temperature_scale",)), sliced=True),
    # llama.cpp computes these without windows
    Architecture(("phi3",), Cut((keys.WINDOW,)), partly=True, fills_width=True,
                 torch=Torch(("phi3",))),
    Architecture(("phi2",), Cut(head=True), partly=True, fills_width=True),
    Architecture(("dflash",), splits=False, partly=True),
    # every fourth layer does not rotate
    Architecture(("smollm3",), Cut(step=4), sliced=True),
)
