"""Tiny random models of every family, and Hugging Face's own forward pass over any mask."""

# ruff: noqa: E402  (whoever imports this is skipped where a package is missing)
from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

for _package in ("torch", "transformers", "safetensors"):
    pytest.importorskip(_package, reason=f"the torch backend needs {_package}")

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeinfer.backends.pytorch.backend import TorchBackend
from pipeinfer.backends.pytorch.options import TorchOptions

torch.set_num_threads(1)

VOCAB, LAYERS = 97, 4
SMALL = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 1024, "head_dim": 16, "tie_word_embeddings": False,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
#: name -> (model type, what differs from SMALL)
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True,
                                  "mlp_bias": True}),
    "llama-3-rope": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    "llama-linear": ("llama", {"rope_parameters": {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 256}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9,
                               "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 9,
                               "max_window_layers": 2}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-part-rotated": ("phi3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "gemma": ("gemma", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 24,
                          "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "query_pre_attn_scalar": 24,
                               "layer_types": ALTERNATING, "tie_word_embeddings": True}),
}


def reference(family="llama", **changes):
    """A random model whose outputs differ strongly between tokens, in float32."""
    kind, extra = FAMILIES[family]
    torch.manual_seed(5)
    config = CONFIG_MAPPING[kind](**{**SMALL, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(model, path, **how):
    """The model as a folder; transformers' progress bar goes nowhere."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(path, **how)
    return path


def load(path, layers=None, **changes):
    sizes = {"n_ctx": 512, "n_seq_max": 8, "n_batch": 64, "n_threads": 1,
             "options": TorchOptions(device="cpu")}
    return TorchBackend.load(path, layers=layers, **(sizes | changes))


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@torch.no_grad()
def forward(model, tokens):
    """Logits at every position of a plain text."""
    return model(torch.tensor([tokens])).logits[0].float().numpy()


@torch.no_grad()
def masked_forward(model, tokens, positions, seen, prefix=None):
    """Logits of rows at any positions, of which row r sees exactly those with seen[r].

    prefix: (keys and values by layer, who sees them: bool[n]).
    """
    mask = torch.where(torch.tensor(np.array(seen)), 0.0, -torch.inf)
    past = None
    if prefix is not None:
        pairs, who = prefix
        past = DynamicCache(config=model.config)
        for layer, (keys, values) in pairs.items():
            past.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        count = pairs[0][0].shape[0]
        left = torch.where(torch.tensor(who), 0.0, -torch.inf)[:, None].expand(-1, count)
        mask = torch.cat([left, mask], 1)
    out = model(torch.tensor([tokens]), position_ids=torch.tensor([positions]),
                attention_mask=mask[None, None], past_key_values=past, use_cache=past is not None)
    return out.logits[0].numpy()
