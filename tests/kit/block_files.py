"""Random DFlash, DFlash2 and DSpark drafts for a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from pipeinfer.models.gguf import ModelFile
from tests.kit.random_model import add_key, finish

BLOCK, RANK, KERNEL, GROUP, TOP = 8, 32, 4, 32, 4


def write_block_draft(path: Path, target: Path, taps: tuple[int, ...], kind: str = "dflash",
                      seed: int = 0, *, after: Sequence[int] = (), chosen: Sequence[int] = (),
                      **keys: object) -> Path:
    """Write a random draft of two layers.

    kind: dflash, dflash2 or dspark
    after: each token's successor, which a dspark names with a confidence of 0.95; none: random
    chosen: tokens that it can propose; none: all
    keys: of the metadata, by their names behind the architecture, with two underscores for a dot;
        None: left out
    """
    model = ModelFile(target)
    width, heads, ff, vocab = model.n_embd, 4, 64, model.n_vocab
    size, rng = width // heads, np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "dflash")
    entries: dict[str, object] = {
        "context_length": 4096, "embedding_length": width, "block_count": 2,
        "feed_forward_length": ff, "attention.head_count": heads, "attention.head_count_kv": 2,
        "attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size,
        "target_hidden_size": width, "vocab_size": vocab, "block_size": BLOCK,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "target_layers": list(taps), "mask": vocab - 20}
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, len(taps) * width), "enc.output_norm": (width,), "output_norm": (width,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in {
            "attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width),
            "attn_k": (2 * size, width), "attn_v": (2 * size, width), "attn_output": (width, width),
            "attn_q_norm": (size,), "attn_k_norm": (size,), "ffn_gate": (ff, width),
            "ffn_up": (ff, width), "ffn_down": (width, ff)}.items()}
        if kind == "dflash2":
            for name in ("attn", "ffn"):
                shapes[f"blk.{layer}.{name}_conv_base"] = (2, KERNEL, width)
                shapes[f"blk.{layer}.{name}_conv_proj"] = (2 * KERNEL * width // GROUP, width)
    if kind == "dspark":
        entries |= {"sample_from_anchor": True, "has_confidence_head": True}
        rank = len(after) or RANK
        shapes |= {"markov_w1": (vocab, rank), "markov_w2": (len(chosen) or vocab, rank),
                   "conf_proj": (1, width + rank)}
    if kind == "dflash2":
        entries |= {"conv_kernel_size": KERNEL, "conv_group_size": GROUP, "selector_rank": RANK,
                    "selector_top_k": TOP}
        shapes |= {"selector_predecessor": (vocab, RANK), "selector_successor": (vocab, RANK),
                   "selector_hidden": (RANK, width)}
    entries |= {name.replace("__", "."): value for name, value in keys.items()}
    for name, value in entries.items():
        key = "tokenizer.ggml.mask_token_id" if name == "mask" else f"dflash.{name}"
        if value is not None:  # None leaves a key out
            add_key(writer, key, value)
    given = {}
    if after:
        given = {"markov_w1": np.eye(vocab), "markov_w2": 1000 * np.eye(vocab)[np.argsort(after)],
                 "conf_proj": np.zeros(shapes["conf_proj"])}
        writer.add_tensor("conf_proj.bias", np.array([3.0], np.float32))
    if chosen:
        writer.add_tensor("d2t", np.array(chosen, np.int64))
    for name, shape in shapes.items():
        data = np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)
        data = given.get(name, data)
        writer.add_tensor(name if name.endswith("_base") else f"{name}.weight",
                          data.astype(np.float32))
    finish(writer)
    return path
