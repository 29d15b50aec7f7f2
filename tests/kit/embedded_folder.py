"""A GGUF of the "llama" family as a Hugging Face folder: for tests that need a real one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file

from pipeinfer.models.gguf import ModelFile

NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}


def write_folder(gguf_path: str | os.PathLike[str], folder: Path) -> Path:
    """Weights in float32, config, tokenizer and chat template of the file at `gguf_path`."""
    model: Any = ModelFile(gguf_path)
    folder.mkdir(parents=True, exist_ok=True)
    heads, kv = model.arch_get("attention.head_count"), model.arch_get("attention.head_count_kv")
    tensors: dict[str, Any] = {}
    for name, info in model.tensors.items():
        raw = np.frombuffer(b"".join(model.read_tensor(info)), np.uint8)
        shape = info.shape[::-1]
        array = dequantize(raw.reshape(*shape[:-1], -1), info.type).reshape(shape)
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):  # row 2i+h of a head goes to row h*half+i
                n = heads if parts[2] == "attn_q" else kv
                half = shape[0] // n // 2
                order = [head * 2 * half + 2 * i + h
                         for head in range(n) for h in range(2) for i in range(half)]
                array = array[order]
            name = f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm",
                    "output": "lm_head"}[parts[0]] + ".weight"
        tensors[name] = np.ascontiguousarray(array, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ids = {kind: model.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": model.n_embd, "num_hidden_layers": model.n_layers,
        "vocab_size": model.n_vocab, "intermediate_size": model.arch_get("feed_forward_length"),
        "num_attention_heads": heads, "num_key_value_heads": kv,
        "rms_norm_eps": model.arch_get("attention.layer_norm_rms_epsilon"),
        "rope_theta": model.arch_get("rope.freq_base"), "hidden_act": "silu",
        "max_position_embeddings": model.arch_get("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": ids["bos"], "eos_token_id": ids["eos"],
    }))
    write_tokenizer(model, folder)
    return folder


def write_tokenizer(model: Any, folder: Path) -> None:
    """The tokenizer's files of a ModelFile with a byte-level vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts, kinds = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in model.get("tokenizer.ggml.merges")]
    reader = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    reader.decoder = decoders.ByteLevel()
    reader.add_special_tokens([AddedToken(text, special=True, normalized=False)
                               for text, kind in zip(texts, kinds, strict=True) if kind == 3])
    reader.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": texts[model.get("tokenizer.ggml.bos_token_id")],
        "eos_token": {"content": texts[model.get("tokenizer.ggml.eos_token_id")]},
        "add_bos_token": bool(model.get("tokenizer.ggml.add_bos_token")),
        "chat_template": model.get("tokenizer.chat_template"),
    }))
    (folder / "generation_config.json").write_text(json.dumps({
        "eos_token_id": [model.get("tokenizer.ggml.eos_token_id"),
                         model.get("tokenizer.ggml.eot_token_id")]}))
